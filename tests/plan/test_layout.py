from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.config import PlanConfig
from raypipe.errors import ConfigError
from raypipe.plan.mixture import ONE, as_shares
from raypipe.plan.places import MicroBatchId
from raypipe.plan.schedule import Plan
from raypipe.stores.base import MemoryStore, Store
from raypipe.stores.joined import JoinedStore


def store(size: int, group_size: int | None = None, salt: int = 0) -> MemoryStore:
    weights = np.arange(size) % 4 + salt + 0.5
    labels = (np.arange(size) ** 2 % 5).tolist()
    images = [bytes([i % 256, i // 256, salt]) for i in range(size)]
    return MemoryStore(images, labels, columns={"weight": weights}, group_size=group_size)


def plan_of(train: Store, exclude: Any = (), **config: Any) -> Plan:
    settings = {"epochs": 3, "micro_batch_size": 2, "global_batch_size": 8, "seed": 3, **config}
    return Plan.from_stores(PlanConfig(**settings), train, store(5, salt=9), exclude=exclude)


def stream(plan: Plan) -> list[tuple[MicroBatchId, list[tuple[int, int]]]]:
    found = []
    for at in plan.micro_batches(plan.start()):
        indices, repeats = plan.draws(at)
        repeats = np.zeros(len(indices), np.int64) if repeats is None else repeats
        found.append((at, list(zip(indices.tolist(), repeats.tolist(), strict=True))))
    return found


def epochs(plan: Plan) -> list[list[tuple[int, int]]]:
    """The draws of each training epoch."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(plan.config.epochs)]
    for at, drawn in stream(plan):
        if at.split == "train":
            found[at.epoch] += drawn
    return found


@st.composite
def compositions(draw: st.DrawFn) -> Plan:
    per_step, micro_batch = draw(st.sampled_from([1, 2, 4, 6])), draw(st.sampled_from([1, 2, 4]))
    repeats_in = draw(st.sampled_from(["step", "micro_batch"]))
    of = per_step if repeats_in == "step" else micro_batch
    sizes = draw(st.lists(st.integers(per_step * micro_batch, 60), min_size=1, max_size=3))
    parts = [store(size, draw(st.sampled_from([None, 3, 10])), salt=number) for number, size in enumerate(sizes)]
    exclude = draw(st.sets(st.integers(0, sum(sizes) - 1), max_size=8))
    weighted = draw(st.sampled_from([{}, {"weights": "weight"}, {"class_balance": 1.0}, {"class_balance": 0.5}]))
    mixture: dict[Any, Any] = {}
    if len(parts) > 1 and draw(st.booleans()):
        for epoch in draw(st.sampled_from([[0], [0, 1], [0, 2]])):
            values = draw(st.tuples(*[st.integers(0, 5)] * len(parts)).filter(any))
            mixture[epoch] = {f"s{number}": float(value) for number, value in enumerate(values)}
    config = PlanConfig(
        epochs=3,
        micro_batch_size=micro_batch,
        global_batch_size=micro_batch * per_step,
        seed=draw(st.integers(0, 2**40)),
        shuffle=draw(st.sampled_from(["auto", "global", "off"])),
        repeats=draw(st.sampled_from([k for k in (1, 2, 4) if of % k == 0])),
        repeats_in=repeats_in,
        epoch_samples=draw(st.integers(per_step * micro_batch, 100)),
        mixture=mixture,
        **weighted,
    )
    train: Store = parts[0]
    if len(parts) > 1:
        train = JoinedStore({f"s{number}": part for number, part in enumerate(parts)})
    try:
        return Plan.from_stores(config, train, store(5, salt=9), exclude=[i for i in exclude if i < len(train)])
    except ConfigError as error:
        assert (
            "has no samples" in str(error)
            or "has 0 samples" in str(error)
            or "smaller than a global batch" in str(error)
        )
        return plan_of(store(9), repeats=2)


# What holds for any of them


@given(compositions())
@settings(max_examples=60, deadline=None)
def test_an_epoch_draws_whole_steps_of_distinct_draws_with_keys_of_their_own(plan: Plan) -> None:
    for epoch, drawn in enumerate(epochs(plan)):
        assert len(drawn) == plan.steps_per_epoch * plan.global_batch_size
        assert len(set(drawn)) == len(drawn)
        kept = plan.kept["train"]
        indices = np.array([index for index, _ in drawn])
        assert (kept.indices(kept.numbers(indices)) == indices).all(), "a sample that is left out is not drawn"
        at = MicroBatchId("train", epoch, 0, 0)
        keys = plan.sample_keys(at, indices, np.array([repeat for _, repeat in drawn]))
        assert len(np.unique(keys[:, 0])) == len(np.unique(keys[:, 1])) == len(drawn)


@given(compositions())
@settings(max_examples=30, deadline=None)
def test_copies_meet_in_one_step_and_in_as_many_micro_batches_as_declared(plan: Plan) -> None:
    times = plan.config.repeats
    for step in range(
        0, len(whole := [each for each in stream(plan) if each[0].split == "train"]), plan.config.per_step
    ):
        micro_batches = [dict.fromkeys(drawn) for _, drawn in whole[step : step + plan.config.per_step]]
        units = Counter((index, repeat // times) for drawn in micro_batches for index, repeat in drawn)
        assert set(units.values()) == {times}
        spread = Counter((i, r) for drawn in micro_batches for i, r in {(i, r // times) for i, r in drawn})
        assert set(spread.values()) == {times if plan.config.repeats_in == "step" else 1}


@given(compositions())
@settings(max_examples=30, deadline=None)
def test_ranks_of_every_world_size_share_each_step_and_a_resume_anywhere_gives_the_tail(plan: Plan) -> None:
    per_step, found = plan.config.per_step, stream(plan)
    for world_size in (w for w in range(1, per_step + 1) if per_step % w == 0):
        shares = [[each for each in found if each[0].micro % world_size == rank] for rank in range(world_size)]
        assert [each for turn in zip(*shares, strict=True) for each in turn] == found
    again = pickle.loads(pickle.dumps(plan))
    tails = {at: number for number, (at, _) in enumerate(found)}
    for global_step in range(plan.config.epochs * plan.steps_per_epoch):
        cursor = plan.cursor_at(global_step)
        left = list(again.micro_batches(cursor))
        assert left == [at for at, _ in found[tails[left[0]] :]]
        indices, repeats = again.draws(left[0])  # alone, and without what came before
        drawn = list(
            zip(indices.tolist(), [0] * len(indices) if repeats is None else repeats.tolist(), strict=True)
        )
        assert drawn == found[tails[left[0]]][1]


@given(compositions())
@settings(max_examples=30, deadline=None)
def test_a_sample_is_found_where_it_is_drawn_first_and_substitutes_keep_to_its_source(plan: Plan) -> None:
    first = {index: number for number, (index, _) in reversed(list(enumerate(epochs(plan)[1])))}
    for index in range(0, plan.num_train, 7):
        at, row = plan.find(1, index)
        number = first.get(index)
        assert (at is None) == (number is None)
        if at is not None and number is not None:
            assert (at.step * plan.config.per_step + at.micro) * plan.config.micro_batch_size + row == number
        found = plan.substitute(MicroBatchId("train", 1, 0, 0), index, 2)
        if plan.layout.sources:
            assert plan.source_of(np.array([found])) == plan.source_of(np.array([index]))


# One by one


def test_a_single_store_by_weights_draws_each_sample_as_often_as_declared() -> None:
    plan = plan_of(store(20), weights="weight", epoch_samples=36)
    weights = np.arange(20) % 4 + 0.5
    exact = 32 * weights / weights.sum()  # of 36 draws, 32 are whole steps
    for drawn in epochs(plan):
        counts = np.bincount([index for index, _ in drawn], minlength=20)
        assert (np.floor(exact) <= counts).all() and (counts <= np.ceil(exact)).all()


def test_balanced_classes_are_drawn_equally_often() -> None:
    train = store(200)
    plan = plan_of(train, class_balance=1.0)
    labels = train.read(np.arange(200), ("label",))["label"]
    for drawn in epochs(plan):
        counts = np.bincount(labels[[index for index, _ in drawn]])
        present = counts[np.unique(labels)]
        assert present.sum() == 200 and max(present) - min(present) <= 1


def test_repeats_draw_each_sample_so_often_and_no_more() -> None:
    for where in ("step", "micro_batch"):
        for drawn in epochs(plan_of(store(20), repeats=2, repeats_in=where)):
            assert set(Counter(index for index, _ in drawn).values()) == {2} and len(drawn) == 40
    # As in Hoffer et al. and timm, an epoch may draw fewer samples instead.
    drawn = epochs(plan_of(store(20), repeats=2, epoch_samples=20))
    assert [len(each) for each in drawn] == [16] * 3
    assert max(Counter(index for each in drawn for index, _ in each).values()) <= 4


def test_an_epoch_length_walks_through_the_store_and_leaves_nothing_out() -> None:
    drawn = epochs(plan_of(store(12), epoch_samples=9))
    assert sorted(index for each in drawn for index, _ in each) == sorted([*range(12), *range(12)])


def mixed(**config: Any) -> Plan:
    return plan_of(JoinedStore({"a": store(64), "b": store(16, salt=1), "c": store(200, 10, salt=2)}), **config)


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ({}, 35),  # by their sizes, all of the 280
        ({"mixture": {"a": 2, "b": 1, "c": 1}}, 8),  # b ends after 16
        ({"mixture": {"a": 2, "b": 0, "c": 1}}, 12),  # a after 64
        ({"mixture": {"a": 2, "b": 1, "c": 1}, "epoch_samples": "longest"}, 100),
        ({"mixture": {"a": 2, "b": 1, "c": 1}, "repeats": 2}, 16),
        ({"mixture": {"a": 2, "b": 1, "c": 1}, "epoch_samples": 100}, 12),
    ],
)
def test_a_mixture_lasts_until_its_first_store_ends_or_as_said(config: dict[str, Any], steps: int) -> None:
    assert mixed(**config).steps_per_epoch == steps


def test_each_global_batch_of_a_mixture_has_its_weights() -> None:
    plan = mixed(mixture={0: {"a": 0.5, "b": 0.3, "c": 0.2}, 1: {"a": 0, "b": 0.5, "c": 0.5}})
    shares = {epoch: as_shares(w) for epoch, w in {0: (0.5, 0.3, 0.2), 1: (0, 1, 1), 2: (0, 1, 1)}.items()}
    for epoch, drawn in enumerate(epochs(plan)):
        sources = plan.source_of(np.array([index for index, _ in drawn])).reshape(-1, 8)
        for batch in sources:
            for count, share in zip(np.bincount(batch, minlength=3), shares[epoch], strict=True):
                assert 8 * share // ONE <= count <= -(-8 * share // ONE)
    assert plan.source_of(np.array([0, 63, 64, 80, 279, -1])).tolist() == [0, 0, 1, 2, 2, -1]


def test_golden_orders_and_fingerprints_of_composed_plans() -> None:
    def first(plan: Plan) -> tuple[str, list[tuple[int, int]]]:
        return plan.fingerprint, epochs(plan)[1][:8]

    assert first(plan_of(store(20), repeats=2)) == (
        "7c8f2b8b67050bdc",
        [(9, 0), (10, 0), (9, 1), (10, 1), (17, 0), (4, 0), (17, 1), (4, 1)],
    )
    assert first(plan_of(store(20), weights="weight")) == (
        "70a4c7823ff9d228",
        [(3, 0), (7, 0), (7, 1), (2, 0), (11, 0), (9, 0), (10, 0), (6, 0)],
    )
    assert first(plan_of(store(20), epoch_samples=9, exclude=[3])) == (
        "df21d345457f2f85",
        [(13, 0), (0, 0), (5, 0), (9, 0), (14, 0), (4, 0), (11, 0), (7, 0)],
    )
    assert first(mixed(mixture={"a": 2, "b": 1, "c": 1})) == (
        "2f105fdccf1666c9",
        [(26, 0), (15, 0), (7, 0), (93, 0), (35, 0), (65, 0), (77, 0), (168, 0)],
    )


def test_every_setting_of_what_is_drawn_is_part_of_the_fingerprint() -> None:
    single: list[dict[str, Any]] = [
        {},
        {"repeats": 2},
        {"repeats": 2, "repeats_in": "micro_batch"},
        {"epoch_samples": 16},
        {"epoch_samples": 24},
        {"weights": "weight"},
        {"weights": "label"},
        {"class_balance": 0.5},
        {"class_balance": 1.0},
    ]
    several: list[dict[str, Any]] = [
        *single,
        {"mixture": {"a": 2, "b": 1, "c": 1}},
        {"mixture": {0: {"a": 2, "b": 1, "c": 1}, 1: {"a": 1, "b": 1, "c": 1}}},
        {"mixture": {0: {"a": 2, "b": 1, "c": 1}, 2: {"a": 1, "b": 1, "c": 1}}},
        {"epoch_samples": "longest", "mixture": {"a": 2, "b": 1, "c": 1}},
        {"exclude": [5]},
        {"exclude": [64]},
    ]
    found = [plan_of(store(40), **config).fingerprint for config in single]
    found += [mixed(**config).fingerprint for config in several]
    assert len(set(found)) == len(found)
    assert (
        mixed(mixture={"a": 2, "b": 1, "c": 1}).fingerprint == mixed(mixture={"c": 2, "a": 4, "b": 2}).fingerprint
    )


def test_weights_from_a_file_are_those_of_a_column(tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", np.arange(20) % 4 + 0.5)
    by_file = plan_of(store(20), weights=str(tmp_path / "w.npy"))
    assert by_file.fingerprint == plan_of(store(20), weights="weight").fingerprint
    (tmp_path / "bad.npy").write_bytes(b"no array")
    for name in ("bad.npy", "none.npy"):
        with pytest.raises(ConfigError, match=rf"plan\.weights: .*{name} cannot be read"):
            plan_of(store(20), weights=str(tmp_path / name))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mixture": {"a": 1}}, r"plan\.mixture has weights of a, and store\.train is a single store"),
        ({"weights": "weigth"}, r"plan\.weights names 'weigth'; the columns that .* are: label, weight"),
        ({"weights": "image"}, r"plan\.weights names 'image'"),
        ({"epoch_samples": 7}, "an epoch of 7 draws from .* is smaller than a global batch of 8"),
    ],
)
def test_settings_that_do_not_go_with_a_store_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(store(20), **config)


def test_a_mixture_names_the_stores_that_have_no_weight() -> None:
    with pytest.raises(ConfigError, match=r"weights of a, d; the stores of store\.train are a, b, c"):
        mixed(mixture={"a": 1, "d": 1})


def test_a_plan_without_draws_has_the_same_schedule_and_little_weight() -> None:
    plan = plan_of(store(3000), weights="weight")
    light = plan.without_draws()
    assert list(light.micro_batches(light.start())) == list(plan.micro_batches(plan.start()))
    assert len(pickle.dumps(light)) < 3000 < 24_000 < len(pickle.dumps(plan))
