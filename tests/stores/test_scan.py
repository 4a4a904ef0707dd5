"""Columns of a whole store: sizes that stand beside it, where they are, whose they are, and who finds them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raypipe.errors import ConfigError
from raypipe.stores import Store, open_store, open_writer
from raypipe.stores.base import MemoryStore
from raypipe.stores.filter import matching
from raypipe.stores.joined import JoinedStore
from raypipe.stores.scan import numbers_of, read_sizes, sizes_address, write_sizes

SIZES = np.array([[640, 480], [-1, -1], [256, 512], [300, 200]])


def write(path: Path, num: int = 4, **columns: list[int]) -> Store:
    with open_writer(path, {"image": "binary", "label": "int64", **dict.fromkeys(columns, "int64")}) as writer:
        for i in range(num):
            extra = {name: values[i] for name, values in columns.items()}
            writer.append({"image": b"x", "label": i, **extra})
    return open_store(path)


@pytest.mark.parametrize("name", ["a.lmdb", "a.parquet"])
def test_filters_and_weights_find_the_sizes_beside_a_store(name: str, tmp_path: Path) -> None:
    store = write(tmp_path / name)
    before = store.fingerprint
    assert write_sizes(store, SIZES) == f"{tmp_path}/_{name}.sizes.parquet"
    again = open_store(tmp_path / name)
    assert matching(again, "width >= 256 and label != 3").tolist() == [True, False, True, False]
    assert matching(again, "width > height").tolist() == [True, False, False, True]
    height = numbers_of(again, "height", "plan.weights")
    assert height.dtype == np.int64 and height.tolist() == SIZES[:, 1].tolist()
    assert again.fingerprint == before and again.columns == ("image", "label")


def test_the_file_of_sizes_is_no_shard_and_belongs_to_its_address(tmp_path: Path) -> None:
    for number in range(2):
        write(tmp_path / f"train-{number}.parquet", 2)
    for address in (tmp_path, f"{tmp_path}/train-*.parquet", f"{tmp_path}/train-{{0..1}}.parquet"):
        store = open_store(address)
        write_sizes(store, SIZES)
        assert len(open_store(address)) == 4
        assert matching(open_store(address), "width == 256").tolist() == [False, False, True, False]
    assert {path.name for path in tmp_path.iterdir() if path.name[0] == "_"} == {
        "_train-_.parquet.sizes.parquet",
        "_train-_0..1_.parquet.sizes.parquet",
    }


def test_a_mixture_may_have_them_in_one_store_and_beside_another(tmp_path: Path) -> None:
    write_sizes(write(tmp_path / "a.lmdb"), SIZES)
    b = write(tmp_path / "b.lmdb", 2, width=[5, 6], height=[7, 8])
    joined = JoinedStore({"a": open_store(tmp_path / "a.lmdb"), "b": b})
    assert numbers_of(joined, "width", "plan.weights").tolist() == [640, -1, 256, 300, 5, 6]


def test_a_stores_own_columns_come_first_and_nothing_is_looked_for(tmp_path: Path) -> None:
    store = write(tmp_path / "a.lmdb", 2, width=[5, 6], height=[7, 8])
    Path(sizes_address(store)).write_bytes(b"never read")
    assert matching(store, "width == 6 and height == 8").tolist() == [False, True]


def test_without_sizes_the_error_says_how_to_make_them(tmp_path: Path) -> None:
    store = write(tmp_path / "a.lmdb")
    with pytest.raises(
        ConfigError,
        match=r"'width' .* are label; `raypipe add-sizes .*a\.lmdb` adds",
    ):
        matching(store, "width > 1")
    with pytest.raises(ConfigError, match=r"no column 'size' for store.filter; its columns are $"):
        matching(MemoryStore([b""], None), "size > 1")
    assert read_sizes(MemoryStore([b""], None)) == {} and sizes_address(MemoryStore([b""], None)) == ""


def test_sizes_of_other_contents_are_refused(tmp_path: Path) -> None:
    address = write_sizes(write(tmp_path / "a.lmdb"), SIZES)
    (tmp_path / "a.lmdb").unlink()
    store = write(tmp_path / "a.lmdb", 3)
    with pytest.raises(ConfigError, match=r"_a\.lmdb\.sizes\.parquet has the sizes of .*`raypipe add-sizes .*`"):
        numbers_of(store, "width", "plan.weights")
    table = pa.table({"width": [1, 2, 3], "height": [1, 2, 3]})
    pq.write_table(table, address)
    with pytest.raises(ConfigError, match=r"has no sizes .*write it again"):
        numbers_of(store, "width", "plan.weights")
    for damage in (b"", b"PAR1", b"no parquet at all"):
        Path(address).write_bytes(damage)
        with pytest.raises(ConfigError, match="has no sizes"):
            numbers_of(store, "width", "plan.weights")


def test_in_a_bucket_they_are_an_object_beside_the_store(bucket: str, tmp_path: Path) -> None:
    from raypipe.stores.destination import new_remote

    with new_remote(f"{bucket}/a.lmdb", overwrite=False) as partial:
        write(partial)
    store = open_store(f"{bucket}/a.lmdb")
    assert write_sizes(store, SIZES) == f"{bucket}/_a.lmdb.sizes.parquet"
    assert matching(open_store(f"{bucket}/a.lmdb"), "height == 512").tolist() == [False, False, True, False]
