from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from raypipe.digest import batch_digest, combine
from raypipe.plan import MicroBatchId
from raypipe.prefetcher import HostBatch

BATCH = HostBatch(
    at=MicroBatchId("train", 0, 1, 2),
    image=np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3),
    label=np.array([3, 4]),
    weight=np.ones(2, np.float32),
    index=np.array([7, 8]),
    num_bad=0,
)


def flipped(array: np.ndarray) -> np.ndarray:
    changed = array.copy()
    changed.flat[-1] += 1
    return changed


def test_golden_digests() -> None:
    assert batch_digest(BATCH).hex() == "8a1e5b905f132e445f95f9e3c819ba10"
    assert combine([b"a" * 16, b"b" * 16]) == "3106330ede3673ae78e9b017358c794a"


@pytest.mark.parametrize("name", ["image", "label", "weight", "index"])
def test_one_changed_value_changes_the_digest(name: str) -> None:
    changed = replace(BATCH, **{name: flipped(getattr(BATCH, name))})
    assert batch_digest(changed) != batch_digest(BATCH)


def test_the_place_and_the_shape_are_part_of_the_digest() -> None:
    assert batch_digest(replace(BATCH, at=MicroBatchId("val", 0, 1, 2))) != batch_digest(BATCH)
    assert batch_digest(replace(BATCH, image=BATCH.image.reshape(2, 1, 4, 3))) != batch_digest(BATCH)


def test_read_only_memory_gives_the_same_digest() -> None:
    frozen = BATCH.image.copy()
    frozen.flags.writeable = False
    assert batch_digest(replace(BATCH, image=frozen)) == batch_digest(BATCH)


def test_combine_is_of_the_order() -> None:
    assert combine([b"a", b"b"]) != combine([b"b", b"a"])
    assert combine(iter([b"a", b"b"])) == combine([b"a", b"b"])
