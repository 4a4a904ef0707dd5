"""Columns and labels that are arrays, floats, or not there, in every format that can hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refused import store_refused
from tars import by_suffix, write_members

from raypipe.errors import StoreError
from raypipe.stores import Store, open_store, open_writer
from raypipe.stores.base import is_class
from raypipe.stores.filter import matching
from raypipe.stores.joined import JoinedStore
from raypipe.stores.memory import MemoryStore

from pictures import picture  # isort: skip

pytestmark = pytest.mark.usefixtures("in_own_folder")

EMBEDDINGS = np.arange(12, dtype=np.float32).reshape(4, 3) / 7
GRIDS = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
ORDER = np.array([3, 0, 2, 2])


def arrow_table(**more: Any) -> pa.Table:
    grid = pa.list_(pa.list_(pa.uint8(), 3), 2)
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(GRIDS)
    columns = {
        "image": pa.array([picture(number, 4, 4) for number in range(4)], pa.binary()),
        "embedding": pa.array(EMBEDDINGS.tolist(), pa.list_(pa.float32(), 3)),
        "grid": pa.array(GRIDS.tolist(), grid),
        "tensor": tensor,
        "ragged": pa.array([[1], [], [2, 3], [4]], pa.list_(pa.int16())),
    }
    return pa.table({**columns, **more})


def write_parquet(path: str, **more: Any) -> str:
    pq.write_table(arrow_table(**more), path, row_group_size=3)
    return path


def test_lists_of_a_fixed_size_and_tensors_are_arrays() -> None:
    store = open_store(write_parquet("a.parquet"))
    found = store.read(ORDER, ("embedding", "grid", "tensor", "ragged"))
    for column, expected in (
        ("embedding", EMBEDDINGS),
        ("grid", GRIDS),
        ("tensor", GRIDS),
    ):
        assert (
            isinstance(found[column], np.ndarray)
            and found[column].dtype == expected.dtype
        )
        assert np.array_equal(found[column], expected[ORDER])
        assert store.read(ORDER[:0], (column,))[column].shape == (
            0,
            *expected.shape[1:],
        )
    assert found["ragged"] == [[4], [1], [2, 3], [2, 3]]


def test_a_null_is_none_and_the_others_keep_their_type() -> None:
    lists = [[1, 2], None, [None, 3], [4, 5]]
    more = {
        "num": pa.array([1, None, 3, 4], pa.int32()),
        "pair": pa.array(lists, pa.list_(pa.int8(), 2)),
    }
    store = open_store(write_parquet("a.parquet", **more))
    found = store.read(np.array([3, 1, 0, 2]), ("num", "pair"))
    assert found["num"] == [4, None, 1, 3] and isinstance(found["num"][0], np.int32)
    assert (
        found["pair"][1] is None
        and found["pair"][3] is None
        and found["pair"][0].tolist() == [4, 5]
    )
    assert matching(store, "num < 4").tolist() == [True, False, True, False]


def test_labels_are_any_numbers_and_integers_are_classes() -> None:
    path = write_parquet(
        "a.parquet",
        score=pa.array([0.5, 1, 2, 3], pa.float32()),
        kind=pa.array([3, 2, 1, 0]),
    )
    for column, expected, of_class in (
        ("score", np.array([0.5, 1, 2, 3], np.float32), False),
        ("kind", np.array([3, 2, 1, 0]), True),
        ("embedding", EMBEDDINGS, False),
    ):
        store = open_store(path, target_column=column)
        found = store.read(ORDER)["label"]
        assert is_class(store) == of_class and found.dtype == expected.dtype
        assert np.array_equal(found, expected[ORDER])
    assert open_store(path, target_column="ragged").read(ORDER)["label"] == [
        [4],
        [1],
        [2, 3],
        [2, 3],
    ]


TYPES = {
    "image": "binary",
    "label": "int64",
    "embedding": "float32[3]",
    "grid": "uint8[2,3]",
}
OTHERS = {"caption": "string", "width": "int64", "score": "float64", "mask": "binary"}


@pytest.mark.parametrize("name", ["a.lmdb", "a.parquet"])
def test_writers_keep_columns_of_all_types(name: str) -> None:
    columns = {
        "caption": ["ä0", None, "ä2", ""],
        "width": [0, -1, 1 << 62, 3],
        "score": [0.5, 0.25, -1.5, 1e300],
        "mask": [b"m", None, b"", b"n"],
    }
    with open_writer(name, OTHERS | TYPES) as writer:
        for row in range(4):
            sample = {column: values[row] for column, values in columns.items()}
            sample |= {"embedding": EMBEDDINGS[row], "grid": GRIDS[row]}
            writer.append({**sample, "image": b"x" * row, "label": row})
    store = open_store(name)
    assert store.stored.names == ["image", "label", *OTHERS, "embedding", "grid"]
    found = store.read(ORDER, tuple(store.schema.names))
    for column, arrays in (("embedding", EMBEDDINGS), ("grid", GRIDS)):
        assert np.array_equal(found[column], arrays[ORDER])
        assert found[column].dtype == arrays.dtype
    for column, values in columns.items():
        assert list(found[column]) == [values[row] for row in ORDER]
    assert found["image"] == [b"x" * row for row in ORDER]
    assert found["label"].tolist() == ORDER.tolist() and is_class(store)
    as_target = open_store(name, target_column="embedding")
    assert "embedding" not in tuple(as_target.schema.names) and not is_class(as_target)
    assert np.array_equal(as_target.read(ORDER)["label"], EMBEDDINGS[ORDER])
    assert as_target.fingerprint != store.fingerprint
    message = r"'caption' has type string; labels must be .*: set target_column to "
    store_refused(message, name, target_column="caption")


@pytest.mark.parametrize(
    "value", [np.zeros(4, np.float32), np.array(["a", "b", "c"]), [[1], [2], [3]]]
)
def test_a_writer_refuses_an_array_of_another_shape(value: Any) -> None:
    with (
        pytest.raises(
            StoreError, match=r"column 'embedding' must be float32 \(3,\), got"
        ),
        open_writer("a.lmdb", TYPES) as writer,
    ):
        writer.append({"image": b"x", "label": 0, "embedding": value, "grid": GRIDS[0]})


def webdataset(name: str, *contents: Any) -> Store:
    samples = ({"jpg": b"x", "json": json.dumps(each).encode()} for each in contents)
    return open_store(write_members(Path(name), by_suffix(samples)))


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([1, 2], np.array([1, 2])),
        ([1, 2.5], np.array([1, 2.5])),
        ([[1, 0], [0, 1]], np.array([[1, 0], [0, 1]])),
    ],
)
def test_webdataset_has_labels_of_any_numbers(
    labels: Any, expected: np.ndarray
) -> None:
    store = webdataset("a.tar", *({"label": label} for label in labels))
    found = store.read(np.arange(2))["label"]
    assert found.dtype == expected.dtype and np.array_equal(found, expected)
    assert is_class(store) == (labels == [1, 2])


@pytest.mark.parametrize("labels", [[[1], [1, 2]], [1, [1]]])
def test_webdataset_refuses_labels_of_several_shapes(labels: Any) -> None:
    with pytest.raises(
        StoreError, match=r"\.tar: its labels and .*lists of different lengths"
    ):
        len(webdataset("a.tar", *({"label": label} for label in labels)))


def test_a_mixture_of_arrays_of_several_shapes_is_one_error() -> None:
    parts = {
        name: MemoryStore([b"x"] * 2, None, columns={"a": np.zeros((2, side))})
        for name, side in (("one", 2), ("two", 3))
    }
    with pytest.raises(
        StoreError,
        match=r"column 'a' has .*\[3\] in one store and .*\[2\] in another",
    ):
        JoinedStore(parts).read(np.arange(4), ("a",))


def test_a_fingerprint_in_memory_shows_each_number_and_no_memory_address() -> None:
    one, labels = np.zeros(3000), [1, None]
    other = one.copy()
    other[1500] = 1e-12  # NumPy shows neither
    images = [b"x"] * 2
    of_columns = {
        MemoryStore(images, [0, 1], columns={"a": [one, last]}).fingerprint
        for last in (one, other)
    }
    assert len(of_columns) == 2
    assert MemoryStore(images, labels).fingerprint == "e7997e5a384533baf699f3b653102f98"
