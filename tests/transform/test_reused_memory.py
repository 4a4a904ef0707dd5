"""Memory that is used again, and never while somebody holds on to it."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pyarrow as pa

from raypipe.transform.memory import reused_memory

SHAPE = (3, 700, 700, 3)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_used_again_once_nobody_holds_on_to_it() -> None:
    first = reused_memory(SHAPE)
    at = address(first)
    assert (
        first.shape == SHAPE and first.dtype == np.uint8 and first.flags.c_contiguous and type(first) is np.ndarray
    )
    del first
    second = reused_memory(SHAPE)
    assert address(second) == at


def test_memory_is_not_used_again_as_long_as_a_view_is_there() -> None:
    first = reused_memory(SHAPE)
    at = address(first)
    held: list[object] = [first[1:, 3], first.reshape(-1)[5:], memoryview(first), pa.py_buffer(first[None])]
    del first
    while held:
        gc.collect()
        assert address(reused_memory(SHAPE)) != at
        held.pop()
    assert at in {address(array) for array in [reused_memory(SHAPE) for _ in range(3)]}


def test_small_and_other_sizes_have_memory_of_their_own() -> None:
    del [reused_memory(SHAPE)][0]
    assert reused_memory((2, 700, 700, 3)).shape == (2, 700, 700, 3)
    assert reused_memory((4, 4)).shape == (4, 4) and reused_memory((0, 4)).size == 0


def test_threads_never_get_the_same_memory() -> None:
    wrong: list[int] = []

    def use(mark: int) -> None:
        for _ in range(200):
            array = reused_memory((1 << 20,))
            array[::4096] = mark
            if not (array[::4096] == mark).all():
                wrong.append(mark)

    threads = [threading.Thread(target=use, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
