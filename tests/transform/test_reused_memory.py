"""Memory that is used again, and never while somebody holds on to it."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa

from raypipe.transform import block_memory
from raypipe.transform.block_memory import reused_memory

NUM_BYTES = 3 * 700 * 700 * 3


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_used_again_once_nobody_holds_on_to_it() -> None:
    first = reused_memory(NUM_BYTES)
    at = address(first)
    assert (
        first.shape == (NUM_BYTES,)
        and first.dtype == np.uint8
        and type(first) is np.ndarray
    )
    del first
    second = reused_memory(NUM_BYTES)
    assert address(second) == at


def test_memory_is_not_used_again_as_long_as_a_view_is_there() -> None:
    first = reused_memory(NUM_BYTES).reshape(3, 700, 700, 3)
    at = address(first)
    held: list[object] = [
        first[1:, 3],
        first.reshape(-1)[5:],
        memoryview(first),
        pa.py_buffer(first[None]),
    ]
    del first
    while held:
        gc.collect()
        assert address(reused_memory(NUM_BYTES)) != at
        held.pop()
    assert at in {
        address(array) for array in [reused_memory(NUM_BYTES) for _ in range(3)]
    }


def test_threads_never_get_the_same_memory() -> None:
    def is_kept(mark: int) -> bool:
        array = reused_memory(1 << 20)
        array[::4096] = mark
        return bool((array[::4096] == mark).all())

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(is_kept, [*range(8)] * 100))


def test_memory_serves_a_block_with_fewer_micro_batches() -> None:
    block_memory.free_spare()
    whole = reused_memory(4 << 20)
    at = address(whole)
    del whole
    rest = reused_memory((4 << 20) - 1)
    assert address(rest) == at
    assert len(rest) == (4 << 20) - 1
    del rest
    assert address(reused_memory(1 << 20)) != at  # it would hold four times its size


def test_memory_of_former_sizes_is_given_back() -> None:
    block_memory.free_spare()
    for mib in (1, 2, 3):
        pair = [reused_memory(mib << 20) for _ in range(2)]
        del pair
    assert [len(memory) >> 20 for memory in block_memory._spare] == [3, 3]
    block_memory.free_unused()
    assert not block_memory._spare


def test_one_piece_of_spare_memory_may_be_large() -> None:
    large = [reused_memory(80 << 20) for _ in range(2)]
    del large
    assert [len(memory) >> 20 for memory in block_memory._spare] == [80]
    block_memory.free_spare()
