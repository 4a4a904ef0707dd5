"""Bad samples are found, and named one by one, whatever the damage is; no Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raypipe.commands.checked_samples import CheckedSample, check_samples
from raypipe.commands.inspection import types_of
from raypipe.config import RunConfig, StoreConfig
from raypipe.errors import StoreError
from raypipe.stores import open_store
from raypipe.stores.base import Store
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.opening import run_columns

from pictures import picture  # isort: skip

NUM = 100
IMAGES = [picture(i) for i in range(NUM)]


def damaged(store: Store, **targets: str) -> dict[int, str]:
    checked = check_samples(store, np.arange(len(store)), targets)
    return {sample.index: sample.error for sample in checked if sample.error}


def test_a_sample_is_described_by_its_bytes_and_pixels() -> None:
    no_value = "no value: it is missing, cannot be read, or has over 512 MiB"
    store = MemoryStore([picture(0, 30, 50), b"no image", None], [0, 0, 0])
    assert list(check_samples(store, np.arange(3))) == [
        CheckedSample(0, "JPEG", len(picture(0, 30, 50)), 30, 50, ""),
        CheckedSample(1, "unknown", 8, 0, 0, "not an image: starts with 6e 6f 20"),
        CheckedSample(2, "unknown", 0, 0, 0, no_value),
    ]
    assert list(check_samples(store, np.arange(0))) == []


@pytest.mark.parametrize("error", [StoreError, OSError, ValueError])
def test_a_sample_that_breaks_the_read_of_many_is_found_alone(
    error: type[Exception],
) -> None:
    class Broken(MemoryStore):
        def read(
            self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")
        ) -> Any:
            if np.isin([5, 50, 51], indices).any():
                raise error("the disk says no")
            return super().read(indices, columns)

    found = damaged(Broken(IMAGES, [0] * NUM))
    expected = (
        "the disk says no"
        if error is StoreError
        else f"{error.__name__}: the disk says no"
    )
    assert found == dict.fromkeys([5, 50, 51], expected)


def test_lack_of_memory_is_not_the_samples_fault() -> None:
    class Poor(MemoryStore):
        def read(self, *arguments: Any) -> Any:
            raise MemoryError

    with pytest.raises(MemoryError):
        damaged(Poor(IMAGES, [0] * NUM))


def parquet(file: Path, labels: list[int | None], group_size: int) -> None:
    schema = pa.schema([("image", pa.binary()), ("label", pa.int64())])
    table = pa.table({"image": IMAGES, "label": labels}, schema=schema)
    pq.write_table(
        table, file, row_group_size=group_size, compression="none", use_dictionary=False
    )


@pytest.mark.parametrize("group_size", [1, 7, 30])
@pytest.mark.parametrize("column", [0, 1])
def test_a_row_group_that_cannot_be_read_is_all_of_its_samples(
    tmp_path: Path, group_size: int, column: int
) -> None:
    file = tmp_path / "train.parquet"
    parquet(file, [0] * NUM, group_size)
    group = 2
    chunk = pq.read_metadata(file).row_group(group).column(column)
    content = bytearray(file.read_bytes())
    # the header of a page
    content[chunk.data_page_offset : chunk.data_page_offset + 8] = b"\xff" * 8
    file.write_bytes(content)
    found = damaged(open_store(file))
    assert list(found) == list(range(group * group_size, (group + 1) * group_size))
    assert all(
        f"{file}, row group 2: cannot be read" in error for error in found.values()
    )


def test_a_missing_label_is_the_fault_of_its_sample(tmp_path: Path) -> None:
    labels: list[int | None] = [None if i in (3, 33, 34) else 0 for i in range(NUM)]
    parquet(tmp_path / "train.parquet", labels, 30)
    found = damaged(open_store(tmp_path / "train.parquet"))
    assert list(found) == [3, 33, 34] and "has a null label" in found[3]


def test_masks_and_boxes_are_checked_where_they_are_asked_for() -> None:
    mask = cv2.imencode(".png", np.zeros((40, 48), np.uint8))[1].tobytes()
    masks = [mask, mask, None, mask[:-30], picture(0), mask]
    boxes = [[0, 0, 9, 9, 0], [], [], [], [], [0, 0, 90, 9, 0]]
    store = MemoryStore(
        IMAGES[:6],
        None,
        columns={"seg": masks, "objects": [json.dumps(each) for each in boxes]},
    )

    assert damaged(store) == {}
    found = damaged(store, mask="seg")
    assert found.keys() == {2, 3, 4}
    assert (
        found[2] == "the mask has no value"
        and "PNG of a mask: " in found[3]
        and "no PNG" in found[4]
    )
    assert (
        "reaches out of the image of 48x40 pixels" in damaged(store, boxes="objects")[5]
    )
    assert damaged(store, mask="seg", boxes="objects").keys() == {2, 3, 4, 5}


def test_columns_are_checked_where_they_are_asked_for_and_described() -> None:
    values = {
        "caption": ["a", None, "c"],
        "pair": np.zeros((3, 2), np.float32),
        "tags": [[1], [], [1, 2, 3]],
    }
    store = MemoryStore([picture(0)] * 3, [0.5, 1, 2], columns=values)
    assert types_of(store) == {
        "image": "images",
        "label": "float64",
        "caption": "text",
        "name": "text",
        "pair": "float32 (2,)",
        "tags": "lists of int64",
    }
    run = RunConfig(
        store=StoreConfig(columns={"caption": {}, "tags": {"length": 2, "fill": 0}})
    )
    found = list(check_samples(store, np.arange(3), of_run=run_columns(run, store)))
    assert not found[0].error
    assert (
        "column 'caption' has no value" in found[1].error
        and "'tags' has 3 values" in found[2].error
    )
    assert not any(sample.error for sample in check_samples(store, np.arange(3)))
