from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from micro_batches import with_fields
from patience import until

from raypipe.device.prefetcher import Batch, on_device
from raypipe.plan.places import MicroBatchId
from raypipe.transform.fields import MicroBatch


def host_batch(step: int) -> MicroBatch:
    rng = np.random.default_rng(step)
    fields = {
        "image": rng.integers(0, 256, (4, 6, 5, 3), dtype=np.uint8),
        "label": rng.integers(0, 10, 4),
    }
    weight = np.array([1, 1, 1, 0], np.float32)
    index = np.array([0, 1, 2, -1])
    for array in (weight, index, *fields.values()):
        array.flags.writeable = False  # as Arrow's shared memory is
    return MicroBatch(
        MicroBatchId("train", 0, step, 0), index, weight, {**fields}, num_bad=step
    )


CPU = torch.device("cpu")


def on_cpu(batches: Iterable[MicroBatch], **more: Any) -> Iterator[Batch]:
    return on_device(iter(batches), CPU, lambda at: 100 + at.step, **more)


def assert_same(batch: Batch, host: MicroBatch) -> None:
    assert (batch.position, batch.num_bad) == (host.position, host.num_bad)
    assert batch.seed == 100 + host.position.step
    assert batch.image.is_contiguous(memory_format=torch.channels_last)
    tensors = [batch.image.permute(0, 2, 3, 1), batch.target, batch.weight]
    arrays = [host["image"], host["label"], host.weight]
    for tensor, array in zip(tensors, arrays, strict=True):
        torch.testing.assert_close(tensor, torch.tensor(array), rtol=0, atol=0)
    assert (batch.target_host == host["label"]).all()
    assert (batch.index == host.index).all()


# Micro-batches


@pytest.mark.parametrize("ring", [None, True])
@pytest.mark.parametrize("names", [("mask",), ("boxes",), ("mask", "boxes"), ()])
def test_masks_and_boxes_come_with_their_batch(
    ring: bool | None, names: tuple[str, ...]
) -> None:
    rng, given = np.random.default_rng(0), []
    for step in range(6):
        targets = {
            "mask": rng.integers(0, 256, (4, 6, 5), dtype=np.uint8),
            "boxes": rng.random((4, 3, 5), np.float32),
        }
        given.append(
            with_fields(host_batch(step), {name: targets[name] for name in names})
        )
    for batch, host in zip(on_cpu(given, ring=ring), given, strict=True):
        assert_same(batch, host)
        assert batch.fields.keys() == host.fields.keys()
        for name in names:
            np.testing.assert_array_equal(batch.fields[name].numpy(), host[name])


def test_read_only_input_gives_no_warning() -> None:
    # Warnings are errors in these tests, and torch warns of read-only arrays once per process unless told not to.
    torch.set_warn_always(True)
    try:
        assert len(list(on_cpu([host_batch(0)]))) == 1
    finally:
        torch.set_warn_always(False)


def test_on_cpu_nothing_is_taken_before_it_is_asked_for() -> None:
    taken = []

    def batches() -> Iterator[MicroBatch]:
        for step in range(3):
            taken.append(step)
            yield host_batch(step)

    iterator = on_cpu(batches())
    next(iterator)
    assert taken == [0]


class Block(np.ndarray):
    """Memory of Ray's object store: no more than the views of it keep it."""


def test_a_block_is_let_go_while_its_micro_batches_are_in_use() -> None:
    blocks = []

    def batches() -> Iterator[MicroBatch]:
        for step in range(3):
            host = host_batch(step)
            memory = np.zeros((4, 6, 5), np.uint8).view(Block)
            blocks.append(weakref.ref(memory))
            yield with_fields(host, {"mask": memory[:]})
            del memory

    for step, batch in enumerate(on_cpu(batches(), depth=3, ring=True)):
        until(lambda: len(blocks) >= 3 and all(block() is None for block in blocks))
        assert_same(batch, host_batch(step))
        assert not batch.fields["mask"].any()


def test_without_a_ring_there_is_no_thread_and_nothing_to_mark() -> None:
    def never(start: Any, end: Any) -> None:
        raise AssertionError

    for _ in on_cpu([host_batch(0), host_batch(1)], on_copied=never):
        assert "raypipe-ring" not in {thread.name for thread in threading.enumerate()}
