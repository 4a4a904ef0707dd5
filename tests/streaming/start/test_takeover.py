"""The takeover of a stream by its pool, in positions: 200 drawn cases, without Ray."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from raypipe.plan.places import MicroBatchId
from raypipe.streaming.start.takeover import GapError, Takeover, joined
from raypipe.transform.fields import MicroBatch


def schedule(rng: random.Random) -> tuple[list[MicroBatchId], int]:
    """The places of a run, and W."""
    world_size = rng.choice([1, 2, 4])
    per_step = world_size * rng.randint(1, 3)
    places = [
        MicroBatchId(split, epoch, step, micro)
        for epoch in range(rng.randint(1, 3))
        for split in ("train", "val")
        for step in range(rng.randint(1, 6))
        for micro in range(per_step)
    ]
    first = rng.randrange(len(places) // per_step) * per_step
    return places[first:], world_size


def made(places: list[MicroBatchId]) -> Iterator[MicroBatch]:
    nothing = np.empty(0)
    return (MicroBatch(position, nothing, nothing, {}) for position in places)


@pytest.mark.parametrize("seed", range(200))
def test_each_rank_gets_its_share_once_wherever_the_pool_begins(seed: int) -> None:
    rng = random.Random(seed)
    places, world_size = schedule(rng)
    shares = [places[rank::world_size] for rank in range(world_size)]
    total = len(shares[0])
    # what each rank has made, or makes, when the pool begins; some cannot make all
    takeover = Takeover()
    reached = rng.choice([0, 1, rng.randint(0, total), total])
    num_made = [reached] * world_size
    for num in sorted(rng.randint(0, reached) for _ in range(rng.randint(0, 4))):
        takeover.extend(num)
    takeover.extend(reached)
    for rank in range(world_size):
        if rng.random() < 0.2:
            num_made[rank] = rng.randint(0, reached)
            takeover.end(num_made[rank])
            takeover.extend(total)
    begins = takeover.fix()
    takeover.extend(total)
    takeover.end(0)
    assert takeover.num == begins == takeover.fix() <= min(num_made)
    rest = places[begins * world_size :]
    blocks = [rest[rank::world_size] for rank in range(world_size)]
    for share, num, of_pool in zip(shares, num_made, blocks, strict=True):
        got = joined(made(share[:num]), made(of_pool), iter(share))
        assert [batch.position for batch in got] == share


@pytest.mark.parametrize("num_made", [0, 2, 4])
def test_a_gap_before_the_pool_is_an_error_and_no_batch(num_made: int) -> None:
    places = [MicroBatchId("train", 0, step, 0) for step in range(6)]
    batches = joined(made(places[:num_made]), made(places[5:]), iter(places))
    assert [next(batches).position for _ in range(num_made)] == places[:num_made]
    with pytest.raises(
        GapError, match=f"does not begin at train-e0000-s00000{num_made}"
    ):
        next(batches)


def test_what_the_ranks_make_to_the_end_needs_no_pool() -> None:
    places = [MicroBatchId("train", 0, step, 0) for step in range(3)]

    def never() -> Iterator[MicroBatch]:
        raise AssertionError("the pool was asked")
        yield

    batches = joined(made(places), never(), iter(places))
    assert [batch.position for batch in batches] == places
