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


STORES = [of_parquet, of_lmdb, of_webdataset, in_memory]
Make = Callable[[Path, list[Any]], Store]


def type_in(*stores: Store, options: Any = None) -> ColumnType:
    column = "json.t" if str(stores[0].address).endswith(".tar") else "t"
    declared = column_options({column: options})
    by_split = dict(zip(("train", "val"), stores, strict=False))
    return find_columns(
        by_split, declared, None, lambda _: np.arange(NUM_PROBED), label=False
    ).types[column]


@pytest.mark.parametrize("values", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("make", STORES, ids=lambda make: make.__name__)
def test_samples_of_nothing_at_the_start_do_not_change_a_type(
    make: Make, values: list[Any], tmp_path: Path
) -> None:
    expected = type_in(make(tmp_path / "a", values * 10))
    for name, nothing in NOTHING.items():
        for num in (NUM_PROBED, 500) if make is in_memory else (NUM_PROBED,):
            assert (
                type_in(make(tmp_path / f"{name}{num}", nothing * num + values))
                == expected
            )


def test_the_search_for_a_value_ends_with_a_line_to_write(tmp_path: Path) -> None:
    values = [None] * 1039 + ["[1, 2]"] * 5
    store = in_memory(tmp_path, values)
    assert type_in(store, options={"length": 2}).dtype == "int64"
    late = in_memory(tmp_path, [None] * 10 + values)
    with pytest.raises(ConfigError, match=r"first 1040 .* store\.columns=\{t: \{dtype"):
        type_in(late, options={"length": 2})


@pytest.mark.parametrize("make", STORES, ids=lambda make: make.__name__)
def test_a_padded_column_has_the_type_of_its_first_number(
    make: Make, tmp_path: Path
) -> None:
    store = make(tmp_path / "a", [[]] * 20 + [[1, 2]])
    assert type_in(store, options={"length": 2, "fill": 0}).dtype == "int64"


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
    with pytest.raises(ConfigError, match="has no value in any"):
        type_in(in_memory(tmp_path, [None] * 40))
