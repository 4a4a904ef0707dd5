from __future__ import annotations

import numpy as np
import pytest

from raypipe.errors import ConfigError
from raypipe.stores.base import MemoryStore
from raypipe.stores.filter import matching

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
def test_a_filter_keeps_the_samples_that_it_is_true_for(expression: str, expected: list[int]) -> None:
    keep = matching(STORE, expression)
    assert keep.dtype == bool and np.flatnonzero(keep).tolist() == expected


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("image == 3", r"no column 'image' for store\.filter; its columns are label, width, name, ratio"),
        ("widht > 1", r"no column 'widht' for store\.filter; did you mean width\? its columns are label, width, "),
        ("width == 'a'", "cannot be evaluated on memory:.*int64, string"),
        ("width", "neither true nor false"),
        ("width > 1000", "is true for none of the 6 samples of memory"),
        ("width %", "invalid syntax; allowed are comparisons"),
        ("1 > 0", "it names no column; allowed are"),
        ("width.real > 3", "'width.real' is not allowed"),
        ("__import__('os').getcwd() == name", "is not allowed; allowed are comparisons"),
        ("width ** 2 > 3", "is not allowed"),
        ("label in width", "'label in width' is not allowed: `in` takes a list"),
        ("label in [width]", "allowed are"),
        ("name is None", "'name is None' is not allowed"),
        ("(" * 3000 + "width" + ")" * 3000, "allowed are"),
    ],
)
def test_what_is_no_filter_names_the_setting_and_what_is_allowed(expression: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        matching(STORE, expression)


def test_a_filter_reads_the_columns_that_it_names_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Watched(MemoryStore):
        def read(self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")) -> dict[str, object]:
            asked.append((len(indices), columns))
            return super().read(indices, columns)

    monkeypatch.setattr("raypipe.stores.scan._CHUNK", 4)
    store = Watched([b""] * 6, list(range(6)), columns={"width": list(range(6))})
    assert np.flatnonzero(matching(store, "width > 1 and label < 5")).tolist() == [2, 3, 4]
    assert asked == [(4, ("width", "label")), (2, ("width", "label"))]
