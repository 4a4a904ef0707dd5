"""Plans of everything that an epoch may draw by, all at once, and checks of what docs/sampling.md declares."""

from __future__ import annotations

import math
import pickle
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from raypipe.config import PlanConfig, TransformConfig
from raypipe.errors import ConfigError
from raypipe.plan.places import PADDING, MicroBatchId, SamplePlace
from raypipe.plan.samplers import Draws
from raypipe.plan.schedule import Plan
from raypipe.plan.selection import Selection
from raypipe.stores.base import Store
from raypipe.stores.filter import matching
from raypipe.stores.joined import JoinedStore
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.planning import make_plan, nearest
from raypipe.transform.sizes import size_in

BUCKETS = ["12x16", "14x14", "16x12", "7x7"]

Draw = tuple[int, int, int]

"""A sample, its pass and its repeat."""

Found = list[tuple[MicroBatchId, list[Draw]]]


@dataclass(frozen=True)
class Composition:
    """A plan, and what a user knows of it.

    Attributes:
        kept: of each store: the samples that are drawn from, by their indices among those of all stores.
        weights: of all samples; None = all alike.
        buckets: of all samples.
        labels: of all samples.
        val_keep: of all samples of the validations: whether they are in them.
        val_buckets: of all these.
        transform: with the sizes.
    """

    plan: Plan
    kept: list[np.ndarray]
    weights: np.ndarray | None
    buckets: np.ndarray
    labels: np.ndarray
    val_keep: np.ndarray
    val_buckets: np.ndarray
    transform: TransformConfig


def store_of(size: int, seed: int, group_size: int | None = None) -> MemoryStore:
    rng = np.random.default_rng((size, seed))
    columns = {
        "width": rng.integers(4, 20, size),
        "height": rng.integers(4, 20, size),
        "weight": rng.integers(0, 4, size) + 0.5 * (seed % 2) + (np.arange(size) == 0),
    }
    labels = rng.integers(0, 5, size).tolist()
    return MemoryStore(
        [bytes([i, seed % 256]) for i in range(size)],
        labels,
        columns=columns,
        group_size=group_size,
    )


def kept_of(store: MemoryStore, filter: str) -> np.ndarray:
    if not filter:
        return np.ones(len(store), bool)
    try:
        return matching(store, filter)
    except ConfigError as error:
        assert "is true for none" in str(error)
        return np.arange(len(store)) == 0


@st.composite
def compositions(draw: st.DrawFn) -> Composition:
    def pick(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    def whole(least: int, most: int) -> int:
        return draw(st.integers(least, most))

    per_step, micro_batch = pick(1, 2, 4, 6), pick(1, 2, 4, 8)
    buckets = draw(
        st.lists(st.sampled_from(BUCKETS), min_size=0, max_size=3, unique=True)
    )
    group_size = None if buckets else pick(None, 3, 10)
    stores = [
        store_of(whole(2, 50), whole(0, 99), group_size) for _ in range(pick(1, 2, 3))
    ]
    keeps = [
        kept_of(each, pick("", "label != 3", "width >= 8 and label != 1"))
        for each in stores
    ]
    for keep in keeps:
        keep[draw(st.lists(st.integers(0, len(keep) - 1), max_size=4))] = False
    by = pick({}, {"weights": "weight"}, {"weights": 1.0}, {"weights": 0.5})
    mixture: dict[Any, Any] = {}
    if len(stores) > 1 and pick(True, False):
        for epoch in pick([0], [0, 1], [0, 2]):
            values = draw(st.tuples(*[st.integers(0, 5)] * len(stores)).filter(any))
            mixture[epoch] = {
                f"s{number}": value for number, value in enumerate(values)
            }
    config = PlanConfig(
        epochs=3,
        micro_batch_size=micro_batch,
        global_batch_size=micro_batch * per_step,
        seed=whole(0, 2**40),
        shuffle=pick("auto", "global", "off"),
        aug_repeats=draw(st.sampled_from([k for k in (1, 2, 4) if per_step % k == 0])),
        epoch_samples=pick(0, "shortest", "longest", whole(per_step * micro_batch, 60)),
        mixture=mixture,
        buckets={"train": buckets, "val": pick(buckets, [])},
        val_interval=pick(1, 2),
        **by,
    )
    val = store_of(whole(1, 20), 100)
    val_keep = kept_of(val, pick("", "width > 0 and label != 2"))
    offsets = np.append(0, np.cumsum(list(map(len, stores))))
    train: Store = stores[0]
    if len(stores) > 1:
        train = JoinedStore({f"s{number}": each for number, each in enumerate(stores)})
    selections = list(map(Selection.where, keeps))
    try:
        plan = make_plan(
            config,
            train,
            val,
            selections=selections,
            val_selection=Selection.where(val_keep),
        )
    except ConfigError as error:
        too_few = (
            "has no samples",
            "has 0 samples",
            "fewer than a global batch",
        )
        assert any(
            each in str(error)
            for each in (*too_few, "has the samples of a micro-batch", "is 0 for all")
        )
        assume(False)
        raise
    columns = {
        name: np.concatenate(
            [each.read(np.arange(len(each)), (name,))[name] for each in stores]
        )
        for name in ("width", "height", "weight", "label")
    }
    weights = columns["weight"] if isinstance(config.weights, str) else None
    kept = [
        offset + np.flatnonzero(keep)
        for offset, keep in zip(offsets, keeps, strict=False)
    ]
    if config.weights and not isinstance(config.weights, str):
        weights = np.zeros(len(columns["label"]))
        for samples in kept:
            sizes = Counter(columns["label"][samples].tolist())
            weights[samples] = [
                sizes[label] ** -config.weights for label in columns["label"][samples]
            ]
    sides = config.sides_in("train") or [(1, 1)]
    return Composition(
        plan,
        kept,
        weights,
        nearest(columns["width"], columns["height"], sides),
        columns["label"],
        val_keep,
        nearest(*val.read(np.arange(len(val)), ("width", "height")).values(), sides),
        TransformConfig(size=pick(8, {0: 6, 1: 8}, {0: 4, 2: 12})),
    )


def stream(plan: Plan) -> Found:
    """All micro-batches of a run, segment by segment."""
    found: Found = []
    segments: dict[tuple[str, int], list[MicroBatchId]] = defaultdict(list)
    for at in plan.micro_batches(plan.start()):
        segments[at.split, at.epoch].append(at)
    for places in segments.values():
        draws = plan.draw_block(places)
        found += [
            (at, triples(Draws(*columns)))
            for at, *columns in zip(places, *draws, strict=True)
        ]
    return found


def triples(draws: Draws) -> list[Draw]:
    return list(
        zip(
            draws.indices.tolist(),
            draws.passes.tolist(),
            draws.repeats.tolist(),
            strict=True,
        )
    )


def declared_steps(made: Composition) -> int:
    """Steps in an epoch."""
    plan, config = made.plan, made.plan.config
    sizes = [len(samples) for samples in made.kept]
    wanted = config.epoch_samples
    if isinstance(wanted, int) and wanted:
        return wanted // plan.global_batch_size
    if len(sizes) > 1 and config.mixture:
        of_store = list(config.mixture_by_epoch[0].values())
        ends = [
            Fraction(n * sum(of_store), w) // 1
            for n, w in zip(sizes, of_store, strict=True)
            if w
        ]
        draws = max(ends) if wanted == "longest" else min(ends)
    elif len(sizes) == 1 and config.train_buckets and made.weights is None:
        unit = config.micro_batch_size
        draws = sum(
            n // unit * unit
            for n in Counter(made.buckets[made.kept[0]].tolist()).values()
        )
    else:
        draws = sum(sizes)
    return draws * config.aug_repeats // plan.global_batch_size


def check_is_share(count: int, exact: Fraction | float) -> None:
    """It is rounded down or up; of a float, whose last bits are not known, an integer may be meant."""
    if isinstance(exact, float) and abs(exact - round(exact)) < 1e-9:
        exact = round(exact)
    assert math.floor(exact) <= count <= math.ceil(exact), (count, float(exact))


def steps_of(found: Found, per_step: int) -> Iterator[tuple[int, list[list[Draw]]]]:
    """The epoch of each training step, and the draws of its micro-batches."""
    training = [each for each in found if each[0].split == "train"]
    for first in range(0, len(training), per_step):
        yield (
            training[first][0].epoch,
            [drawn for _, drawn in training[first : first + per_step]],
        )


def without_copies(step: list[list[Draw]], config: PlanConfig) -> list[list[Draw]]:
    """Places of a step that are copied, without the copies; each draw has as many as declared, where declared."""
    times = config.aug_repeats
    units = Counter(
        (index, pass_number, repeat // times)
        for drawn in step
        for index, pass_number, repeat in drawn
    )
    assert set(units.values()) == {times}
    spread = Counter(
        each
        for drawn in step
        for each in {
            (i, pass_number, repeat // times) for i, pass_number, repeat in drawn
        }
    )
    assert set(spread.values()) == {times}
    first = [
        [
            (i, pass_number, repeat // times)
            for i, pass_number, repeat in drawn
            if repeat % times == 0
        ]
        for drawn in step
    ]
    return [drawn for drawn in first if drawn]


def check_draws(made: Composition, found: Found) -> None:
    """Whole steps of distinct draws, of samples that are kept, with keys of their own, of one bucket at a time."""
    plan, kept = made.plan, np.concatenate(made.kept)
    assert plan.steps_per_epoch == declared_steps(made)
    for epoch in range(plan.config.epochs):
        of_epoch = [
            draw
            for at, drawn in found
            if (at.split, at.epoch) == ("train", epoch)
            for draw in drawn
        ]
        assert (
            len(of_epoch)
            == len(set(of_epoch))
            == plan.steps_per_epoch * plan.global_batch_size
        )
        indices, passes, repeats = np.array(of_epoch).T
        assert np.isin(indices, kept).all()
        keys = plan.sample_keys("train", Draws(indices, passes, repeats, 0 * indices))
        assert len(np.unique(keys[:, 0])) == len(np.unique(keys[:, 1])) == len(of_epoch)
    run = [draw for at, drawn in found if at.split == "train" for draw in drawn]
    assert len(run) == len(set(run)), "no draw of a run is another's"
    for at, drawn in found if plan.config.train_buckets else ():
        if at.split == "train":
            (bucket,) = {int(made.buckets[index]) for index, _, _ in drawn}
            assert plan.bucket_of(at) == plan.config.sides_in("train")[bucket]
            now, last = made.transform.size_at(at.epoch), made.transform.final_size
            exact = [
                Fraction(side * now, last)
                for side in plan.config.sides_in("train")[bucket]
            ]
            size = size_in(made.transform, "train", at.epoch, plan.bucket_of(at))
            assert isinstance(size, tuple)
            for side, wanted in zip(size, exact, strict=True):
                assert abs(side - wanted) <= Fraction(1, 2)


def check_one_store(
    made: Composition, epochs: dict[int, list[list[list[Draw]]]]
) -> None:
    """Each sample once in a pass, or, in each epoch, as often as its weight says."""
    plan, config, (kept,) = made.plan, made.plan.config, made.kept
    unit, sizes = config.micro_batch_size, Counter(made.buckets[kept].tolist())
    drawn = {
        epoch: [index for step in steps for place in step for index, _, _ in place]
        for epoch, steps in epochs.items()
    }
    if made.weights is None:
        size = (
            sum(n // unit * unit for n in sizes.values())
            if config.train_buckets
            else len(kept)
        )
        walks = isinstance(config.epoch_samples, int) and config.epoch_samples
        passes = list(drawn.values())
        if walks:
            run = [index for of_epoch in passes for index in of_epoch]
            passes = [run[first : first + size] for first in range(0, len(run), size)]
        for of_pass in passes:
            assert len(set(of_pass)) == len(of_pass) <= size
            if len(of_pass) == size:  # all but what fills no micro-batch of its bucket
                counts = Counter(made.buckets[of_pass].tolist())
                assert not config.train_buckets or counts == {
                    b: n // unit * unit for b, n in sizes.items() if n >= unit
                }
            assert (
                walks
                or size - len(of_pass) < config.samples_per_step // config.aug_repeats
            )
        return
    total = made.weights[kept].sum()
    for of_epoch in drawn.values():
        samples = Counter(of_epoch)
        for bucket in sizes:
            inside = kept[made.buckets[kept] == bucket]
            weight, count = (
                float(made.weights[inside].sum()),
                sum(samples[index] for index in inside.tolist()),
            )
            if config.train_buckets:
                assert count % unit == 0
                check_is_share(
                    count // unit, float(len(of_epoch) // unit * weight / total)
                )
            for index in inside.tolist() if weight else ():
                check_is_share(
                    samples[index], float(count * made.weights[index] / weight)
                )
            if (
                not isinstance(config.weights, str)
                and plan.config.shuffle != "off"
                and not is_windowed(plan)
            ):
                for label in set(made.labels[inside].tolist()):
                    of_class = inside[made.labels[inside] == label]
                    exact = float(count * made.weights[of_class].sum() / weight)
                    check_is_share(
                        sum(samples[index] for index in of_class.tolist()), exact
                    )


def is_windowed(plan: Plan) -> bool:
    assert plan.training
    return plan.training.content[4] == "window"


def check_mixture(made: Composition, epochs: dict[int, list[list[list[Draw]]]]) -> None:
    """Shares of each step, or of buckets in it and of stores in each micro-batch; each store is walked through."""
    config, stores = made.plan.config, made.kept
    sources = np.zeros(len(made.buckets), np.int64)
    for number, samples in enumerate(stores):
        sources[samples] = number
    all_buckets = range(len(config.train_buckets) or 1)
    weights = np.ones(len(sources)) if made.weights is None else made.weights
    leaves = {
        (s, b): samples[made.buckets[samples] == b]
        for s, samples in enumerate(stores)
        for b in all_buckets
    }
    totals = [float(weights[samples].sum()) for samples in stores]
    inside = {
        (s, b): float(weights[samples].sum()) / totals[s]
        for (s, b), samples in leaves.items()
    }
    had: Counter[tuple[int, int]] = Counter()
    times: Counter[int] = Counter()
    for epoch, steps in epochs.items():
        given = list(config.mixture_by_epoch.items()) or [
            (0, {str(s): len(stores[s]) for s in range(len(stores))})
        ]
        now = list(
            next(values for first, values in reversed(given) if first <= epoch).values()
        )
        joint = {(s, b): now[s] / sum(now) * part for (s, b), part in inside.items()}
        of_bucket = {
            b: sum(joint[s, b] for s in range(len(stores))) for b in all_buckets
        }
        for step in steps:
            indices = [[index for index, _, _ in place] for place in step]
            if not config.train_buckets:
                indices = [[index for place in indices for index in place]]
            else:
                counts = Counter(int(made.buckets[place[0]]) for place in indices)
                for b in all_buckets:
                    check_is_share(counts[b], len(indices) * of_bucket[b])
            for place in indices:
                bucket = int(made.buckets[place[0]])
                counts = Counter(sources[place].tolist())
                for s in range(len(stores)):
                    check_is_share(
                        counts[s], len(place) * joint[s, bucket] / of_bucket[bucket]
                    )
                had.update((source, bucket) for source in sources[place].tolist())
                times.update(place)
            for leaf, samples in leaves.items():
                if not len(samples) or not had[leaf]:
                    continue
                passes, rest = divmod(had[leaf], len(samples))
                part = weights[samples] / weights[samples].sum() * len(samples)
                for index, exact in zip(samples.tolist(), part.tolist(), strict=True):
                    near = round(exact) if abs(exact - round(exact)) < 1e-9 else exact
                    least, most = math.floor(near), math.ceil(near)
                    assert (
                        passes * least <= times[index] <= (passes + (rest > 0)) * most
                    )
        # A pass has each sample once, so that a draw in it needs no repeat.
        if made.weights is None:
            assert not any(
                repeat for step in steps for place in step for _, _, repeat in place
            )


def check_declared(made: Composition, found: Found) -> None:
    check_draws(made, found)
    epochs: dict[int, list[list[list[Draw]]]] = defaultdict(list)
    for epoch, step in steps_of(found, made.plan.config.per_step):
        epochs[epoch].append(without_copies(step, made.plan.config))
    (check_one_store if len(made.kept) == 1 else check_mixture)(made, epochs)


def check_validations(made: Composition, found: Found) -> None:
    """Each sample exactly once; with buckets of one at a time, of which the last micro-batch alone has padding."""
    plan, config = made.plan, made.plan.config
    for epoch in range(config.epochs):
        places = [
            (at, [i for i, *_ in drawn])
            for at, drawn in found
            if (at.split, at.epoch) == ("val", epoch)
        ]
        drawn = [
            index for _, indices in places for index in indices if index != PADDING
        ]
        assert sorted(drawn) == (
            np.flatnonzero(made.val_keep).tolist() if plan.has_val(epoch) else []
        )
        padded = Counter(
            plan.bucket_of(at)
            for at, indices in places
            if PADDING in indices and set(indices) != {-1}
        )
        assert set(padded.values()) <= {1}
        for at, indices in places:
            bucket = plan.bucket_of(at)
            sides = config.sides_in("val")
            assert (bucket in sides) if sides else (bucket is None)
            for index in indices if sides else ():
                assert index == PADDING or sides[made.val_buckets[index]] == bucket


def check_ranks(plan: Plan, found: Found) -> None:
    """Ranks of every world size share each step; together they have the stream of one."""
    places = [at for at, _ in found]
    for world_size in (
        w for w in range(1, plan.config.per_step + 1) if plan.config.per_step % w == 0
    ):
        ranks = [
            [at for at, _ in found][rank::world_size] for rank in range(world_size)
        ]
        assert [at for turn in zip(*ranks, strict=True) for at in turn] == places
        assert all(
            at.micro % world_size == rank
            for rank, of_rank in enumerate(ranks)
            for at in of_rank
        )


def check_resumes(plan: Plan, found: Found) -> None:
    """A resume at any step, in a process that has seen nothing, gives the tail."""
    again = pickle.loads(pickle.dumps(plan))
    tails = {at: number for number, (at, _) in enumerate(found)}
    for global_step in range(plan.config.epochs * plan.steps_per_epoch):
        left = list(again.micro_batches(again.cursor_at(global_step)))
        assert left == [at for at, _ in found[tails[left[0]] :]]
        # alone, without what came before
        assert triples(again.draw(left[0])) == found[tails[left[0]]][1]


def check_places(made: Composition, found: Found) -> None:
    """The places of each sample are those at which a pass over the whole run finds it, whatever the epochs."""
    plan = made.plan
    places: dict[tuple[str, int], list[SamplePlace]] = defaultdict(list)
    for at, drawn in found:
        for row, (index, *_) in enumerate(drawn):
            places[at.split, index].append(SamplePlace(at, row))
    for split, size in ("train", len(made.labels)), ("val", len(made.val_keep)):
        samples = range(-1, size + 1)
        epochs = [
            epoch
            for epoch in range(plan.config.epochs)
            if split == "train" or plan.has_val(epoch)
        ]
        found_in_run = list(plan.places_of(samples, split, epochs))
        for index in samples:
            of_index = [place for number, place in found_in_run if number == index]
            assert of_index == ([] if index in (-1, size) else places[split, index])
        for epoch in epochs[:2]:
            of_epoch = [
                each for each in found_in_run if each[1].micro_batch.epoch == epoch
            ]
            assert list(plan.places_of(samples, split, [epoch])) == of_epoch


def check(made: Composition) -> None:
    found = stream(made.plan)
    check_places(made, found)
    check_declared(made, found)
    check_validations(made, found)
    check_ranks(made.plan, found)
    check_resumes(made.plan, found)
