"""Where a sample is drawn, by the inverse of the order, against passes over whole plans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.config import PlanConfig
from raypipe.plan.mixture import Mixture, Quotas, as_shares
from raypipe.plan.order import (
    NUM_ROUNDS,
    Domain,
    Shuffle,
    derive_keys,
    permute,
    unpermute,
)
from raypipe.plan.places import PADDING, SamplePlace, Split
from raypipe.plan.samplers import PassSampler, Permuted
from raypipe.plan.schedule import Plan
from raypipe.plan.selection import Selection
from raypipe.stores.joined import JoinedStore
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.planning import make_plan

NUM_QUERIES = 1000


class Skewed:
    """A user's sampler: it draws the squares of positions, so some samples often, and others never."""

    def __init__(self, population: Any) -> None:
        self.size = population.size

    def __len__(self) -> int:
        return self.size

    def draw(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return (positions + epoch) ** 2 % self.size


def store_of(size: int, group_size: int | None = None) -> MemoryStore:
    rng = np.random.default_rng(size)
    columns = {
        "width": rng.integers(4, 20, size),
        "height": rng.integers(4, 20, size),
        "weight": rng.integers(0, 4, size),
    }
    images = [bytes([number % 256]) for number in range(size)]
    labels = rng.integers(0, 5, size)
    return MemoryStore(images, labels, columns=columns, group_size=group_size)


def plan_of(sizes: list[int], group_size: int | None = None, **settings: Any) -> Plan:
    """A plan over one store or a mixture, without every seventh sample of the first; it validates."""
    config = PlanConfig(
        epochs=4, micro_batch_size=8, global_batch_size=32, seed=3, **settings
    )
    stores = {f"s{size}": store_of(size, group_size) for size in sizes}
    excluded = [Selection(np.arange(0, sizes[0], 7), sizes[0])]
    selections = excluded + [Selection([], size) for size in sizes[1:]]
    train = JoinedStore(stores) if len(stores) > 1 else stores[f"s{sizes[0]}"]
    return make_plan(config, train, store_of(45), selections=selections)


BUCKETS = ["12x16", "14x14", "16x12"]
PLANS: dict[str, Any] = {
    "plain": lambda: plan_of([997]),
    "unshuffled": lambda: plan_of([300], shuffle="off"),
    "windows": lambda: plan_of([997], 10, shuffle="window", window_groups=4),
    "long passes": lambda: plan_of([997], epoch_samples=300),
    "weights": lambda: plan_of([500], weights="weight"),
    "classes": lambda: plan_of([500], weights=0.5, epoch_samples=700),
    "weighted windows": lambda: plan_of([500], 10, weights="weight", window_groups=3),
    "repeats": lambda: plan_of([300], aug_repeats=2),
    "buckets": lambda: plan_of([500], buckets=BUCKETS, val_buckets=True),
    "weighted buckets": lambda: plan_of([500], buckets=BUCKETS, weights="weight"),
    "mixture": lambda: plan_of(
        [200, 90], mixture={0: {"s200": 2, "s90": 1}, 2: {"s200": 1, "s90": 3}}
    ),
    "mixed buckets": lambda: plan_of(
        [300, 200], buckets=BUCKETS, weights=1.0, aug_repeats=2, epoch_samples="longest"
    ),
    "own sampler": lambda: plan_of([300], sampler=Skewed),
}


def enumerated(plan: Plan) -> dict[tuple[Split, int], list[SamplePlace]]:
    """The places of each sample, by a pass over the whole run."""
    places = defaultdict(list)
    for micro_batch in plan.micro_batches(plan.start()):
        for row, index in enumerate(plan.indices(micro_batch).tolist()):
            places[micro_batch.split, index].append(SamplePlace(micro_batch, row))
    return places


@pytest.mark.parametrize("kind", PLANS)
def test_random_samples_are_found_where_a_pass_over_the_run_has_them(kind: str) -> None:
    plan = PLANS[kind]()
    places = enumerated(plan)
    rng = np.random.default_rng(0)
    size = plan.kept["train"].num_samples
    num_drawn = 0
    for index in rng.integers(0, size, NUM_QUERIES // len(PLANS) + 1).tolist():
        found = list(plan.places_of(index))
        assert found == places["train", index]
        num_drawn += len(found)
    assert num_drawn > 0
    for index in range(45):
        assert list(plan.places_of(index, "val")) == places["val", index]


def test_a_sample_that_is_left_out_or_does_not_exist_has_no_places() -> None:
    plan = plan_of([997])
    for index in (0, 7, -1, PADDING, 997, 1 << 40):
        assert not list(plan.places_of(index))


def test_some_epochs_are_searched_alone() -> None:
    plan = plan_of([997])
    places = [place.micro_batch.epoch for place in plan.places_of(5, epochs=[3, 1])]
    assert places == [3, 1]


def test_a_store_of_a_billion_samples_is_inverted_at_once() -> None:
    sampler = Permuted(Shuffle("global", 10**9, 7), Selection([5], 10**9 + 1))
    positions = np.array([0, 123_456_789, 10**9 - 1])
    for index, position in zip(
        sampler.draw_pass(3, positions).indices.tolist(), positions, strict=True
    ):
        assert sampler.positions_in_pass(index, 3).tolist() == [position]


@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
def test_unpermute_is_the_inverse_of_permute(size: int, seed: int) -> None:
    keys = derive_keys(NUM_ROUNDS, seed, Domain.ORDER, 0)
    positions = np.arange(size)
    assert np.array_equal(
        unpermute(permute(positions, size, keys), size, keys), positions
    )


def test_a_mixture_of_large_batches_is_inverted() -> None:
    parts: list[PassSampler] = []
    for offset, size in ((0, 3000), (3000, 4000)):
        shuffle = Shuffle("global", size, offset)
        parts.append(Permuted(shuffle, Selection([], size), offset))
    mixture = Mixture(parts, Quotas({0: as_shares([1, 3])}, 5000, 1), 1)
    indices = mixture.draw(np.arange(15_000)).indices
    for index in (0, 17, 2999, 3000, 6999):
        found = mixture.positions_of(index, 2000, 14_000)
        expected = [at for at in occurrences(indices, index) if 2000 <= at < 14_000]
        assert found.tolist() == expected


def occurrences(indices: np.ndarray, index: int) -> Iterator[int]:
    yield from np.flatnonzero(indices == index).tolist()
