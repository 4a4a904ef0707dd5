"""The ring on CPU: the same code as on CUDA, over plain memory; transfers are done when they were started."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from patience import PATIENCE_S, until

from raypipe.device.ring import Ring, numbered
from raypipe.errors import ConfigError

CPU = torch.device("cpu")
Arrays = tuple[np.ndarray, ...]


def arrays(number: int, size: int = 4) -> Arrays:
    image = np.random.default_rng(number).integers(0, 256, (size, 6, 5, 3), np.uint8)
    image.flags.writeable = False  # as Arrow's shared memory is
    return image, np.arange(size) * number


def ring_of(items: Any, depth: int = 2, **more: Any) -> Ring[Arrays]:
    return Ring(items, lambda item: item, CPU, depth, **more)


def assert_same(tensors: tuple[torch.Tensor, ...], given: Arrays) -> None:
    for tensor, array in zip(tensors, given, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)


def num_threads() -> int:
    return sum(thread.name == "raypipe-ring" for thread in threading.enumerate())


def test_debugging_overwrites_what_is_kept_beyond_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAYPIPE_DEBUG", "1")
    kept: list[tuple[torch.Tensor, ...]] = []
    for _, tensors in ring_of(map(arrays, range(5)), depth=1, keep=1):
        kept.append(tensors)
        for image, numbers in kept[-3:-2]:
            assert (image == 255).all() and (numbers == -1).all()
    assert_same(kept[-1], arrays(4))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_source_far_ahead_fills_depth_slots_and_holds_one_item(depth: int) -> None:
    drawn = []

    def source() -> Iterator[Arrays]:
        for number in range(20):
            drawn.append(number)
            yield arrays(number)

    for number, (_, tensors) in enumerate(ring_of(source(), depth)):
        expected = min(20, number + 1 + depth + 1)
        until(lambda expected=expected: len(drawn) == expected)  # type: ignore[misc]
        time.sleep(0.005)  # time in which it could do wrong
        assert len(drawn) == expected
        assert_same(tensors, arrays(number))


def test_what_is_written_to_one_tensor_changes_no_other_for_autograd() -> None:
    weight = torch.ones(4, requires_grad=True)
    image, target = np.random.default_rng(0).random((2, 4), np.float32)
    for _, tensors in ring_of([(image, target)] * 5):
        loss = (weight * tensors[1]).sum()
        tensors[0].mul_(2)
        assert torch.autograd.grad(loss, weight)[0].tolist() == target.tolist()
        assert tensors[0].tolist() == (2 * image).tolist()


def test_kinds_of_arrays() -> None:
    given = {
        "read-only": arrays(1)[0],
        "float64": np.linspace(0, 1, 5),
        "Fortran order": np.asfortranarray(np.arange(12).reshape(3, 4)),
        "reversed": np.arange(5)[::-1],
        "with gaps": np.arange(24.0).reshape(4, 6)[:, :2],
        "scalar": np.array(7),
        "empty": np.zeros((0, 3), np.float32),
        "bool": np.array([True, False]),
    }
    for _, tensors in ring_of([tuple(given.values())] * 5):
        for (name, array), tensor in zip(given.items(), tensors, strict=True):
            assert (
                tensor.dtype == torch.tensor(array.copy()).dtype
                and tensor.shape == array.shape
            ), name
            assert np.array_equal(tensor.numpy(), array) and tensor.is_contiguous(), (
                name
            )


def test_items_without_arrays_and_no_items_at_all() -> None:
    assert list(ring_of([(), ()])) == [((), ()), ((), ())]
    assert list(ring_of([])) == []


def test_an_error_of_the_source_comes_after_the_items_before_it() -> None:
    def source() -> Iterator[Arrays]:
        yield from (arrays(0), arrays(1))
        raise OSError("the disk is gone")

    seen = []
    gc.disable()
    try:
        with pytest.raises(OSError, match="the disk is gone"):
            for number, (_, tensors) in enumerate(ring_of(source())):
                assert_same(tensors, arrays(number))
                seen.append(weakref.ref(tensors[0]))
        del tensors
        assert len(seen) == 2 and num_threads() == 0
        assert all(ref() is None for ref in seen), "no cycle holds the slots"
    finally:
        gc.enable()


class Source:
    """Endless, and says whether it was closed, and in which thread it was drawn from."""

    def __init__(self) -> None:
        self.drawn, self.closed, self.threads = 0, 0, set[str]()

    def __iter__(self) -> Source:
        return self

    def __next__(self) -> Arrays:
        self.drawn += 1
        self.threads.add(threading.current_thread().name)
        return arrays(self.drawn)

    def close(self) -> None:
        self.closed += 1
        self.threads.add(threading.current_thread().name)


@pytest.mark.parametrize("far_ahead", [True, False])
def test_closing_early_ends_the_thread_and_closes_the_source(far_ahead: bool) -> None:
    source = Source()
    iterator = iter(ring_of(source))
    next(iterator)
    if far_ahead:
        until(lambda: source.drawn == 4)  # it waits for room
    assert num_threads() == 1
    iterator.close()
    assert (
        num_threads() == 0 and source.closed == 1 and source.threads == {"raypipe-ring"}
    )


def test_leaving_the_loop_and_an_error_in_its_body_end_the_thread() -> None:
    for _ in ring_of(Source()):
        break
    assert num_threads() == 0

    def train() -> None:
        for _ in ring_of(Source()):
            raise RuntimeError("loss is nan")

    with pytest.raises(RuntimeError, match="loss is nan"):
        train()
    gc.collect()  # the traceback held the iterator
    assert num_threads() == 0


def test_a_source_in_the_midst_of_an_item_does_not_hold_up_closing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raypipe.device.ring.CLOSE_S", 0.05)
    go_on, closed = threading.Event(), threading.Event()

    def source() -> Iterator[Arrays]:
        try:
            yield arrays(0)
            go_on.wait()
            yield arrays(1)
        finally:
            closed.set()

    iterator = iter(ring_of(source()))
    next(iterator)
    iterator.close()
    assert num_threads() == 1 and not closed.is_set()
    go_on.set()
    assert closed.wait(PATIENCE_S)
    until(lambda: num_threads() == 0)


def test_a_device_without_a_number_is_the_one_that_is_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert numbered("cuda") == torch.device("cuda", 3)
    assert numbered(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert numbered("cpu") == CPU
    with pytest.raises(ConfigError, match="device is mps"):
        numbered("mps")
