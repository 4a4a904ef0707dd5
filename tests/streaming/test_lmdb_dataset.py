"""LMDB as a `ray.data.Dataset`; most of it needs no cluster, as read tasks are plain generators."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from foreign_lmdbs import DUMPS, write_values
from pictures import CLASSES, samples

import raypipe
from raypipe.errors import ConfigError, StoreError
from raypipe.stores import open_writer
from raypipe.streaming.lmdb_dataset import LMDBDatasource

SAMPLES = samples(23)
IMAGES: Any = [sample["image"] for sample in SAMPLES]
LABELS: Any = [sample["label"] for sample in SAMPLES]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A store of two shards, with an array, text, and missing values."""
    kinds = {
        "image": "binary",
        "label": "int64",
        "vector": "float32[3]",
        "note": "string",
    }
    for number, part in enumerate((range(9), range(9, 23))):
        with open_writer(tmp_path / f"{number}.lmdb", kinds, CLASSES) as writer:
            for row in part:
                vector = np.full(3, row, np.float32)
                note = None if row < 12 else f"note {row}"
                writer.append(
                    {
                        "image": IMAGES[row],
                        "label": LABELS[row],
                        "vector": vector,
                        "note": note,
                    }
                )
    return tmp_path


def table(source: LMDBDatasource, parallelism: int) -> pa.Table:
    """What all tasks read, after a journey to other processes."""
    tasks = source.get_read_tasks(parallelism)
    blocks = [list(pickle.loads(pickle.dumps(task.read_fn))()) for task in tasks]
    for task, of_task in zip(tasks, blocks, strict=True):
        assert task.metadata.num_rows == sum(block.num_rows for block in of_task)
        assert all(block.schema == task.schema for block in of_task)
    return pa.concat_tables([block for of_task in blocks for block in of_task])


@pytest.mark.parametrize("parallelism", [1, 4, 23, 100])
def test_ranges_of_keys_are_all_samples_in_order(own: Path, parallelism: int) -> None:
    source = LMDBDatasource(own)
    assert len(source.get_read_tasks(parallelism)) == min(parallelism, 23)
    read = table(source, parallelism)
    assert read.column_names == ["image", "label", "vector", "note"]
    assert read["image"].to_pylist() == IMAGES and read["label"].to_pylist() == LABELS
    assert read["note"].to_pylist() == [None] * 12 + [
        f"note {row}" for row in range(12, 23)
    ]
    vectors = np.concatenate(
        [chunk.to_numpy_ndarray() for chunk in read["vector"].chunks]
    )
    assert (vectors == np.arange(23)[:, None]).all()


def test_names_sizes_and_classes_are_columns(own: Path) -> None:
    columns = ["class_name", "index", "name", "width", "height"]
    read = table(LMDBDatasource(own, columns=columns), 3).to_pydict()
    assert list(read) == columns
    assert read["class_name"] == [CLASSES[label] for label in LABELS] and read[
        "index"
    ] == list(range(23))
    assert read["name"][10] == f"{own}/1.lmdb, key 1"
    assert set(read["width"]) == {48} and set(read["height"]) == {40}


@pytest.mark.parametrize("kind", DUMPS)
def test_lmdbs_of_others_are_datasets(kind: str, tmp_path: Path) -> None:
    path = write_values(tmp_path / "a", IMAGES, LABELS, DUMPS[kind])
    read = table(LMDBDatasource(path, trust_pickles=kind == "pickle"), 4).to_pydict()
    assert read == {
        "image": IMAGES,
        "label": LABELS,
        "key": [str(row) for row in range(23)],
    }


def test_the_size_of_a_dataset_is_known_before_it_is_read(own: Path) -> None:
    source = LMDBDatasource(own)
    num_bytes = sum(map(len, IMAGES))
    assert num_bytes <= source.estimate_inmemory_data_size() <= 1.2 * num_bytes
    tasks = source.get_read_tasks(4)
    assert sum(task.metadata.num_rows or 0 for task in tasks) == 23
    assert list(tasks[0].metadata.input_files or ()) == [str(own)]
    assert LMDBDatasource(own, columns=["label"]).estimate_inmemory_data_size() < 1000


def test_wrong_columns_and_stores_are_one_error(own: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no column 'lable'; did you mean label"):
        raypipe.read_lmdb(own, columns=["lable"])
    with open_writer(tmp_path / "a.parquet") as writer:
        writer.append(SAMPLES[0])  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"a\.parquet is not LMDB: see ray\.data\.read_parquet"
    ):
        raypipe.read_lmdb(tmp_path / "a.parquet")
    with pytest.raises(StoreError, match="does not exist"):
        raypipe.read_lmdb(tmp_path / "absent.lmdb")
    path = write_values(tmp_path / "values", IMAGES, LABELS, DUMPS["msgpack"])
    with pytest.raises(ConfigError, match="has no class names: leave class_name out"):
        raypipe.read_lmdb(path, columns=["class_name"])
    with pytest.raises(StoreError, match="trust_pickles=True in Python"):
        raypipe.read_lmdb(
            write_values(tmp_path / "pickles", IMAGES, LABELS, DUMPS["pickle"])
        )
