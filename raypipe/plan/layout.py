"""Lays out what the training epochs draw, from the settings of a plan and its store.

plain       an order of the store's samples, each at most once in an epoch
else        a leaf for each store: its samples once in a pass (`Once`), by weights (`Weighted`), or by buckets
            (`Bucketed`)
            → mixed with those of others (`Mixture`; with buckets a mixture for each, see `mixed`)
            → walked through the epochs (`Walk`), each draw repeated (`Repeated`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from raypipe.config import PlanConfig
from raypipe.errors import ConfigError
from raypipe.plan.buckets import Bucket, Bucketed, mixed
from raypipe.plan.draws import Draws, Leaf, Passes, Repeated, Walk
from raypipe.plan.leaves import Samples, buckets_of, leaf_of, parts_of, samples_of
from raypipe.plan.mixture import Mixture, Turns, as_shares
from raypipe.plan.order import Domain, Order, derive_keys
from raypipe.plan.selection import Chosen, JoinedSelection, Kept, Selection
from raypipe.section import shown
from raypipe.stores.base import Store
from raypipe.stores.joined import JoinedStore


@dataclass(frozen=True)
class Layout:
    """What the training epochs of a run draw.

    Attributes:
        order: of a plain plan; position → index.
        draws: of any other; position → index and repeat.
        leaves: one for each store, of a plan that is not plain; of a mixture with buckets none.
        epoch_samples: draws in an epoch; of a plan that is not plain a multiple of the global batch.
        parts: what determines it, as JSON has it.
        buckets: of each store, where there are any.
        sources: names of a mixture's stores.
        offsets: int64 (stores + 1,), of the stores' samples in a mixture's joined store.
        mixture: of several stores.
        sizes: draws of each of them in a pass.
    """

    order: Order | None
    draws: Draws | None
    leaves: tuple[Leaf, ...]
    epoch_samples: int
    parts: list[Any]
    buckets: tuple[tuple[Bucket, ...], ...] = ()
    sources: tuple[str, ...] = ()
    offsets: np.ndarray | None = None
    mixture: Mixture | None = None
    sizes: tuple[int, ...] = ()


def lay_out(config: PlanConfig, store: Store, kept: Selection) -> Layout:
    """What the training epochs draw of the samples of a store that are kept.

    Raises:
        ConfigError: a setting does not go with the store, or an epoch has less than one step.
    """
    if isinstance(store, JoinedStore):
        assert isinstance(kept, JoinedSelection)
        return _mixed(config, store, kept)
    if config.mixture:
        raise ConfigError(
            f"plan.mixture has weights of {', '.join(_names(config))}, and store.train is a single store: name "
            "several there, as {NAME: ADDRESS, …}"
        )
    samples = samples_of(config, store, kept, config.seed)
    if samples.num < (config.samples_per_step if config.is_plain else 1):
        raise ConfigError(_too_small(config, samples))
    if config.is_plain:
        return Layout(samples.order, None, (), samples.num, parts_of(config, samples))
    by_weights = bool(config.weights or config.class_balance)
    wanted = config.epoch_samples if isinstance(config.epoch_samples, int) else 0
    leaf: Leaf
    if config.buckets:
        buckets, parts = buckets_of(config, samples)
        unit = _unit(config)
        size = samples.num if by_weights else sum(bucket.size // unit for bucket in buckets) * unit
        if not size:
            raise ConfigError(_no_place(config, samples))
        steps = _steps(config, wanted or size * config.repeats, store.address)
        num_places = steps * _units(config) // unit if by_weights else 0
        leaf = Bucketed(buckets, unit, config.seed, num_places, samples.shuffle == "global")
    else:
        buckets = []
        steps = _steps(config, wanted or samples.num * config.repeats, store.address)
        leaf, parts = leaf_of(config, samples, steps * _units(config))
    walks, per_epoch = wanted or by_weights, steps * _units(config)
    draws = _repeated(config, Walk(Passes(leaf), per_epoch) if walks else leaf)
    parts.append({"epoch": per_epoch if walks else 0, "repeats": [config.repeats, config.repeats_in]})
    return Layout(None, draws, (leaf,), steps * config.samples_per_step, parts, (tuple(buckets),))


def _mixed(config: PlanConfig, store: JoinedStore, kept: JoinedSelection) -> Layout:
    sources = tuple(store.parts)
    leaves, buckets, sizes, parts = list[Leaf](), list[tuple[Bucket, ...]](), list[int](), list[Any]()
    for number, (part, selection) in enumerate(zip(store.parts.values(), kept.parts, strict=True)):
        seed = int(derive_keys(1, config.seed, Domain.SOURCE, number)[0])
        samples = samples_of(config, part, selection, seed)
        if not samples.num:
            raise ConfigError(f"{part.address} has no samples: leave {sources[number]!r} out of store.train")
        sizes.append(samples.num)
        if config.buckets:
            of_store, of_part = buckets_of(config, samples)
            buckets.append(tuple(of_store))
        else:
            leaf, of_part = leaf_of(config, samples, samples.num)
            leaves.append(leaf)
        parts.append(of_part)
    shares, ends = _shares(config, sources, sizes), _ends(config, sources, sizes)
    wanted = config.epoch_samples
    if isinstance(wanted, str) or not wanted:
        wanted = (max if wanted == "longest" else min)(ends) * config.repeats
    steps, units = _steps(config, wanted, store.address), _units(config)
    if config.buckets:
        unit = _unit(config)
        mixture = mixed(buckets, store.offsets, shares, steps, units // unit, unit, config.seed)
    else:
        passes = [Passes(leaf, int(offset)) for leaf, offset in zip(leaves, store.offsets, strict=False)]
        mixture = Mixture(passes, Turns(shares, steps, units, config.seed))
    parts.append(
        {"shares": list(shares.items()), "steps": steps, "repeats": [config.repeats, config.repeats_in]},
    )
    return Layout(
        None,
        _repeated(config, Walk(mixture, steps * units)),
        tuple(leaves),
        steps * config.samples_per_step,
        parts,
        tuple(buckets),
        sources,
        store.offsets,
        mixture,
        tuple(sizes),
    )


def _units(config: PlanConfig) -> int:
    """Draws in a step, before they are repeated."""
    return config.samples_per_step // config.repeats


def _unit(config: PlanConfig) -> int:
    """Draws in a micro-batch, before they are repeated in it: those of one bucket."""
    return config.micro_batch_size // (config.repeats if config.repeats_in == "micro_batch" else 1)


def _steps(config: PlanConfig, draws: int, address: str) -> int:
    """Whole steps in an epoch.

    Raises:
        ConfigError: it has none, or the run has more draws than 64 bits count.
    """
    if draws * config.epochs >= 1 << 62:
        raise ConfigError(
            f"an epoch of {shown(draws)} draws from {address}, {config.epochs} times, has more than 2^62: lower "
            "plan.epoch_samples or plan.epochs, or set plan.epoch_samples=shortest"
        )
    if draws < config.samples_per_step:
        raise ConfigError(
            f"an epoch of {draws} draws from {address} is smaller than a global batch of "
            f"{config.samples_per_step}: raise plan.epoch_samples, or lower plan.global_batch_size and "
            "plan.micro_batch_size"
        )
    return draws // config.samples_per_step


def _too_small(config: PlanConfig, samples: Samples) -> str:
    left_out = samples.kept.num_left_out
    beside = f" beside the {left_out} that are left out" if left_out else ""
    return (
        f"{samples.store.address} has {samples.num} samples{beside}, fewer than a global batch of "
        f"{config.samples_per_step}: lower plan.global_batch_size and plan.micro_batch_size"
    )


def _no_place(config: PlanConfig, samples: Samples) -> str:
    return (
        f"none of plan.buckets has the samples of a micro-batch, {_unit(config)}, of the {samples.num} of "
        f"{samples.store.address}: lower plan.micro_batch_size, or name fewer buckets"
    )


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
