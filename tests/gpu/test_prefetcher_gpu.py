"""The ring on CUDA: the order of streams, no waiting, no allocation. `pytest tests/gpu` where there is a GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from waiting import waiting_is_an_error

from raypipe.device.prefetcher import on_device
from raypipe.errors import ConfigError
from raypipe.metrics.timing import StageClock, has_drained, mark
from raypipe.plan.places import MicroBatchId
from raypipe.transform.fields import MicroBatch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_or_pretended")]

CUDA = torch.device("cuda")
# Cycles that keep a stream busy for some ms, far longer than the transfers here take.
BUSY = 10_000_000


def host_batch(step: int, size: int = 16) -> MicroBatch:
    image = np.full((size, 64, 64, 3), step % 251, np.uint8)
    image.flags.writeable = False
    mask = np.full((size, 8, 8), step, np.uint8)
    fields = {"image": image, "label": np.full(size, step), "mask": mask}
    at, weight = MicroBatchId("train", 0, step, 0), np.ones(size, np.float32)
    return MicroBatch(at, np.arange(size), weight, {**fields})


def host_batches(num: int) -> Iterator[MicroBatch]:
    return (host_batch(step) for step in range(num))


def num_allocations() -> tuple[int, int]:
    return (
        torch.cuda.memory_stats()["allocation.all.allocated"],
        torch.cuda.host_memory_stats()["active_requests.allocated"],
    )


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_busy_compute_stream_still_sees_each_batch_whole(depth: int) -> None:
    # The host is far ahead of the device: only the events keep transfers from overwriting what is yet to be read.
    kept = []
    for batch in on_device(host_batches(30), CUDA, lambda at: at.step, depth):
        assert batch.image.device.type == "cuda" and batch.seed == batch.position.step
        assert batch.image.is_contiguous(memory_format=torch.channels_last)
        torch.cuda._sleep(BUSY)
        parts = (batch.image, batch.target, batch.fields["mask"])
        kept.append([part.clone() for part in parts])
    for step, of_step in enumerate(kept):
        assert all((part == step).all() for part in of_step)


def test_a_consumer_may_change_its_stream_between_batches() -> None:
    streams, kept = (
        [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()],
        [],
    )
    batches = iter(on_device(host_batches(30), CUDA, lambda at: 0, depth=1))
    for step in range(30):
        with torch.cuda.stream(streams[step % 3]):
            batch = next(batches)
            if step % 3 == 0:  # the others are done long before
                torch.cuda._sleep(BUSY)
            kept.append(batch.image.clone())
    batches.close()  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    assert all((image == step).all() for step, image in enumerate(kept))


def test_batches_of_many_shapes_share_the_slots() -> None:
    sizes = [16, 3, 16, 7, 1, 16, 9] * 5
    pointers, kept = set(), []
    for step, batch in enumerate(
        on_device(map(host_batch, range(35), sizes), CUDA, lambda at: 0)
    ):
        if step >= 8:  # from then on each of the three slots has held a batch of 16
            pointers.add(batch.image.data_ptr())
        torch.cuda._sleep(BUSY // 10)
        kept.append((batch.image.clone(), batch.target.clone()))
        assert len(batch.target) == sizes[step]
    assert len(pointers) == 3
    assert all(
        (image == step).all() and (target == step).all()
        for step, (image, target) in enumerate(kept)
    )


def test_new_slots_do_not_take_memory_that_is_still_read() -> None:
    for _ in range(5):
        old = torch.full((16, 64, 64, 3), 7, dtype=torch.uint8, device=CUDA)
        torch.cuda._sleep(BUSY)
        seen = old.clone()
        del old  # free for the allocator, though the copy of it is still to come
        for _ in on_device(host_batches(3), CUDA, lambda at: 0):
            pass
        assert (seen == 7).all()


def test_a_batch_that_is_kept_outlasts_an_iteration_left_early() -> None:
    batches = iter(on_device(host_batches(20), CUDA, lambda at: 0))
    next(batches)
    image = next(batches).image
    torch.cuda._sleep(BUSY)
    seen = image.clone()
    batches.close()  # type: ignore[attr-defined]
    assert not [
        thread for thread in threading.enumerate() if thread.name == "raypipe-ring"
    ]
    del image  # free for the next ring, though the copy of it is still to come
    list(on_device(host_batches(5), CUDA, lambda at: 0))
    assert (seen == 1).all()


def test_steady_state_neither_waits_nor_allocates() -> None:
    batches = iter(on_device(host_batches(60), CUDA, lambda at: at.step, depth=2))
    total = torch.zeros(64, 64, dtype=torch.int64, device=CUDA)
    column = torch.empty(64, 64, dtype=torch.uint8, device=CUDA)
    pointers = set()

    def use(batch: Any) -> None:
        pointers.add(batch.image.data_ptr())
        torch.cuda._sleep(BUSY // 20)
        column.copy_(batch.image[0, 0])  # on the device, into what is there already
        total.add_(column)

    for _ in range(10):
        use(next(batches))
    torch.cuda.synchronize()
    before = num_allocations()
    with waiting_is_an_error():
        for _ in range(40):
            use(next(batches))
    assert num_allocations() == before
    assert len(pointers) == 3
    assert (total == sum(range(50))).all()
    assert len(list(batches)) == 10


def test_marks_measure_the_transfer() -> None:
    marks: list[Any] = []
    list(
        on_device(
            host_batches(5),
            CUDA,
            lambda at: 0,
            on_copied=lambda *pair: marks.append(pair),
        )
    )
    torch.cuda.synchronize()
    assert len(marks) == 5 and all(
        0 < start.elapsed_time(end) < 1000 for start, end in marks
    )


# A device that has nothing to do


def test_the_utilization_of_the_device_is_a_share_or_nobody_knows_it() -> None:
    clock = StageClock(torch.device("cuda", 0))
    share = clock.sample()
    assert share == clock.gpu_utilization == clock.times("train").gpu_utilization
    if share is not None:
        assert 0 <= share <= 1
    else:
        with pytest.raises(Exception, match=r"."):
            torch.cuda.utilization(0)


@pytest.mark.parametrize("busy", [True, False])
def test_a_device_that_has_drained_is_told_from_one_at_work(busy: bool) -> None:
    """As the loader asks: a mark when a batch is asked for, looked at when it is there."""
    drained, batches = 0, iter(on_device(host_batches(40), CUDA, lambda at: 0))
    for _ in range(40):
        asked = mark(torch.device("cuda", torch.cuda.current_device()))
        batch = next(batches)
        drained += has_drained(asked)
        if busy:
            torch.cuda._sleep(BUSY)
        else:
            (batch.image + 1).sum()
            time.sleep(0.005)  # a host that is behind
    assert drained <= 4 if busy else drained >= 36, drained


# A step captured as a CUDA graph


def test_a_batch_that_is_asked_for_within_a_capture_is_refused() -> None:
    batches = iter(on_device(host_batches(5), CUDA, lambda at: 0))
    static = next(batches).image.clone()
    torch.cuda.synchronize()
    capture = torch.cuda.graph(
        torch.cuda.CUDAGraph(), capture_error_mode="thread_local"
    )
    with pytest.raises(ConfigError, match="while a CUDA graph is captured"), capture:
        static.add_(1)
        next(batches)
    torch.cuda.synchronize()
    assert (static == 0).all()


def test_a_captured_step_reads_what_the_ring_brings_beside_it() -> None:
    """The ring's thread takes memory while the step is captured: see benchmarks/results/gpu.md."""
    image = torch.zeros(16, 3, 64, 64, dtype=torch.uint8, device=CUDA)
    total = torch.zeros((), dtype=torch.int64, device=CUDA)
    capturing = threading.Event()
    filled = threading.Event()

    def source() -> Iterator[MicroBatch]:
        yield host_batch(0)
        capturing.wait()
        yield host_batch(1, size=15)  # for which there are no slots as yet
        filled.set()
        yield from map(host_batch, range(2, 20))

    def step() -> None:
        total.add_(image[:, 0, 0, 0].sum())

    batches = iter(on_device(source(), CUDA, lambda at: 0))
    image.copy_(next(batches).image)
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):  # as torch asks for before a capture
        step()
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        capturing.set()
        assert filled.wait()
        step()
    total.zero_()
    for batch in batches:
        if len(batch.target) == 16:
            image.copy_(batch.image)
            graph.replay()
    assert int(total) == 16 * sum(range(2, 20))
