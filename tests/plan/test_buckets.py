from __future__ import annotations

import pickle
from collections import Counter
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from raypipe.config import PlanConfig
from raypipe.errors import ConfigError
from raypipe.plan.buckets import nearest
from raypipe.plan.places import MicroBatchId
from raypipe.plan.schedule import Plan
from raypipe.stores.base import MemoryStore
from raypipe.stores.joined import JoinedStore

THREE = ["192x256", "224x224", "256x192"]
SIDES = [(192, 256), (224, 224), (256, 192)]


def store(widths: Any, heights: Any, **options: Any) -> MemoryStore:
    columns = {"width": np.asarray(widths), "height": np.asarray(heights)}
    return MemoryStore([bytes([i % 256]) for i in range(len(widths))], None, columns=columns, **options)


def varied(num: int, seed: int = 0) -> MemoryStore:
    rng = np.random.default_rng(seed)
    return store(rng.integers(50, 400, num), rng.integers(50, 400, num))


def plan_of(train: Any, exclude: Any = (), **config: Any) -> Plan:
    given = {"epochs": 2, "micro_batch_size": 4, "global_batch_size": 8, "seed": 3, "buckets": THREE, **config}
    return Plan.from_stores(PlanConfig(**given), train, varied(5), exclude=np.array(sorted(exclude), np.int64))


Drawn = list[tuple[int, int]]


def draws(plan: Plan, at: MicroBatchId) -> Drawn:
    """The samples of a micro-batch, and their repeats."""
    indices, repeats = plan.draws(at)
    repeats = np.zeros(len(indices), np.int64) if repeats is None else repeats
    return list(zip(indices.tolist(), repeats.tolist(), strict=True))


def micro_batches(plan: Plan) -> list[tuple[MicroBatchId, Drawn]]:
    """Those of the training."""
    return [(at, draws(plan, at)) for at in plan.micro_batches(plan.start()) if at.split == "train"]


# Which bucket a sample is in


def slowly(width: int, height: int, buckets: list[tuple[int, int]]) -> int:
    def apart(one: Fraction, other: Fraction) -> Fraction:
        return max(one, other) / min(one, other)

    def distance(bucket: tuple[int, int]) -> tuple[Fraction, Fraction]:
        ratio = apart(Fraction(width, height), Fraction(bucket[1], bucket[0]))
        return ratio, apart(Fraction(width * height), Fraction(bucket[0] * bucket[1]))

    return min(range(len(buckets)), key=lambda number: distance(buckets[number]))


sides = st.tuples(st.integers(1, 99_999), st.integers(1, 99_999))
few = st.tuples(st.integers(1, 12), st.integers(1, 12))  # so that there are ties


@given(st.lists(sides | few, min_size=1, max_size=6), st.lists(sides | few, min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_a_sample_is_in_the_bucket_of_the_nearest_ratio_then_area_then_the_first(
    buckets: list[tuple[int, int]], images: list[tuple[int, int]]
) -> None:
    heights, widths = np.array(images).T
    found = nearest(widths, heights, buckets).tolist()
    assert found == [slowly(width, height, buckets) for height, width in images]


def test_buckets_of_one_ratio_are_told_apart_by_their_area_and_a_draw_goes_to_the_first() -> None:
    widths = np.array([10, 100, 45, 200, 20, 20])
    heights = np.array([10, 100, 45, 100, 30, 20])
    assert nearest(widths, heights, [(20, 20), (80, 80)]).tolist() == [0, 1, 1, 1, 0, 0]
    # A square lies as far from 3:4 as from 4:3.
    assert nearest(np.array([50]), np.array([50]), [(40, 30), (30, 40)]).tolist() == [0]


# What holds for any plan


@st.composite
def compositions(draw: st.DrawFn) -> Plan:
    per_step, micro_batch = draw(st.sampled_from([1, 2, 4, 6])), draw(st.sampled_from([1, 2, 4]))
    repeats_in = draw(st.sampled_from(["step", "micro_batch"]))
    of = per_step if repeats_in == "step" else micro_batch
    train = varied(draw(st.integers(20, 60)), draw(st.integers(0, 99)))
    try:
        return plan_of(
            train,
            draw(st.sets(st.integers(0, len(train) - 1), max_size=60)),
            micro_batch_size=micro_batch,
            global_batch_size=per_step * micro_batch,
            seed=draw(st.integers(0, 2**40)),
            shuffle=draw(st.sampled_from(["auto", "global"])),
            repeats=draw(st.sampled_from([k for k in (1, 2, 4) if of % k == 0])),
            repeats_in=repeats_in,
            epoch_samples=draw(st.sampled_from([0, per_step * micro_batch, 50, 200])),
            buckets=draw(st.lists(few, min_size=1, max_size=4, unique=True).map(as_texts)),
        )
    except ConfigError as error:
        assert "smaller than a global batch" in str(error) or "has the samples of a micro-batch" in str(error)
        assume(False)
        raise


def as_texts(buckets: list[tuple[int, int]]) -> list[str]:
    return [f"{height}x{width}" for height, width in buckets]


@given(compositions())
@settings(max_examples=12, deadline=None)
def test_each_micro_batch_has_one_bucket_and_an_epoch_no_draw_twice(plan: Plan) -> None:
    config, buckets = plan.config, plan.buckets
    assert buckets is not None
    kept, found = plan.kept["train"], micro_batches(plan)
    for at, of_batch in found:
        assert {buckets.sides[buckets.bucket_of(index)] for index, _ in of_batch} == {plan.bucket_of(at)}
    for epoch in range(config.epochs):
        drawn = [each for at, of_batch in found if at.epoch == epoch for each in of_batch]
        assert len(set(drawn)) == len(drawn) == plan.steps_per_epoch * plan.global_batch_size
        indices = np.array([index for index, _ in drawn])
        assert (kept.indices(kept.numbers(indices)) == indices).all(), "a sample that is left out is not drawn"
        keys = plan.sample_keys(MicroBatchId("train", epoch, 0, 0), *np.array(drawn).T)
        assert len(np.unique(keys[:, 0])) == len(drawn)
        times = Counter(index for index, _ in drawn)
        if not config.epoch_samples:
            assert set(times.values()) == {config.repeats}
            # Left over are less than a unit of each bucket, and less than a step of whole units.
            units = config.samples_per_step // config.repeats
            left = plan.num_train - len(times) - sum(len(each.chosen) % buckets.unit for each in buckets.members)
            assert 0 <= left < units and left % buckets.unit == 0


@given(compositions())
@settings(max_examples=8, deadline=None)
def test_ranks_of_every_world_size_share_each_step_and_a_resume_anywhere_gives_the_tail(plan: Plan) -> None:
    found, per_step = micro_batches(plan), plan.config.per_step
    for world_size in (w for w in range(1, per_step + 1) if per_step % w == 0):
        shares = [[each for each in found if each[0].micro % world_size == rank] for rank in range(world_size)]
        assert [each for turn in zip(*shares, strict=True) for each in turn] == found
    again = pickle.loads(pickle.dumps(plan))
    for global_step in range(plan.config.epochs * plan.steps_per_epoch):
        left = again.micro_batches(again.cursor_at(global_step))
        assert [(at, draws(again, at)) for at in islice(left, 1)] == [found[global_step * per_step]]
        assert len([at for at in left if at.split == "train"]) == len(found) - global_step * per_step - 1


@given(compositions())
@settings(max_examples=10, deadline=None)
def test_a_bad_sample_is_replaced_by_one_of_its_bucket(plan: Plan) -> None:
    assert plan.buckets is not None
    for at, drawn in micro_batches(plan)[:5]:
        for attempt in range(3):
            index = plan.substitute(at, drawn[0][0], attempt)
            assert plan.buckets.sides[plan.buckets.bucket_of(index)] == plan.bucket_of(at)
    assert plan.bucket_of(MicroBatchId("val", 0, 0, 0)) is None


# One by one


def test_epochs_leave_over_other_samples_and_draw_in_another_order() -> None:
    plan = plan_of(varied(50), epochs=8)
    found, left, orders = micro_batches(plan), [], set()
    for epoch in range(8):
        of_epoch = [each for each in found if each[0].epoch == epoch]
        left.append(set(range(50)) - {index for _, drawn in of_epoch for index, _ in drawn})
        orders.add(tuple(plan.bucket_of(at) for at, _ in of_epoch))
    assert len(set(map(frozenset, left))) > 4 < len(orders) and not set.intersection(*left)


def test_epochs_of_a_length_walk_through_all_places_of_a_pass() -> None:
    plan = plan_of(varied(50), micro_batch_size=2, global_batch_size=4, epoch_samples=12, epochs=12)
    assert plan.buckets is not None and plan.steps_per_epoch == 3
    per_pass = plan.buckets.size
    run = [index for _, drawn in micro_batches(plan) for index, _ in drawn]
    assert 46 <= per_pass <= 50 and len(set(run[:per_pass])) == per_pass == len(set(run[per_pass : 2 * per_pass]))


def test_golden_orders_and_fingerprints() -> None:
    plan = plan_of(varied(20), micro_batch_size=2, global_batch_size=4)
    found = [(plan.bucket_of(at), [i for i, _ in drawn]) for at, drawn in micro_batches(plan) if at.epoch == 1]
    assert plan.fingerprint == "ebf3ea33509dc240"
    assert found[:6] == [
        ((224, 224), [18, 7]),
        ((192, 256), [15, 14]),
        ((192, 256), [17, 19]),
        ((256, 192), [1, 6]),
        ((256, 192), [4, 10]),
        ((256, 192), [5, 8]),
    ]


def test_the_buckets_are_part_of_the_fingerprint_and_plans_without_keep_theirs() -> None:
    train = varied(60)
    found = [
        plan_of(train, **config).fingerprint
        for config in (
            {},
            {"buckets": THREE[:2]},
            {"buckets": THREE[::-1]},
            {"buckets": ["192x256", "224x224", "264x192"]},
            {"repeats": 2},
            {"epoch_samples": 40},
            {"exclude": [5]},
            {"buckets": []},
        )
    ]
    assert len(set(found)) == len(found)
    other = store(*(np.array(list(train.read(np.arange(60), ("width", "height")).values())) + 1))
    assert plan_of(other).fingerprint != found[0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"shuffle": "off"}, "takes samples from all over a store, and plan.shuffle is 'off' for"),
        (
            {"micro_batch_size": 64, "global_batch_size": 64},
            "none of plan.buckets has the samples of a micro-batch, 64",
        ),
        ({"global_batch_size": 80}, "smaller than a global batch of 80"),
    ],
)
def test_settings_that_do_not_go_with_a_store_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(varied(50), **config)


def test_stores_that_have_no_sizes_or_several_parts_or_groups_are_told_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"plan\.buckets names 'width'; .*--add-sizes` adds it"):
        plan_of(MemoryStore([b"x"] * 20, [0] * 20))
    unknown = store([5] * 17 + [-1, 0, 3], [5] * 19 + [-1])
    with pytest.raises(ConfigError, match=r"none for 3 samples, the first of them 17: .*store.filter='width > 0'"):
        plan_of(unknown)
    assert plan_of(unknown, [17, 18, 19]).steps_per_epoch == 2
    with pytest.raises(ConfigError, match=r"none for 1 samples, the first of them 1"):
        plan_of(MemoryStore([b"x"] * 3, None, columns={"width": [4, None, 5], "height": [4, 4, 5]}))
    with pytest.raises(ConfigError, match="a single store"):
        plan_of(JoinedStore({"a": varied(20), "b": varied(30)}))
    with pytest.raises(ConfigError, match=r"plan.shuffle is 'window' for .*: set plan\.shuffle=global"):
        plan_of(grouped := store([5] * 20, [5] * 20, group_size=5))
    assert plan_of(grouped, shuffle="global").steps_per_epoch == 2


@pytest.mark.parametrize("buckets", [["224"], ["0x5"], ["5x-1"], ["192x256", "0192x256"], ["4x4", "4x4"], [224]])
def test_what_is_no_bucket_is_refused(buckets: Any) -> None:
    with pytest.raises(ConfigError, match=r"plan\.buckets must be different sizes HEIGHTxWIDTH"):
        PlanConfig(buckets=buckets)


@pytest.mark.parametrize("other", [{"weights": "width"}, {"class_balance": 0.5}, {"mixture": {"a": 1}}])
def test_weights_and_mixtures_do_not_go_with_buckets(other: Any) -> None:
    with pytest.raises(ConfigError, match=r"must be left out with plan\.buckets"):
        PlanConfig(buckets=THREE, **other)


def test_a_plan_without_draws_has_the_same_schedule_and_little_weight() -> None:
    plan = plan_of(varied(3000))
    light = plan.without_draws()
    assert list(light.micro_batches(light.start())) == list(plan.micro_batches(plan.start()))
    assert len(pickle.dumps(light)) < 3000 < 6000 < len(pickle.dumps(plan))
