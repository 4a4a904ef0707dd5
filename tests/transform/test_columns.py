from __future__ import annotations

import datetime
import io
import json
from typing import Any

import numpy as np
import pytest
import torch

from raypipe.config import ColumnOptions, column_options
from raypipe.errors import ConfigError, SampleError, TransformError
from raypipe.stores.memory import MemoryStore
from raypipe.transform.column_types import as_declared, find_columns, type_by_values
from raypipe.transform.columns import ColumnMaker, ColumnType, SampleColumns
from raypipe.transform.fields import COLUMN, Ragged, Rows, in_group

KEY = (3, 4)


def array_bytes(value: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, value)
    return file.getvalue()


def maker(
    values: dict[str, Any], declared: Any = None, function: Any = None
) -> ColumnMaker:
    """Of a store with these columns, the first three of its samples tell the types."""
    num = len(next(iter(values.values())))
    store = MemoryStore([b"x"] * num, None, columns=values)
    options = column_options(list(values) if declared is None else declared)
    first, label = np.arange(min(3, num)), "label" in options
    return ColumnMaker(
        find_columns({"train": store}, options, function, lambda _: first, label)
    )


def made(columns: ColumnMaker, *rows: Any) -> dict[str, Any]:
    """The columns of a micro-batch of samples with these values; None = padding."""
    filled = Rows(columns.columns.fields(), len(rows))
    for number, row in enumerate(rows):
        if row is None:
            filled.leave_out(number)
        else:
            filled.put(
                number,
                number,
                columns.one(dict(zip(columns.columns.stored, row, strict=True)), KEY),
            )
    found = in_group(filled.finish(slice(None)), COLUMN)
    return {
        name: values.unpacked() if isinstance(values, Ragged) else values
        for name, values in found.items()
    }


# What types are found


def type_of(values: Any, options: ColumnOptions | None, fixed: bool) -> ColumnType:
    present = [value for value in values if value is not None]
    kind = type_by_values("a", present, options, fixed, "column 'a' of here")
    return as_declared("a", kind, options, "here")


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        ([1, 2], None, ColumnType("array", "int64")),
        ([1, 2.5], None, ColumnType("array", "float64")),
        ([True, False], None, ColumnType("array", "bool")),
        ([np.float32(1), None], None, ColumnType("array", "float32")),
        ([[1, 2], [], [3]], None, ColumnType("ragged", "int64")),
        ([[[1, 2.0]], [[3, 4], [5, 6]]], None, ColumnType("ragged", "float64", (2,))),
        ([[1, 2]], ColumnOptions(length=2), ColumnType("array", "int64", (2,))),
        (
            [[1], [1, 2, 3]],
            ColumnOptions(length=8, fill=0, dtype="int32"),
            ColumnType("array", "int32", (8,), 0, True),
        ),
        (["a", "b"], None, ColumnType("text")),
        (["[1, 2]"], ColumnOptions(dtype="int16"), ColumnType("ragged", "int16")),
        ([b"\0\1", b""], None, ColumnType("bytes")),
        (
            [b"\0\0\x80\x3f" * 4],
            ColumnOptions(dtype="float32", length=4),
            ColumnType("array", "float32", (4,)),
        ),
        ([{"a": 1}], None, ColumnType("json")),
        ([["a", "b"], ["c"]], None, ColumnType("json")),
        ([[[1], [1, 2]]], None, ColumnType("json")),
    ],
)
def test_the_type_of_a_column_is_found_by_its_values(
    values: Any, options: Any, expected: ColumnType
) -> None:
    assert type_of(values, options, False) == expected


def test_arrays_are_of_one_shape_where_the_store_says_so_and_else_lists() -> None:
    pair = [np.zeros((2, 3), np.uint8)] * 2
    assert type_of(pair, None, True) == ColumnType("array", "uint8", (2, 3))
    assert type_of(pair, None, False) == ColumnType("ragged", "uint8", (3,))


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ([1, "a"], None, "values of several types, int, str"),
        (["red"], ColumnOptions(dtype="int64"), "holds no numbers"),
        (
            [0.5],
            ColumnOptions(dtype="int64"),
            r"'a' of here has float64, and store\.columns\.a\.dtype is int64",
        ),
        ([3], ColumnOptions(length=2), "declared with a length"),
        ([[1], [[2]]], None, "of several shapes"),
        (
            [[1]],
            ColumnOptions(length=2, fill=-1, dtype="uint8"),
            r"store\.columns\.a\.fill is -1, which uint8",
        ),
        (
            [[1]],
            ColumnOptions(length=2, fill=0.5),
            "fill is 0.5, which int64 cannot hold",
        ),
    ],
)
def test_a_column_without_one_type_is_refused(
    values: Any, options: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        type_of(values, options, False)


@pytest.mark.parametrize(
    "columns",
    [
        {"a": {"size": 3}},
        {"a": {"length": -1}},
        {"a": {"fill": 0}},
        {"a": {"dtype": "object"}},
        [3],
        {"a": 3},
    ],
)
def test_wrong_options_are_refused_by_name(columns: Any) -> None:
    with pytest.raises(ConfigError, match=r"store\.columns"):
        column_options(columns)


def test_a_missing_column_is_told_with_those_that_are_there() -> None:
    with pytest.raises(
        ConfigError,
        match=r"'captoin' for store\.columns; did you mean caption\? its columns are image, ",
    ):
        maker({"caption": ["a"]}, ["captoin"])


def test_stores_whose_columns_differ_are_told_apart() -> None:
    one, two = (
        MemoryStore([b"x"], None, columns={"a": values}) for values in ([1], ["b"])
    )
    with pytest.raises(ConfigError, match=r"column 'a' is int64 in .*, and text in"):
        find_columns(
            {"train": one, "val": two},
            column_options(["a"]),
            None,
            lambda _: np.arange(1),
            label=False,
        )


# What becomes of samples


def test_numbers_arrays_and_texts_keep_their_values_and_padding_is_empty() -> None:
    columns = maker(
        {
            "score": np.array([1.5, 2.5], np.float32),
            "embedding": np.arange(6, dtype=np.int16).reshape(2, 3),
            "caption": ["a ré", ""],
            "raw": [b"\0\xff", b""],
            "meta": [{"a": [1, None]}, {}],
            "tags": [[7, 8], []],
        }
    )
    found = made(
        columns,
        [
            1.5,
            np.arange(3, dtype=np.int16),
            "a ré",
            b"\0\xff",
            {"a": [1, None]},
            [7, 8],
        ],
        None,
    )
    assert found["score"].tolist() == [1.5, 0] and found["score"].dtype == np.float32
    assert (
        found["embedding"].tolist() == [[0, 1, 2], [0, 0, 0]]
        and found["embedding"].dtype == np.int16
    )
    assert found["caption"] == ["a ré", ""] and found["raw"] == [b"\0\xff", b""]
    assert found["meta"] == [{"a": [1, None]}, None]
    assert [part.tolist() for part in found["tags"]] == [[7, 8], []] and found["tags"][
        1
    ].dtype == np.int64


def test_lists_are_padded_to_their_declared_length() -> None:
    columns = maker({"tags": [[1, 2, 3], []]}, {"tags": {"length": 4, "fill": -1}})
    found = made(columns, [[5, 6]], [[]], None)
    assert (
        found["tags"].tolist() == [[5, 6, -1, -1], [-1] * 4, [-1] * 4]
        and found["tags"].dtype == np.int64
    )
    assert found["tags_length"].tolist() == [2, 0, 0]


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        ("[1, 2]", "int64"),
        (np.array([1, 2], "<f4").tobytes(), "float32"),
        (array_bytes(np.array([1, 2])), "int32"),
    ],
)
def test_numbers_that_are_written_as_text_or_bytes_are_read(
    stored: Any, dtype: str
) -> None:
    found = made(
        maker({"a": [stored]}, {"a": {"length": 2, "dtype": dtype}}), [stored]
    )["a"]
    assert found.tolist() == [[1, 2]] and found.dtype == dtype


def test_a_npy_whose_first_bytes_are_damaged_is_not_read_as_raw_numbers() -> None:
    whole = array_bytes(np.arange(8, dtype=np.float32))
    columns = maker({"a": [whole] * 3}, {"a": {"dtype": "float32"}})
    with pytest.raises(
        SampleError,
        match=r"column 'a' does not begin as a \.npy, as in the first samples",
    ):
        columns.one({"a": b"\x92" + whole[1:]}, KEY)


def test_fields_of_structs_and_of_json_are_columns() -> None:
    values = {
        "meta": [{"size": {"w": 3}}],
        "json": [json.dumps({"caption": "a", "tags": [1]})],
    }
    columns = maker(values, ["meta.size.w", "json.caption", "json.tags"])
    found = made(columns, [{"size": {"w": 4}}, '{"caption": "b", "tags": [2, 3]}'])
    assert found["meta.size.w"].tolist() == [4] and found["json.caption"] == ["b"]
    assert found["json.tags"][0].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("first", "value", "options", "message"),
    [
        ("a", None, {}, "column 'a' has no value"),
        ("a", 3, {}, "column 'a' is a int, where it is text in the first"),
        (3, "b", {}, "holds no numbers"),
        (3, 2.5, {}, "is float64, where it is int64 in the first samples"),
        (
            np.int8(3),
            200,
            {},
            "has the number 200, and int8 cannot hold it: declare a wider dtype",
        ),
        (
            [1, 2],
            [1, 2, 3],
            {"length": 2},
            r"of shape \(3,\), where it is int64 \(2,\)",
        ),
        (
            [1],
            [1, 2, 3],
            {"length": 2, "fill": 0},
            "has 3 values, and its declared length is 2: raise store.columns",
        ),
        ([1, 2], [[1], [2, 3]], {}, "holds no numbers"),
        ([1, 2], 3, {}, r"of shape \(\), where it is lists of int64"),
        ([1, 2], ["a"], {}, "holds no numbers: they are <U1"),
    ],
)
def test_a_value_unlike_those_of_the_first_samples_is_bad(
    first: Any, value: Any, options: dict[str, Any], message: str
) -> None:
    values: Any = np.array([first]) if isinstance(first, np.generic) else [first]
    with pytest.raises(SampleError, match=message):
        maker({"a": values}, {"a": options}).one({"a": value}, KEY)


# A function that makes columns


def test_a_function_makes_the_columns_and_options_are_of_what_it_makes() -> None:
    def tokenize(columns: dict[str, Any]) -> dict[str, Any]:
        return {
            "tokens": [len(word) for word in columns["caption"].split()],
            "first": columns["caption"][:1],
        }

    columns = maker(
        {"caption": ["a dog"]},
        {"caption": {}, "tokens": {"length": 3, "fill": 0}},
        tokenize,
    )
    found = made(columns, ["the red cat"], ["x"])
    assert found.keys() == {"tokens", "tokens_length", "first"} and found["first"] == [
        "t",
        "x",
    ]
    assert found["tokens"].tolist() == [[3, 3, 3], [1, 0, 0]]


@pytest.mark.parametrize(
    "value",
    [{"a", "b"}, object(), lambda: 0, {"nested": [object()]}],
    ids=["set", "object", "function", "nested"],
)
def test_what_has_another_text_in_each_process_is_refused(value: Any) -> None:
    columns = maker(
        {"a": [1]}, function=lambda columns: {"made": {} if columns["a"] else value}
    )
    with pytest.raises(
        SampleError,
        match=r"column 'made' has a \w+, whose text differs from process to process",
    ):
        columns.one({"a": 0}, KEY)


def test_what_json_has_no_form_for_is_text() -> None:
    day = datetime.date(2026, 11, 26)
    columns = maker(
        {"a": [1]},
        function=lambda columns: {"made": {"day": day, "numbers": np.arange(2)}},
    )
    assert made(columns, [1])["made"] == [{"day": "2026-11-26", "numbers": [0, 1]}]


def test_a_functions_draws_depend_on_the_key_and_not_the_transforms() -> None:
    def keyed(columns: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"drawn": rng.random(2)}

    def globally(columns: dict[str, Any]) -> dict[str, Any]:
        return {"drawn": np.random.random(2)}

    for function in (keyed, globally):
        columns = maker({"a": [1]}, function=function)
        drawn = [
            columns.one({"a": 1}, key)["column.drawn"].tolist()
            for key in ((1, 2), (5, 6), (1, 2))
        ]
        assert drawn[0] == drawn[2] != drawn[1]
        assert columns.draws_globally == (function is globally)
    image = (
        np.random.Generator(np.random.Philox(key=np.array([1, 2], np.uint64)))
        .random(2)
        .tolist()
    )
    assert (
        maker({"a": [1]}, function=keyed).one({"a": 1}, (1, 2))["column.drawn"].tolist()
        != image
    )


def test_what_a_function_writes_into_a_list_is_not_in_the_store() -> None:
    def ended(columns: dict[str, Any]) -> dict[str, Any]:
        columns["tags"].append(9)
        columns["meta"]["seen"] = True
        return columns

    values = {"tags": [1, 2], "meta": {"by": "me"}}
    columns = maker({name: [value] for name, value in values.items()}, function=ended)
    for _ in range(2):
        assert columns.one(values, KEY)["column.tags"].tolist() == [1, 2, 9]
    assert values == {"tags": [1, 2], "meta": {"by": "me"}}


def test_a_failing_function_makes_a_bad_sample_and_no_dict_ends_the_run() -> None:
    columns = maker({"a": ["1"]}, function=lambda columns: {"b": int(columns["a"])})
    place = r"test_columns\.py:\d+ in <lambda>"
    with pytest.raises(
        TransformError,
        match=rf"transform\.make_columns failed at .*{place}: ValueError",
    ):
        columns.one({"a": "x"}, KEY)
    with pytest.raises(ConfigError, match="must return a dict"):
        maker({"a": [1]}, function=lambda columns: [1])
    with pytest.raises(ConfigError, match=r"make_columns failed at .*requires grad"):
        maker(
            {"a": [1]},
            function=lambda columns: {"b": torch.ones(2, requires_grad=True)},
        )


def test_a_column_that_a_function_leaves_out_has_no_value() -> None:
    columns = maker(
        {"a": [1]}, function=lambda columns: {"b": 1} if columns["a"] else {}
    )
    with pytest.raises(SampleError, match="column 'b' has no value"):
        columns.one({"a": 0}, KEY)


def test_a_column_that_nobody_makes_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"options of 'tokens', and transform\.make_columns makes b: make it too",
    ):
        maker({"a": [1]}, {"a": {}, "tokens": {"length": 3}}, lambda columns: {"b": 1})
    with pytest.raises(ConfigError, match="name those that it needs"):
        maker({"a": [1]}, {}, lambda columns: {"b": 1})


# Targets


def test_a_target_of_integers_is_classes_unless_its_dtype_is_declared() -> None:
    store = MemoryStore([b"x"], [3])
    as_int32 = maker(
        {"a": [1]}, function=lambda columns: {"label": np.int32(1)}
    ).columns
    assert as_int32.target is None and as_int32.types["label"].dtype == "int64"
    for declared, expected in (
        ([], None),
        (["label"], None),
        ({"label": {"dtype": "float32"}}, "float32"),
    ):
        found = find_columns(
            {"train": store}, column_options(declared), None, lambda _: np.arange(1)
        )
        assert (found.target and found.target.dtype) == expected


def test_a_target_is_numbers_of_one_shape() -> None:
    with pytest.raises(ConfigError, match="is the target, and is lists of int64"):
        maker({"label": [[1], [1, 2]]})
    assert SampleColumns().target is None and not SampleColumns()
