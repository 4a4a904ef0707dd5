from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray import cloudpickle

from raypipe.config import PoolConfig, TransformConfig
from raypipe.digest import batch_digest
from raypipe.errors import CursorError
from raypipe.handover import feed
from raypipe.order import Kept
from raypipe.pipeline import StreamSpec
from raypipe.plan import MicroBatchId, Plan, PlanConfig
from raypipe.rank_stream import host_batches
from raypipe.relaxed import RelaxedQueue
from raypipe.stores.memory import MemoryStore

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Bundle:
    """As much of Ray Data's bundle as a queue looks at."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.blocks = ()

    def num_rows(self) -> int:
        return 1

    def size_bytes(self) -> int:
        return 1

    def __len__(self) -> int:
        return 1


def played(queue: RelaxedQueue, finish: list[int]) -> list[tuple[int, int]]:
    """(key, how many had finished) as they leave, when keys finish in an order and all that may leave does."""
    left = []
    for number, key in enumerate(finish, 1):
        queue._add_inner(Bundle(key), key)
        queue.finalize(key)
        while queue.has_next():
            peeked, bundle = queue.peek_next(), queue._get_next_inner()
            assert peeked.key == bundle.key
            left.append((bundle.key, number))
    return left


def test_a_slow_one_is_overtaken_by_less_than_the_window() -> None:
    left = played(RelaxedQueue(3, [9], Kept(np.array([]))), [1, 2, 3, 4, 0, 5, 6, 7, 8])
    assert [key for key, _ in left] == [1, 2, 0, 3, 4, 5, 6, 7, 8]


def test_none_overtakes_one_of_an_earlier_segment() -> None:
    left = played(RelaxedQueue(10, [2, 4], Kept(np.array([]))), [2, 3, 1, 0])
    assert [key for key, _ in left] == [1, 0, 2, 3]


def test_a_window_of_one_is_the_strict_order() -> None:
    assert [key for key, _ in played(RelaxedQueue(1, [4], Kept(np.array([]))), [3, 1, 0, 2])] == [0, 1, 2, 3]


def test_places_that_are_done_already_count_in_the_window() -> None:
    # Keys 0, 1, 2 … are the places 0, 3, 4 …: of the places 1 and 2 one has heard before.
    left = played(RelaxedQueue(4, [5], Kept(np.array([1, 2]))), [2, 1, 0, 3, 4])
    assert [key for key, _ in left] == [1, 0, 2, 3, 4]


@given(st.integers(1, 6), st.lists(st.integers(1, 6), min_size=1, max_size=4), st.randoms())
def test_each_leaves_once_within_window_and_segment_and_none_is_held_back(
    window: int, sizes: list[int], choose: Any
) -> None:
    ends = np.cumsum(sizes).tolist()
    finish = list(range(ends[-1]))
    choose.shuffle(finish)
    left = [key for key, _ in played(RelaxedQueue(window, ends, Kept(np.array([]))), finish)]
    assert sorted(left) == list(range(ends[-1]))
    for turn, key in enumerate(left):
        assert abs(key - turn) < window
        assert np.searchsorted(ends, key, "right") == np.searchsorted(ends, turn, "right")


# The plan

PLAN = Plan.of(
    PlanConfig(epochs=2, micro_batch=1, per_step=4, order="relaxed", relaxed_window=6),
    MemoryStore([b""] * 40, [0] * 40),
)


def numbers(places: list[MicroBatchId]) -> list[tuple[int, int]]:
    return [(at.epoch, at.step * 4 + at.micro) for at in places]


def test_what_is_left_at_a_cursor_are_those_that_are_not_done_from_any_number_on() -> None:
    cursor = PLAN.cursor_after(0, 3, {*range(9), 10, 12, 13})
    assert cursor.ahead == (10, 12, 13)
    whole = numbers(list(PLAN.micro_batches(cursor)))
    assert whole[:4] == [(0, 9), (0, 11), (0, 14), (0, 15)]
    assert len(whole) == PLAN.num_micro_batches(cursor) == 2 * 40 - 12
    for first in range(len(whole)):
        assert numbers(list(PLAN.micro_batches(cursor, first))) == whole[first:]


def test_a_strict_run_does_not_go_on_from_the_middle_of_a_relaxed_one() -> None:
    strict = dataclasses.replace(PLAN, config=dataclasses.replace(PLAN.config, order="strict"))
    with pytest.raises(CursorError, match=r"go on with that order"):
        strict.check(PLAN.cursor_after(0, 3, {*range(9), 10, 12, 13}))
    strict.check(PLAN.cursor_after(0, 3, set(range(12))))


def test_a_damaged_cursor_is_refused() -> None:
    for ahead in ((5, 4), (3,), (99,), (9, 9)):
        with pytest.raises(CursorError, match="damaged"):
            PLAN.check(dataclasses.replace(PLAN.start(), step=2, ahead=ahead))


# The stream


def slow_now_and_then(image: np.ndarray) -> np.ndarray:
    time.sleep(0.4 if image[0, 0, 0] % 8 == 0 else 0.01)
    return np.ascontiguousarray(image[:8, :8])


@pytest.mark.soak  # the queue, the cursor and the feed are tested without a cluster
@pytest.mark.cluster
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("ray_cluster")
def test_a_relaxed_stream_has_the_micro_batches_of_the_strict_one_and_resumes_with_those_that_are_left(
    stores: dict[str, Path],
) -> None:
    def spec(order: Any) -> StreamSpec:
        return StreamSpec.of(
            stores["train"],
            stores["val"],
            plan=PlanConfig(epochs=2, micro_batch=4, per_step=2, seed=2, order=order, relaxed_window=5),
            transform=TransformConfig(),
            train_transform=slow_now_and_then,
            val_transform=slow_now_and_then,
            pool=PoolConfig(min_actors=3, cpus_per_actor=0.5),
        )

    def digests(order: Any) -> list[tuple[str, bytes]]:
        rows = host_batches(spec(order).splits(spec(order).plan.start(), max_actors=3)[0])
        return [(str(row.at), batch_digest(row)) for row in rows]

    strict, relaxed = digests("strict"), digests("relaxed")
    assert relaxed != strict and sorted(relaxed) == sorted(strict)
    place = {at: number for number, (at, _) in enumerate(strict)}
    assert all(abs(place[at] - turn) < 5 for turn, (at, _) in enumerate(relaxed))

    seen: list[str] = []
    stream = feed(spec("relaxed"), max_actors=3)
    segment = next(iter(stream))
    for step in segment:
        seen += [str(batch.at) for batch in step]
        if step.number >= 4 and stream.cursor.ahead:
            break
    stream.close()
    cursor = stream.cursor
    assert cursor.ahead and len(seen) == 2 * cursor.step
    rest = feed(spec("relaxed"), max_actors=3, cursor=cursor)
    seen += [str(batch.at) for segment in rest for step in segment for batch in step]
    assert sorted(seen) == sorted(at for at, _ in strict)
