"""Hashes of micro-batches: which changes they see, and that they are XXH3's, which other programs have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import xxhash

from raypipe.device.mixing import Mix
from raypipe.device.prefetcher import Batch
from raypipe.plan.places import MicroBatchId
from raypipe.streaming.hashes import batch_hash, combine
from raypipe.transform.fields import Field, MicroBatch, Ragged

PLACE = MicroBatchId("train", 0, 3, 1)


def micro_batch() -> MicroBatch:
    pixels = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
    texts = Ragged.of("text", [b"one", b"three"], Field("text"))
    fields: dict[str, np.ndarray | Ragged] = {
        "image": pixels,
        "label": np.array([5, 7]),
        "column.caption": texts,
    }
    return MicroBatch(PLACE, np.array([10, 11]), np.ones(2, np.float32), fields)


def with_field(name: str, value: np.ndarray | Ragged) -> MicroBatch:
    batch = micro_batch()
    return replace(batch, fields={**batch.fields, name: value})


def test_a_hash_is_xxh3_of_each_array_under_its_name() -> None:
    batch = MicroBatch(PLACE, np.array([4]), np.ones(1, np.float32), {})
    parts = b"index <i8 (1,)\n" + xxhash.xxh3_128_digest(batch.index.data)
    parts += b"weight <f4 (1,)\n" + xxhash.xxh3_128_digest(batch.weight.data)
    assert batch_hash(batch) == xxhash.xxh3_128_digest(parts)


def test_every_change_of_a_micro_batch_changes_its_hash() -> None:
    batch = micro_batch()
    pixels = batch["image"].copy()
    pixels[1, 3, 3, 2] += 1
    moved_end = Ragged.of("text", [b"onet", b"hree"], Field("text"))
    changed = [
        with_field("image", pixels),
        with_field("image", batch["image"].reshape(2, 2, 8, 3)),
        with_field("image", batch["image"].view(np.int8)),
        with_field("label", np.array([5, 8])),
        with_field("column.caption", moved_end),
        with_field("mask", np.zeros((2, 4, 4), np.uint8)),
        replace(batch, index=np.array([11, 10])),
        replace(batch, weight=np.array([1, 0], np.float32)),
    ]
    hashes = {batch_hash(one) for one in (batch, *changed)}
    assert len(hashes) == 1 + len(changed)


def test_a_hash_does_not_depend_on_the_place_or_on_the_memory() -> None:
    batch = micro_batch()
    elsewhere = replace(batch, position=MicroBatchId("val", 1, 0, 0), num_bad=1)
    wide = np.zeros((2, 4, 8, 3), np.uint8)
    wide[:, :, ::2] = batch["image"]
    strided = with_field("image", wide[:, :, ::2])
    backwards = replace(batch, fields=dict(reversed(batch.fields.items())))
    hashes = {batch_hash(one) for one in (batch, elsewhere, strided, backwards)}
    assert len(hashes) == 1


def batch_of(image: torch.Tensor) -> Batch:
    fields = {"image": image, "label": torch.tensor([5, 7])}
    host = np.array([5, 7])
    return Batch(PLACE, 1, fields, torch.ones(2), host, host, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_hash_of_a_batch_on_the_device_is_of_every_byte(dtype: torch.dtype) -> None:
    image = torch.rand(2, 3, 32, 32).to(dtype)
    batch = batch_of(image)
    first = batch_hash(batch)
    channels_last = image.to(memory_format=torch.channels_last)
    assert batch_hash(batch_of(channels_last)) == first and len(first) == 16
    hashes = {first}
    for row in range(32):
        other = image.clone()
        other[1, 2, row, 31] += 1
        hashes.add(batch_hash(batch_of(other)))
    hashes.add(batch_hash(replace(batch, mix=Mix(torch.tensor([7, 5]), 0.3, False))))
    hashes.add(batch_hash(replace(batch, weight=torch.zeros(2))))
    assert len(hashes) == 35


def test_combined_hashes_are_of_the_order() -> None:
    assert combine([b"a", b"b"]) != combine([b"b", b"a"])
    assert combine(iter([b"a", b"b"])) == combine([b"a", b"b"])
    assert combine([b"a" * 16, b"b" * 16]) == "3106330ede3673ae78e9b017358c794a"
