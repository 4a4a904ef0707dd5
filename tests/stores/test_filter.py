from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypipe.errors import ConfigError
from raypipe.stores import open_store, open_writer
from raypipe.stores.filter import matching
from raypipe.stores.memory import MemoryStore

STORE = MemoryStore(
    [b""] * 6,
    [0, 1, 2, 3, 4, 5],
    columns={
        "width": [10, 20, 30, 40, 50, 60],
        "name": ["a", "b", None, "d", "e", "f"],
        "ratio": [0.5, 1, 2, 3, 4, float("nan")],
    },
)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("width >= 30 and label != 3", [2, 4, 5]),
        ("not width > 20", [0, 1]),
        ("label in [1, 2] or name == 'f'", [1, 2, 5]),
        ("label not in (1, 2)", [0, 3, 4, 5]),
        ("20 < width <= 40", [2, 3]),
        ("width / 7 > 5", [3, 4, 5]),
        ("-label + 2 * width - 1 < 40", [0, 1]),
        ("name != 'a'", [1, 3, 4, 5]),
        ("name == None", [2]),
        ("name != None and True == (label > 1)", [3, 4, 5]),
        ("ratio > 1", [2, 3, 4]),
    ],
)
def test_a_filter_keeps_the_samples_that_it_is_true_for(
    expression: str, expected: list[int]
) -> None:
    keep = matching(STORE, expression)
    assert keep.dtype == bool and np.flatnonzero(keep).tolist() == expected


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        (
            "image == 3",
            r"no column 'image' for store\.filter; its columns are label, width, name, ratio",
        ),
        (
            "widht > 1",
            r"no column 'widht' for store\.filter; did you mean width\? its columns are label, width, ",
        ),
        ("width == 'a'", "cannot be evaluated on memory:.*int64, string"),
        ("width", "not true or false"),
        ("width > 1000", "is true for none of the 6 samples of memory"),
        ("width %", "invalid syntax; it may contain comparisons"),
        ("1 > 0", "it names no column; it may contain"),
        ("width.real > 3", "'width.real' is not allowed"),
        (
            "__import__('os').getcwd() == name",
            "is not allowed; it may contain comparisons",
        ),
        ("label in width", "'label in width' is not allowed: `in` takes a list"),
        ("name is None", "'name is None' is not allowed"),
        ("(" * 3000 + "width" + ")" * 3000, "it may contain"),
        ("label == 9223372036854775808", "9223372036854775808 is beyond 64 bits"),
        ("label in [1, 1" + "0" * 30 + "]", "is beyond 64 bits"),
        ("label in [1, 'a']", "cannot be evaluated .*int64, string"),
        ("name in [1]", "cannot be evaluated"),
        ("label in ['1']", "cannot be evaluated"),
        ("name / 2 > 0", "cannot be evaluated"),
        ("-name < 0", "cannot be evaluated"),
        ("width != -None", "'-None' is not allowed"),
        ("width != None + None", "'None \\+ None' is not allowed"),
        ("- " * 100_000 + "label == 1", "it may contain"),
        ("label" + " + 1" * 100_000 + " > 3", "it may contain"),
    ],
)
def test_what_is_no_filter_names_the_setting_and_what_is_allowed(
    expression: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        matching(STORE, expression)
    assert len(str(caught.value)) < 700


def test_a_store_without_sizes_says_how_to_make_them(tmp_path: Path) -> None:
    with open_writer(tmp_path / "a.lmdb") as writer:
        writer.append({"image": b"x", "label": 0})
    with pytest.raises(
        ConfigError, match=r"'width' .* are label, name; `raypipe convert` adds it"
    ):
        matching(open_store(tmp_path / "a.lmdb"), "width > 1")


def test_a_column_has_one_type_where_many_samples_in_a_row_have_no_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raypipe.stores.scan._CHUNK", 4)
    none: list[object] = [None] * 5
    columns = {
        "c": [*none, "a", "b", None],
        "flag": [*none, True, False, None],
        "n": [*none, 1, 2.5, None],
    }
    store = MemoryStore(
        [b""] * 8, list(range(8)), columns={**columns, "empty": [None] * 8}
    )
    for expression, expected in {
        "c in ['a']": [5],
        "c not in ['a']": [6],
        "not c in ['a']": [6],
        "c in ['b', None]": [0, 1, 2, 3, 4, 6, 7],
        "not flag": [6],
        "n * 2 > 2 or label == 0": [0, 6],
        "n in [1, 2.5]": [5, 6],
        "empty in ['a'] or empty in [1] or empty in [True] or label > 6": [7],
    }.items():
        assert np.flatnonzero(matching(store, expression)).tolist() == expected, (
            expression
        )


LEAST = -(1 << 63)


@pytest.mark.parametrize(
    ("values", "expression", "expected"),
    [
        ([4, 4, 0], "n / label > 1", [1]),  # of 0, 2 and 4
        ([4, 4, 0], "not (n / label > 1)", [2]),
        ([4, 4, 0], "n / (label - 2) == None", [1]),
        ([LEAST, 1, 2], f"n == {LEAST}", [0]),
        ([LEAST, 1, 2], f"n in [] or n in [{LEAST}]", [0]),
        ([LEAST, 1, 2], "n not in []", [0, 1, 2]),
        ([17_000_001, 3, 4], "n > 0.5 and n * n > 1e9 and n / 2 > 8e6", [0]),
        ([17_000_001, 3, 4], "n in [17000001.0, 0.5]", [0]),
    ],
)
def test_numbers_of_any_size_and_quotients_by_zero_are_evaluated(
    values: list[int], expression: str, expected: list[int]
) -> None:
    store = MemoryStore([b""] * 3, [0, 2, 4], columns={"n": values})
    assert np.flatnonzero(matching(store, expression)).tolist() == expected


@pytest.mark.system
def test_sixty_thousand_terms_are_evaluated() -> None:
    terms = " or ".join(f"label == {number}" for number in range(3, 60_003))
    assert np.flatnonzero(matching(STORE, terms)).tolist() == [3, 4, 5]
    assert np.flatnonzero(
        matching(STORE, f"label in {list(range(3, 60_003))}")
    ).tolist() == [3, 4, 5]


@pytest.mark.parametrize("as_json", [True, False], ids=["JSON", "structs"])
def test_a_filter_takes_fields_within_a_column(as_json: bool) -> None:
    values: list[dict[str, Any]] = [
        {"similarity": 0.2, "by": {"name": "a"}},
        {"similarity": None, "by": {"name": "b"}},
        {"similarity": 1, "by": None},
    ]
    meta = list(map(json.dumps, values)) if as_json else values
    store = MemoryStore([b""] * 3, None, columns={"meta": meta})
    for expression, expected in (
        ("meta.similarity > 0.3", [False, False, True]),
        ("meta.by.name == 'b' or meta.similarity < 0.3", [True, True, False]),
        ("meta.by.name == None", [False, False, True]),
    ):
        assert matching(store, expression).tolist() == expected
    with pytest.raises(ConfigError, match="is true for none"):
        matching(store, "meta.none == 1")
