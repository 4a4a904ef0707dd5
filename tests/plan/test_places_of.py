"""Where samples are drawn, against passes over whole plans."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from raypipe.config import PlanConfig
from raypipe.plan import schedule
from raypipe.plan.places import PADDING, SamplePlace, Split
from raypipe.plan.schedule import Plan
from raypipe.plan.selection import Selection
from raypipe.stores.joined import JoinedStore
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.planning import make_plan


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
    "windows": lambda: plan_of([997], 10, shuffle=4),
    "long passes": lambda: plan_of([997], epoch_samples=300),
    "weights": lambda: plan_of([500], weights="weight"),
    "classes": lambda: plan_of([500], weights=0.5, epoch_samples=700),
    "weighted windows": lambda: plan_of([500], 10, weights="weight", shuffle=3),
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
def test_samples_are_found_where_a_pass_over_the_run_has_them(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "_NUM_SCANNED", 100)
    plan = PLANS[kind]()
    places = enumerated(plan)
    split: Split
    for split, size in ("train", plan.kept["train"].num_samples), ("val", 45):
        found = defaultdict(list)
        for index, place in plan.places_of(range(-1, size + 2), split):
            found[split, index].append(place)
        assert found == {
            key: value
            for key, value in places.items()
            if key[0] == split and key[1] != PADDING
        }
        assert found


def test_a_sample_that_is_left_out_or_does_not_exist_has_no_places() -> None:
    assert not list(plan_of([997]).places_of([0, 7, -1, PADDING, 997, 1 << 40]))


def test_some_epochs_are_searched_alone() -> None:
    found = plan_of([997]).places_of([5], epochs=[3, 1])
    assert [place.micro_batch.epoch for _, place in found] == [3, 1]
