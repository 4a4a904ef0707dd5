"""Lays out what the training epochs draw, from the settings of a plan and its store.

plain       an order of the store's samples, each at most once in an epoch
else        a leaf for each store: its samples once in a pass (`Once`), by weights (`Weighted`), or by buckets
            (`Bucketed`)
            → walked through the epochs (`Walk`), mixed with others (`Mixture`), each draw repeated (`Repeated`)
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from raypipe.config import PlanConfig
from raypipe.errors import ConfigError
from raypipe.plan.buckets import Bucketed, Sides, nearest
from raypipe.plan.draws import Draws, Leaf, Once, Repeated, Walk
from raypipe.plan.mixture import Mixture, as_shares
from raypipe.plan.order import (
    Domain,
    GlobalOrder,
    KeptOrder,
    Order,
    StoredOrder,
    WindowOrder,
    default_window_groups,
    derive_keys,
)
from raypipe.plan.selection import Chosen, JoinedSelection, Kept, Selection
from raypipe.plan.weights import Weighted, balanced, check_weights
from raypipe.storage.files import read_whole
from raypipe.stores.base import Store, is_class
from raypipe.stores.joined import JoinedStore
from raypipe.stores.scan import numbers_of


@dataclass(frozen=True)
class Layout:
    """What the training epochs of a run draw.

    Attributes:
        order: of a plain plan; position → index.
        draws: of any other; position → index and repeat.
        leaves: one for each store, of a plan that is not plain.
        epoch_samples: draws in an epoch; of a plan that is not plain a multiple of the global batch.
        parts: what determines it, as JSON has it.
        sources: names of a mixture's stores.
        offsets: int64 (stores + 1,), of the stores' samples in a mixture's joined store.
    """

    order: Order | None
    draws: Draws | None
    leaves: tuple[Leaf, ...]
    epoch_samples: int
    parts: list[Any]
    sources: tuple[str, ...] = ()
    offsets: np.ndarray | None = None


@dataclass(frozen=True)
class _Samples:
    """Those of one store that are kept, and how they are shuffled.

    Attributes:
        num: how many.
        order: of each of them once.
        shuffle: "global", "window" or "off".
        groups: offsets of all groups in numbers of samples; None = the store has none.
        window_groups: groups in a window; 0 = there are no windows.
        seed: of the store.
    """

    store: Store
    kept: Selection
    num: int
    order: Order
    shuffle: str
    groups: np.ndarray | None
    window_groups: int
    seed: int


def lay_out(config: PlanConfig, store: Store, kept: Selection) -> Layout:
    """What the training epochs draw of the samples of a store that are kept.

    Raises:
        ConfigError: a setting does not go with the store, or an epoch has less than one step.
    """
    if isinstance(store, JoinedStore):
        assert isinstance(kept, JoinedSelection)
        if config.buckets:
            raise ConfigError("plan.buckets are of a single store: name one in store.train, or leave them out")
        return _mixed(config, store, kept)
    if config.mixture:
        raise ConfigError(
            f"plan.mixture has weights of {', '.join(_names(config))}, and store.train is a single store: name "
            "several there, as {NAME: ADDRESS, …}"
        )
    samples = _samples(config, store, kept, config.seed)
    if samples.num < (config.samples_per_step if config.is_plain else 1):
        raise ConfigError(_too_small(config, samples))
    if config.is_plain:
        return Layout(samples.order, None, (), samples.num, _parts(config, samples))
    wanted = config.epoch_samples if isinstance(config.epoch_samples, int) else 0
    bucketed = _bucketed(config, samples) if config.buckets else None
    size = bucketed.size if bucketed else samples.num
    steps = _steps(config, wanted or size * config.repeats, store.address)
    per_epoch = steps * _units(config)
    leaf: Leaf
    if bucketed:
        leaf, parts = bucketed, [*_parts(config, samples), *bucketed.parts()]
    else:
        leaf, parts = _leaf(config, samples, per_epoch)
    walks = wanted or isinstance(leaf, Weighted)
    draws = _repeated(config, Walk(leaf, per_epoch) if walks else leaf)
    parts.append({"epoch": per_epoch if walks else 0, "repeats": [config.repeats, config.repeats_in]})
    return Layout(None, draws, (leaf,), steps * config.samples_per_step, parts)


def _mixed(config: PlanConfig, store: JoinedStore, kept: JoinedSelection) -> Layout:
    sources = tuple(store.parts)
    leaves, parts = list[Leaf](), list[Any]()
    for number, (part, selection) in enumerate(zip(store.parts.values(), kept.parts, strict=True)):
        seed = int(derive_keys(1, config.seed, Domain.SOURCE, number)[0])
        samples = _samples(config, part, selection, seed)
        if not samples.num:
            raise ConfigError(f"{part.address} has no samples: leave {sources[number]!r} out of store.train")
        leaf, of_part = _leaf(config, samples, samples.num)
        leaves.append(leaf)
        parts.append(of_part)
    sizes = [leaf.size for leaf in leaves]
    shares, ends = _shares(config, sources, sizes), _ends(config, sources, sizes)
    wanted = config.epoch_samples
    if isinstance(wanted, str) or not wanted:
        wanted = (max if wanted == "longest" else min)(ends) * config.repeats
    steps = _steps(config, wanted, store.address)
    mixture = Mixture(leaves, store.offsets, shares, steps, _units(config), config.seed)
    parts.append(
        {"shares": list(shares.items()), "steps": steps, "repeats": [config.repeats, config.repeats_in]},
    )
    draws = _repeated(config, mixture)
    return Layout(None, draws, tuple(leaves), steps * config.samples_per_step, parts, sources, store.offsets)


def _units(config: PlanConfig) -> int:
    """Draws in a step, before they are repeated."""
    return config.samples_per_step // config.repeats


def _steps(config: PlanConfig, draws: int, address: str) -> int:
    """Whole steps in an epoch."""
    if draws < config.samples_per_step:
        raise ConfigError(
            f"an epoch of {draws} draws from {address} is smaller than a global batch of "
            f"{config.samples_per_step}: raise plan.epoch_samples, or lower plan.global_batch_size and "
            "plan.micro_batch_size"
        )
    return draws // config.samples_per_step


def _too_small(config: PlanConfig, samples: _Samples) -> str:
    left_out = samples.kept.num_left_out
    beside = f" beside the {left_out} that are left out" if left_out else ""
    return (
        f"{samples.store.address} has {samples.num} samples{beside}, fewer than a global batch of "
        f"{config.samples_per_step}: lower plan.global_batch_size and plan.micro_batch_size"
    )


def _samples(config: PlanConfig, store: Store, kept: Selection, seed: int) -> _Samples:
    num = len(store) - kept.num_left_out
    groups = None if store.groups is None else kept.numbers(store.groups)
    shuffle = config.shuffle
    if shuffle == "auto":
        shuffle = "global" if groups is None else "window"
    order: Order = GlobalOrder(num, seed) if shuffle == "global" else StoredOrder(num)
    window_groups = 0
    if shuffle == "window":
        if groups is None:
            raise ConfigError(f"{store.address} is not read in groups: use plan.shuffle=global")
        window_groups = config.window_groups or default_window_groups(groups)
        order = WindowOrder(groups, seed, window_groups)
    if kept.num_left_out:
        order = KeptOrder(order, kept)
    return _Samples(store, kept, num, order, shuffle, groups, window_groups, seed)


def _parts(config: PlanConfig, samples: _Samples) -> list[Any]:
    """What the fingerprint of a plan has of its settings and of a store."""
    groups = samples.groups if samples.window_groups else None
    parts = [
        1,  # the version of this algorithm: an old cursor must not continue under a new order
        config.micro_batch_size,
        config.per_step,
        config.seed,
        samples.shuffle,
        samples.window_groups,
        samples.num,
        samples.store.fingerprint,
        None if groups is None else hashlib.blake2b(groups.tobytes()).hexdigest(),
    ]
    return [*parts, samples.kept.signature()] if samples.kept.num_left_out else parts


def _repeated(config: PlanConfig, inner: Draws) -> Draws:
    if config.repeats == 1:
        return inner
    return Repeated(inner, config.repeats, config.micro_batch_size if config.repeats_in == "step" else 1)


def _names(config: PlanConfig) -> list[str]:
    """The sources that plan.mixture names."""
    return list(dict.fromkeys(name for weights in config.mixture_by_epoch.values() for name in weights))


def _shares(config: PlanConfig, sources: Sequence[str], sizes: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """From epoch → share of each source; in proportion to their sizes where no weights are given."""
    if not config.mixture:
        return {0: as_shares(sizes)}
    shares = {}
    for epoch, weights in config.mixture_by_epoch.items():
        if set(weights) != set(sources):
            raise ConfigError(
                f"plan.mixture has weights of {', '.join(weights)}; the stores of store.train are "
                f"{', '.join(sources)}: give each one a weight, which may be 0"
            )
        shares[epoch] = as_shares([weights[name] for name in sources])
    return shares


def _ends(config: PlanConfig, sources: Sequence[str], sizes: Sequence[int]) -> list[int]:
    """After how many draws each source has ended by its weight in epoch 0; without those of weight 0."""
    if not config.mixture:
        return [sum(sizes)]
    weights = [Fraction(config.mixture_by_epoch[0][name]) for name in sources]
    return [int(size * sum(weights) / weight) for size, weight in zip(sizes, weights, strict=True) if weight]


def _leaf(config: PlanConfig, samples: _Samples, size: int) -> tuple[Leaf, list[Any]]:
    """The leaf of a store, with `size` draws in a pass where there are weights; and what determines it."""
    parts, store, classes = _parts(config, samples), samples.store, None
    if config.class_balance:
        if not is_class(store):
            raise ConfigError(f"plan.class_balance balances classes, and the labels of {store.address} are none")
        classes = numbers_of(store, "label", "plan.class_balance")[_kept_indices(samples)]
        weights = balanced(classes, config.class_balance)
    elif config.weights:
        weights = _read_weights(config.weights, store)[_kept_indices(samples)]
        if not weights.any():
            raise ConfigError(f"plan.weights {config.weights} is 0 for all samples of {store.address}")
    else:
        return Once(samples.order), parts
    # Of its own draws a window has as many groups as are usual, unless the settings say.
    window = samples.shuffle, samples.groups if samples.shuffle == "window" else None, config.window_groups
    leaf = Weighted(weights, size, samples.seed, samples.kept, *window, classes)
    return leaf, [*parts, leaf.signature()]


def _bucketed(config: PlanConfig, samples: _Samples) -> Bucketed:
    address = samples.store.address
    if samples.shuffle != "global":
        raise ConfigError(
            f"plan.buckets takes samples from all over a store, and plan.shuffle is {samples.shuffle!r} for "
            f"{address}: set plan.shuffle=global"
        )
    unit = config.micro_batch_size // (config.repeats if config.repeats_in == "micro_batch" else 1)
    members = _members_of(samples.store, samples.kept, config.bucket_sides)
    found = Bucketed(config.bucket_sides, members, unit, samples.seed)
    if not found.size:
        raise ConfigError(
            f"none of plan.buckets has the samples of a micro-batch, {unit}, of the {samples.num} of {address}: "
            "lower plan.micro_batch_size, or name fewer buckets"
        )
    return found


def _members_of(store: Store, kept: Selection, buckets: Sequence[Sides]) -> list[Chosen]:
    """The samples of each bucket, of those of a store that are kept.

    Raises:
        ConfigError: the sizes of the images are not known, or not those of some.
    """
    indices = kept.indices(np.arange(len(store) - kept.num_left_out))
    widths, heights = (numbers_of(store, name, "plan.buckets")[indices] for name in ("width", "height"))
    unknown = np.flatnonzero(~((widths >= 1) & (heights >= 1)))  # also where it is NaN
    if unknown.size:
        raise ConfigError(
            f"plan.buckets sorts images by their sizes, and {store.address} has none for {unknown.size} samples, "
            f"the first of them {indices[unknown[0]]}: leave such out by store.filter='width > 0'"
        )
    found = nearest(widths, heights, buckets)
    return [Chosen(indices[found == number], len(store)) for number in range(len(buckets))]


def _read_weights(source: str, store: Store) -> np.ndarray:
    """The weights of all samples of a store, float64 (N,), from a column or a file."""
    if not source.endswith(".npy"):
        return check_weights(numbers_of(store, source, "plan.weights"), len(store), f"plan.weights {source}")
    content = read_whole(source)
    try:
        found = np.load(io.BytesIO(content or b""), allow_pickle=False)
    except (ValueError, EOFError) as error:
        reason = error if content is not None else "there is no such file"
        raise ConfigError(f"plan.weights: {source} cannot be read: {reason}") from None
    return check_weights(found, len(store), f"plan.weights {source}")


def _kept_indices(samples: _Samples) -> Any:
    return samples.kept.indices(np.arange(samples.num)) if samples.kept.num_left_out else slice(None)


def selection_of(exclude: Sequence[int] | np.ndarray | Selection, store: Store | None) -> Selection:
    """Which samples of a store are kept: of a joined store, by its parts."""
    if isinstance(exclude, Kept | Chosen | JoinedSelection):
        return exclude
    left_out = np.unique(np.asarray(exclude, np.int64))
    if not isinstance(store, JoinedStore):
        return Kept(left_out)
    cuts = np.searchsorted(left_out, store.offsets)
    parts = [
        Kept(left_out[start:end] - offset)
        for start, end, offset in zip(cuts, cuts[1:], store.offsets, strict=False)
    ]
    return JoinedSelection(parts, store.offsets)
