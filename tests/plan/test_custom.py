"""Samplers of a user's own: the two of docs/sampling.md's kind, and those that break the protocol."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import without_ray

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import ConfigError
from raypipe.plan.custom import Population, Sampler
from raypipe.plan.places import MicroBatchId
from raypipe.plan.schedule import Plan
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.opening import open_stream

from pictures import picture  # isort: skip

NUM = 60


class Shuffled:
    """The order of a run without a sampler; the base of those that break something."""

    def __init__(self, population: Population, **arguments: Any) -> None:
        self.population = population

    def __len__(self) -> int:
        return self.population.size

    def draw(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return self.population.shuffled(epoch, positions)


class KFold(Sampler):
    """Trains on all samples but those of a fold, and validates on these."""

    def __init__(
        self, population: Population, fold: int = 0, num_folds: int = 5
    ) -> None:
        self.population = population
        self.fold = fold
        self.num_folds = num_folds
        self.numbers = np.flatnonzero(~self.is_in_fold(population))

    def is_in_fold(self, population: Population) -> np.ndarray:
        return population.indices % self.num_folds == self.fold

    def __len__(self) -> int:
        return len(self.numbers)

    def draw(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return self.numbers[self.population.shuffled(epoch, positions, len(self))]

    def validation(self, population: Population) -> np.ndarray:
        return np.flatnonzero(self.is_in_fold(population))


class EasyFirst(Shuffled):
    """A curriculum: an epoch draws from the samples of low cost, of which each epoch has more."""

    def __init__(self, population: Population, column: str = "cost") -> None:
        super().__init__(population)
        self.by_cost = np.argsort(population.column(column), kind="stable")

    def draw(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        num = min(len(self), 20 * (epoch + 1))
        return self.by_cost[self.population.shuffled(epoch, positions % num, num)]


def store(num: int = NUM, first: int = 0, **options: Any) -> MemoryStore:
    images = [picture(first + number, 10, 10) for number in range(num)]
    costs = (np.arange(num) * 7 % num).astype(np.float64)
    return MemoryStore(images, np.arange(num) % 5, columns={"cost": costs}, **options)


def stream(
    sampler: Any, train: Any = None, val: Any = None, options: Any = None, **plan: Any
) -> Any:
    settings = {"epochs": 3, "micro_batch_size": 4, "global_batch_size": 16, **plan}
    return open_stream(
        store() if train is None else train,
        val,
        plan=PlanConfig(sampler=sampler, **settings),
        transform=TransformConfig(train="light", val="center", size=8),
        pool=PoolConfig(engine="inline"),
        **(options or {}),
    )


def plan_of(sampler: Any, *arguments: Any, **settings: Any) -> Plan:
    plan = stream(sampler, *arguments, **settings).plan
    assert isinstance(plan, Plan)
    return plan


def drawn(plan: Plan, split: str = "train", epoch: int = 0) -> list[int]:
    places = [
        place
        for place in plan.micro_batches(plan.start())
        if place.split == split and place.epoch == epoch
    ]
    indices = np.concatenate([plan.indices(place) for place in places])
    return indices[indices >= 0].tolist()


# What a sampler draws is what the run has


def test_shuffled_is_the_order_of_a_run_without_a_sampler() -> None:
    custom, plain = plan_of(Shuffled), plan_of("")
    for epoch in range(3):
        assert drawn(custom, epoch=epoch) == drawn(plain, epoch=epoch)
    assert custom.fingerprint != plain.fingerprint


def test_folds_divide_the_store_into_training_and_validation() -> None:
    validated = []
    for fold in range(5):
        plan = plan_of({"name": KFold, "fold": fold}, val=store())
        in_fold = drawn(plan, "val")
        assert in_fold == [number for number in range(NUM) if number % 5 == fold]
        assert plan.num_val == NUM // 5 and plan.steps_per_epoch == 3
        for epoch in range(3):
            trained = drawn(plan, epoch=epoch)
            assert len(set(trained)) == 48 and not set(trained) & set(in_fold)
        validated += in_fold
    assert sorted(validated) == list(range(NUM))


def test_a_fold_is_the_same_samples_whatever_a_filter_excludes() -> None:
    filters = {"filter": {"train": "label != 3", "val": "cost > 5"}}
    plan = plan_of({"name": KFold, "fold": 2}, val=store(), options=filters)
    trained = {index for epoch in range(3) for index in drawn(plan, epoch=epoch)}
    assert {index % 5 for index in trained} == {0, 1, 4}
    assert {index % 5 for index in drawn(plan, "val")} == {2}


def test_a_curriculum_reads_a_column_and_adds_samples_by_epoch() -> None:
    plan = plan_of(EasyFirst, epochs=4)
    costs = np.arange(NUM) * 7 % NUM
    most = [int(costs[drawn(plan, epoch=epoch)].max()) for epoch in range(4)]
    assert most == [19, 39, 59, 59]
    assert plan_of({"name": EasyFirst, "column": "label"}).steps_per_epoch == 3


def test_one_sampler_draws_from_all_stores_of_a_mixture() -> None:
    stores = {"one": store(), "two": store(20, first=100)}
    plan = plan_of({"name": EasyFirst}, stores)
    assert plan.num_train == 80 and plan.sources == ("one", "two")
    indices = np.array(drawn(plan, epoch=2))
    assert set(plan.source_of(indices).tolist()) == {0, 1}
    place = MicroBatchId("train", 0, 0, 0)
    easy = set(drawn(plan))
    assert {plan.substitute(place, 70, attempt) for attempt in range(20)} <= easy


def test_repeats_of_a_sampler_are_different_copies() -> None:
    plan = plan_of({"name": KFold}, aug_repeats=2)
    draws = plan.draw_block([MicroBatchId("train", 1, 0, micro) for micro in (0, 1)])
    assert draws.indices[0].tolist() == draws.indices[1].tolist()
    keys = [plan.sample_keys("train", draws.at(row)) for row in (0, 1)]
    assert not (keys[0] == keys[1]).any()
    assert plan.steps_per_epoch == 6


def test_each_draw_of_a_run_has_its_own_key() -> None:
    plan = plan_of(EasyFirst)  # which draws samples again in an epoch
    places = list(plan.micro_batches(plan.start()))
    keys = [plan.sample_keys("train", plan.draw(place)) for place in places]
    assert len(np.unique(np.concatenate(keys), axis=0)) == 4 * len(places)


def test_groups_of_a_store_are_told_to_the_sampler() -> None:
    groups = []

    class Seen(Shuffled):
        def __init__(self, population: Population) -> None:
            super().__init__(population)
            groups.append(population.groups)
            assert population.labels.tolist() == (population.indices % 5).tolist()

    filters = {"filter": "label != 0"}
    plan_of(Seen, store(group_size=20), options=filters, shuffle="window")
    plan_of(Seen)
    assert groups[0].tolist() == [0, 16, 32, 48] and groups[1] is None


# Purity, the fingerprint and resumption


def test_pickled_plans_draw_alike_and_read_no_columns() -> None:
    plan = plan_of(EasyFirst)
    copy = pickle.loads(pickle.dumps(plan))
    assert drawn(copy, epoch=1) == drawn(plan, epoch=1)
    population = pickle.loads(pickle.dumps(plan.training.sampler._sampler.population))  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="read them in its __init__"):
        population.column("cost")


def test_a_stream_resumes_from_every_step_with_the_same_bits() -> None:
    spec = stream({"name": KFold, "fold": 1}, val=store())
    whole = without_ray.digests(spec)
    assert len(set(whole)) >= 40
    for step in (1, 4, 8):
        rest = without_ray.digests(spec, step)
        assert rest == whole[-len(rest) :]


def test_distinct_samplers_and_arguments_have_distinct_fingerprints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_samplers.py").write_text(
        "from raypipe import Sampler\n"
        "class Reversed(Sampler):\n"
        "    def __init__(self, population): self.size = population.size\n"
        "    def __len__(self): return self.size\n"
        "    def draw(self, epoch, positions): return self.size - 1 - positions\n"
    )
    samplers: list[Any] = [
        "",
        "my_samplers:Reversed",
        Shuffled,
        {"name": Shuffled, "unused": 1},
        {"name": Shuffled, "unused": np.arange(3)},
        {"name": Shuffled, "unused": np.arange(4)},
        EasyFirst,
        KFold,
        {"name": KFold, "fold": 1},
        {"name": KFold, "num_folds": 6},
    ]
    plans = [plan_of(sampler) for sampler in samplers]
    assert len({plan.fingerprint for plan in plans}) == len(samplers)
    assert [plan_of(sampler).fingerprint for sampler in samplers] == [
        plan.fingerprint for plan in plans
    ]
    assert drawn(plans[1]) == list(range(NUM - 1, NUM - 49, -1))


# What is wrong is said when a stream is opened


class Short(Shuffled):
    def draw(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return positions[1:]


class Floats(Shuffled):
    def draw(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return positions / 2


class Beyond(Shuffled):
    def draw(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return positions + 1


class Stateful(Shuffled):
    def __init__(self, population: Population) -> None:
        super().__init__(population)
        self.rng = np.random.default_rng(0)

    def draw(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return self.rng.integers(0, len(self), len(positions))


class OfItsBatch(Shuffled):
    """Draws that depend on which positions are asked for together."""

    def draw(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return positions - positions.min()


class Failing(Shuffled):
    def draw(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        raise KeyError("cost")


class Empty(Shuffled):
    def __len__(self) -> int:
        return 0


class Twice(Shuffled):
    def validation(self, population: Population) -> np.ndarray:
        return np.array([1, 2, 1])


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (Short, r"'Short' drew \(59,\) for 60 positions of epoch 0: draw\(\) must"),
        (Floats, r"'Floats' in epoch 0 draws float64 .* are integers from 0 to 59"),
        (Beyond, r"'Beyond' in epoch 0 draws sample 60: .* integers from 0 to 59"),
        (Stateful, r"'Stateful' is not a pure function: at position \d+ of epoch"),
        (OfItsBatch, r"'OfItsBatch' is not a pure function"),
        (Failing, r"failed in draw\(\): KeyError: 'cost' \(at .*test_custom.py:\d+ in"),
        (Empty, r"'Empty' has a length of 0"),
        (Twice, r"'Twice' validates 3 samples, 2 of them different"),
        (dict, r"'dict' cannot be made: TypeError|'dict' makes a dict, which lacks"),
        ({"name": KFold, "folds": 3}, r"cannot be made: TypeError: .*'folds'"),
        (
            {"name": EasyFirst, "column": "price"},
            r"no column 'price' for plan\.sampler",
        ),
        ({"name": Shuffled, "unused": {1}}, r"the argument \{1\} cannot be part of a"),
        ("no_such_module:KFold", r"plan\.sampler 'no_such_module:KFold' cannot be imp"),
    ],
)
def test_a_sampler_that_breaks_the_protocol_is_rejected_at_once(
    sampler: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        stream(sampler, val=store())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampler": "KFold"}, r"plan\.sampler must be module:Class, or \{name: "),
        ({"sampler": {"fold": 1}}, r"plan\.sampler must be module:Class, or \{name: "),
        ({"weights": 0.5}, r"plan\.weights must be left out with plan\.sampler"),
        ({"epoch_samples": 9}, r"plan\.epoch_samples must be left out with"),
        ({"mixture": {"a": 1}}, r"plan\.mixture must be left out with plan\.sampler"),
        ({"buckets": ["8x8"]}, r"plan\.buckets must be left out with plan\.sampler"),
        ({"global_batch_size": 64}, r"has 48 draws in an epoch, fewer than a global"),
    ],
)
def test_settings_that_a_sampler_replaces_are_rejected(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(settings.pop("sampler", KFold), **settings)
