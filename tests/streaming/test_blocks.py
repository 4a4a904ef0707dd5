from __future__ import annotations

import numpy as np
import pytest

from raypipe.config import PlanConfig
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.blocks import MAX_BYTES, Sizes, cut, most_bytes
from raypipe.streaming.planning import make_plan


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_ranks_get_micro_batches_in_order_in_blocks_of_one_segment(
    ranks: int, size: int
) -> None:
    config = PlanConfig(epochs=2, micro_batch_size=2, global_batch_size=8)
    train, val = (MemoryStore([b""] * size, np.zeros(size)) for size in (60, 25))
    whole = make_plan(config, train, val)
    for step in (0, 1, 3):
        places = list(whole.micro_batches(whole.cursor_at(step)))
        blocks = list(cut(places, ranks, {"train": size, "val": 2 * size}))
        for rank in range(ranks):
            of_rank = [at for block in blocks[rank::ranks] for at in block]
            assert of_rank == [at for at in places if at.micro % ranks == rank]
        # none is left out where blocks are dealt out evenly
        assert len(blocks) % ranks == 0
        for block in blocks:
            assert 1 <= len(block) <= (size if block[0].split == "train" else 2 * size)
            assert len({(at.split, at.epoch) for at in block}) == 1
        for start in range(0, len(blocks), ranks):
            assert len({len(block) for block in blocks[start : start + ranks]}) == 1


@pytest.mark.parametrize(
    ("seconds", "num_bytes", "expected"),
    [
        ([], [], 1),
        ([0.02], [400_000], 50),  # a second
        ([0.32, 9.0, 0.34], [19 << 20] * 3, 2),
        ([0.001], [20 << 20], 3),  # 64 MiB
        ([5.0], [1], 1),
        ([0.001], [1 << 30], 1),
    ],
)
def test_a_block_is_as_large_as_its_limits_let_it(
    seconds: list[float], num_bytes: list[int], expected: int
) -> None:
    sizes = Sizes()
    for one in zip(seconds, num_bytes, strict=True):
        sizes.measured("train", *one)
    found = sizes.of_task("task", 100, 64 << 20, 64 << 20)
    assert found == {"train": expected, "val": 1}


def test_blocks_of_few_cpus_are_smaller_and_all_fit_the_object_store() -> None:
    assert (
        most_bytes(2, room=1e12) == 128 << 20 and most_bytes(1, room=1e12) == 64 << 20
    )
    assert (
        most_bytes(8, room=1e12) == most_bytes(100, room=1e12) == MAX_BYTES == 256 << 20
    )
    assert most_bytes(100, room=5e6) == 5_000_000
