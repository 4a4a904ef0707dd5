from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from raypipe.plan import MicroBatchId
from raypipe.prefetch import Batch, DevicePrefetcher, HostBatch


def host_batch(step: int, size: int = 4) -> HostBatch:
    rng = np.random.default_rng(step)
    arrays = {
        "image": rng.integers(0, 256, (size, 6, 5, 3), dtype=np.uint8),
        "label": rng.integers(0, 10, size),
        "weight": np.array([1.0] * (size - 1) + [0.0], np.float32),
        "index": np.array([*range(size - 1), -1]),
    }
    for array in arrays.values():
        array.flags.writeable = False  # as Arrow's shared memory is
    return HostBatch(at=MicroBatchId("train", 0, step, 0), num_bad=step, **arrays)


def on_cpu(batches: list[HostBatch]) -> list[Batch]:
    return list(DevicePrefetcher(iter(batches), torch.device("cpu"), lambda at: 100 + at.step))


def test_values_places_seeds_and_order_are_kept() -> None:
    given = [host_batch(step) for step in (3, 1, 2)]
    found = on_cpu(given)
    assert [batch.at.step for batch in found] == [3, 1, 2]
    assert [batch.seed for batch in found] == [103, 101, 102]
    for batch, host in zip(found, given, strict=True):
        assert batch.at == host.at and batch.num_bad == host.num_bad
        assert (batch.image.numpy() == host.image.transpose(0, 3, 1, 2)).all()
        assert (batch.target.numpy() == host.label).all() and batch.target.dtype == torch.int64
        assert (batch.weight.numpy() == host.weight).all() and batch.weight.dtype == torch.float32
        assert batch.label is host.label and batch.index is host.index


def test_images_are_channels_last_views_of_the_host_memory() -> None:
    host = host_batch(0)
    [batch] = on_cpu([host])
    assert batch.image.shape == (4, 3, 6, 5) and batch.image.dtype == torch.uint8
    assert batch.image.is_contiguous(memory_format=torch.channels_last)
    assert batch.image.data_ptr() == host.image.ctypes.data
    assert batch.target.data_ptr() == host.label.ctypes.data


def test_read_only_input_gives_no_warning() -> None:
    # Warnings are errors in these tests, and torch warns of read-only arrays once per process unless told not to.
    torch.set_warn_always(True)
    try:
        assert len(on_cpu([host_batch(0)])) == 1
    finally:
        torch.set_warn_always(False)


def test_on_cpu_nothing_is_taken_before_it_is_asked_for() -> None:
    taken = []

    def batches() -> Iterator[HostBatch]:
        for step in range(3):
            taken.append(step)
            yield host_batch(step)

    iterator = iter(DevicePrefetcher(batches(), torch.device("cpu"), lambda at: 0))
    next(iterator)
    assert taken == [0]


def test_batches_of_several_shapes_and_of_none() -> None:
    assert [len(batch.index) for batch in on_cpu([host_batch(0, 4), host_batch(1, 2)])] == [4, 2]
    assert on_cpu([]) == []
