"""Types of columns are those of the whole store, whatever its first samples lack."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tars import by_suffix, write_members

from raypipe.config import column_options
from raypipe.errors import ConfigError
from raypipe.stores import Store, open_store, open_writer
from raypipe.stores.memory import MemoryStore
from raypipe.transform.column_types import NUM_PROBED, find_columns
from raypipe.transform.columns import ColumnType

LISTS: dict[str, list[Any]] = {
    "integers": [[1, 2], [3], []],
    "floats": [[0.5], [1.5, 2]],
    "booleans": [[True, False], [True]],
    "texts": [["a"], ["b", "c"]],
    "pairs": [[[1, 2]], [[3, 4], [5, 6]]],
    "structs": [[{"id": 1}], []],
}
NOTHING: dict[str, list[Any]] = {"empty": [[]], "null": [None], "both": [[], None]}


def of_parquet(path: Path, values: list[Any]) -> Store:
    pq.write_table(
        pa.table({"image": [b"x"] * len(values), "t": values}),
        path.with_suffix(".parquet"),
    )
    return open_store(path.with_suffix(".parquet"))


def of_lmdb(path: Path, values: list[Any]) -> Store:
    """Lists are JSON there, as `raypipe convert` writes them."""
    with open_writer(
        path.with_suffix(".lmdb"), {"image": "binary", "t": "string"}
    ) as writer:
        for value in values:
            writer.append(
                {"image": b"x", "t": None if value is None else json.dumps(value)}
            )
    return open_store(path.with_suffix(".lmdb"))


def of_webdataset(path: Path, values: list[Any]) -> Store:
    contents = (json.dumps({"label": 0, "t": value}).encode() for value in values)
    samples = ({"jpg": b"x", "json": content} for content in contents)
    return open_store(write_members(path.with_suffix(".tar"), by_suffix(samples)))


def in_memory(path: Path, values: list[Any]) -> Store:
    return MemoryStore([b"x"] * len(values), None, columns={"t": values})


Make = Callable[[Path, list[Any]], Store]


def type_in(*stores: Store, options: Any = None) -> ColumnType:
    column = "json.t" if str(stores[0].address).endswith(".tar") else "t"
    declared = column_options({column: options})
    by_split = dict(zip(("train", "val"), stores, strict=False))
    return find_columns(
        by_split, declared, None, lambda _: np.arange(NUM_PROBED), label=False
    ).types[column]


@pytest.mark.parametrize("values", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("make", [of_parquet, in_memory], ids=["parquet", "memory"])
def test_samples_of_nothing_do_not_change_the_type_of_a_schema(
    make: Make, values: list[Any], tmp_path: Path
) -> None:
    is_of_values = isinstance(values[0][0], list)  # which may have one length
    expected = type_in(make(tmp_path / "a", values * 10))
    for name, nothing in NOTHING.items():
        later = make(tmp_path / name, nothing * NUM_PROBED + values)
        if is_of_values:
            with pytest.raises(ConfigError, match="would tell its type: write"):
                type_in(later)
        else:
            assert type_in(later) == expected


@pytest.mark.parametrize("nothing", NOTHING.values(), ids=NOTHING)
def test_nothing_at_the_start_of_json_is_refused_with_the_line_to_write(
    nothing: list[Any], tmp_path: Path
) -> None:
    store = of_webdataset(tmp_path / "a", nothing * NUM_PROBED + [[1, 2]])
    with pytest.raises(
        ConfigError, match=r"store\.columns=\{json\.t: \{dtype: float32\}\}"
    ):
        type_in(store)
    if None not in nothing:
        declared = type_in(store, options={"dtype": "int16"})
        assert declared == ColumnType("ragged", "int16")


@pytest.mark.parametrize("make", [of_parquet, in_memory], ids=["parquet", "memory"])
def test_a_padded_column_has_the_type_of_its_schema(make: Make, tmp_path: Path) -> None:
    store = make(tmp_path / "a", [[]] * 20 + [[1, 2]])
    assert type_in(store, options={"length": 2, "fill": 0}).dtype == "int64"


def test_a_padded_column_of_text_has_the_dtype_that_is_declared(tmp_path: Path) -> None:
    store = of_lmdb(tmp_path / "a", [[]] * 20 + [[1, 2]])
    with pytest.raises(ConfigError, match="would tell its type"):
        type_in(store, options={"length": 2, "fill": 0})
    declared = type_in(store, options={"length": 2, "fill": 0, "dtype": "int8"})
    assert declared.dtype == "int8" and declared.is_padded


KINDS = [pa.int8(), pa.uint16(), pa.int64(), pa.float32(), pa.float64(), pa.bool_()]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_store_of_empty_lists_has_the_type_of_its_schema(
    kind: pa.DataType, tmp_path: Path
) -> None:
    for list_of in (pa.list_, pa.large_list):
        empty = of_parquet(tmp_path / "a", pa.array([[]] * 20, list_of(kind)))
        value = pa.scalar(1).cast(kind).as_py()
        filled = of_parquet(tmp_path / "b", pa.array([[value]] * 20, list_of(kind)))
        assert type_in(filled, empty) == type_in(empty)


def test_a_column_without_any_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no value in the first samples"):
        type_in(in_memory(tmp_path, [None] * 40))
