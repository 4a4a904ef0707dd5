"""Composes the sampler of a run's training from the settings of a plan and its sources. Numpy only.

each source     Permuted or Weighted, as a whole or for each bucket
one source      → that sampler, or Bucketed
several         → Mixture, or a mixture of buckets, see `mix_buckets`
plan.sampler     → CustomSampler, of all sources, see `raypipe.plan.custom`
plan.aug_repeats → Repeated
plan.drop_last=false → WithRest
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from raypipe.config import PlanConfig
from raypipe.errors import ConfigError
from raypipe.plan.custom import CustomSampler
from raypipe.plan.mixture import Bucketed, Mixture, Quotas, as_shares, mix_buckets
from raypipe.plan.order import (
    Domain,
    Shuffle,
    ShuffleKind,
    default_window_groups,
    derive_keys,
)
from raypipe.plan.samplers import (
    Permuted,
    Repeated,
    RunSampler,
    Weighted,
    WithRest,
    as_integers,
)
from raypipe.plan.selection import Selection
from raypipe.section import shown

# Versions of orders and keys: an old cursor must not continue under a new order. Plain plans with seeds of 32 bits
# are still those of the first version.
_VERSION = 2
_PLAIN_VERSION = 1
StoreSampler = Permuted | Weighted
"""What draws the samples of one source, or of one bucket of it."""


@dataclass(frozen=True)
class StoreArrays:
    """A store as arrays for a plan, from `raypipe.streaming.planning`.

    Attributes:
        address: the store's address, for errors.
        fingerprint: hash of its contents.
        selection: the samples to draw from; the arrays of samples have only these, by their numbers.
        groups: offsets, int64 (groups + 1,), of samples that are stored together; None = the store has none.
        weights: how often each sample is drawn, in proportion, (n,), ≥ 0 and not all 0; None = all alike.
        classes: labels (n,) of samples whose weights are by class; None = they are not.
        buckets: each sample's bucket, int (n,); None = no buckets.
    """

    address: str
    fingerprint: str
    selection: Selection
    groups: np.ndarray | None = None
    weights: np.ndarray | None = None
    classes: np.ndarray | None = None
    buckets: np.ndarray | None = None

    def in_bucket(self, bucket: int) -> tuple[np.ndarray, Selection]:
        """The numbers, int64, of the samples of a bucket, and these samples."""
        numbers = np.flatnonzero(self.buckets == bucket)
        return numbers, Selection(
            self.selection.indices(numbers), self.selection.num_samples, includes=True
        )


@dataclass(frozen=True)
class Training:
    """The draws of a run's training epochs.

    Attributes:
        sampler: maps a position in the run to draws.
        steps: number of steps in an epoch.
        store_samplers: sampler of each bucket of each source; without buckets, a source has one.
            A user's sampler stands for all of them.
        content: JSON values that determine these draws.
    """

    sampler: RunSampler
    steps: int
    store_samplers: tuple[tuple[StoreSampler | CustomSampler, ...], ...]
    content: list[Any]


def compose_one(config: PlanConfig, source: StoreArrays) -> Training:
    """Compose the training draws of one source.

    Raises:
        ConfigError: a setting does not go with the store, or an epoch has less than one step.
    """
    if config.mixture:
        names = dict.fromkeys(
            name for weights in config.mixture_by_epoch.values() for name in weights
        )
        raise ConfigError(
            f"plan.mixture has weights of {', '.join(names)}, and store.train is a single store: name several "
            "there, as {NAME: ADDRESS, …}"
        )
    # an epoch has each sample of the store exactly once
    is_plain = config.is_plain and config.aug_repeats == 1
    num_draws = config.epoch_samples if isinstance(config.epoch_samples, int) else 0
    draws = num_draws or _size_of_pass(config, source) * config.aug_repeats
    counted = "draws in an epoch"
    if is_plain:
        counted = "samples"
        if num_left_out := source.selection.num_left_out:
            counted = f"samples beside the {num_left_out} that are left out"
    steps, per_epoch = _steps(config, draws, source.address, counted)
    # An epoch of the store's own length is a pass, cut off after the last whole step.
    per_pass = 0 if num_draws else per_epoch
    if config.train_buckets:
        unit = config.micro_batch_size
        samplers = _samplers(config, source, config.seed)
        num_places = 0 if source.weights is None else per_epoch // unit
        shuffles = samplers[0].shuffle.kind == "global"
        sampler: RunSampler = Bucketed(
            samplers, unit, config.seed, num_places, shuffles, per_pass
        )
    else:
        samplers = _samplers(config, source, config.seed, per_epoch, per_pass)
        (sampler,) = samplers
    content = _content(config, source, () if is_plain else samplers)
    if not is_plain:
        content.append(per_epoch if num_draws else 0)
    repeated = _repeated(config, sampler, per_epoch)
    return Training(repeated, steps, (samplers,), content)


def _size_of_pass(config: PlanConfig, source: StoreArrays) -> int:
    """Return how many samples a pass over a source draws; buckets draw only whole micro-batches."""
    num_samples = source.selection.size
    if source.buckets is None or source.weights is not None:
        return num_samples
    unit = config.micro_batch_size
    counts = np.bincount(source.buckets, minlength=len(config.train_buckets))
    size = int((counts // unit).sum()) * unit
    if not size:
        raise ConfigError(
            f"none of plan.buckets has the samples of a micro-batch, {unit}, of the {num_samples} of "
            f"{source.address}: lower plan.micro_batch_size, or name fewer buckets"
        )
    return size


def compose_mixture(config: PlanConfig, sources: Mapping[str, StoreArrays]) -> Training:
    """Compose the training draws of several named sources; for errors see `Plan.of`."""
    if not config.drop_last:
        raise ConfigError(
            f"plan.drop_last is false, and store.train has {len(sources)} stores, whose shares of a step need "
            "whole ones: leave it out"
        )
    samplers = list[tuple[StoreSampler, ...]]()
    content = list[Any]()
    offset = 0  # number of the store's first sample in the joined store
    for number, source in enumerate(sources.values()):
        seed = int(derive_keys(1, config.seed, Domain.SOURCE, number)[0])
        samplers.append(_samplers(config, source, seed, offset=offset))
        offset += source.selection.num_samples
        content.append(_content(config, source, samplers[-1]))
    sizes = [source.selection.size for source in sources.values()]
    weights = _weights(config, list(sources), sizes)
    num_draws = _draws_of_mixture(config, weights[0], sizes)
    addresses = " + ".join(source.address for source in sources.values())
    steps, per_epoch = _steps(config, num_draws, addresses)
    shares = {epoch * steps: as_shares(of_epoch) for epoch, of_epoch in weights.items()}
    mixture = _mixed(config, samplers, shares)
    content.append([list(shares.items()), steps])
    repeated = _repeated(config, mixture, per_epoch)
    return Training(repeated, steps, tuple(samplers), content)


def _mixed(
    config: PlanConfig,
    samplers: Sequence[tuple[StoreSampler, ...]],
    shares: Mapping[int, Sequence[int]],
) -> Mixture:
    """Return the mixture of the samplers of several sources; `shares` are by the step from which they hold."""
    unit = config.micro_batch_size
    per_step = config.samples_per_step // config.aug_repeats
    if config.train_buckets:
        return mix_buckets(samplers, shares, per_step // unit, unit, config.seed)
    quotas = Quotas(shares, per_step, config.seed)
    return Mixture([sampler for (sampler,) in samplers], quotas, config.seed)


def _draws_of_mixture(
    config: PlanConfig, weights: Sequence[float], sizes: Sequence[int]
) -> int:
    """Return the draws of an epoch: their number as it is set, or until the shortest or longest source ends.

    Args:
        weights: of each source in epoch 0; one of weight 0 never ends.
    """
    if isinstance(config.epoch_samples, int) and config.epoch_samples:
        return config.epoch_samples
    exact = [Fraction(weight) for weight in weights]
    ends = [
        int(size * sum(exact) / weight)
        for size, weight in zip(sizes, exact, strict=True)
        if weight
    ]
    end = max(ends) if config.epoch_samples == "longest" else min(ends)
    return end * config.aug_repeats


def compose_custom(
    config: PlanConfig, sources: Sequence[StoreArrays], sampler: CustomSampler
) -> Training:
    """Compose the training draws of a user's sampler, which draws from all sources.

    Raises:
        ConfigError: an epoch has less than one step, or the sampler breaks its protocol.
    """
    sampler.check(config.epochs)
    draws = sampler.size * config.aug_repeats
    steps, per_epoch = _steps(config, draws, f"plan.sampler {sampler.name!r}")
    of_epochs = sampler.of_epochs(per_epoch)
    stores = [
        [source.selection.size, source.fingerprint, source.selection.signature()]
        for source in sources
    ]
    content = [
        _VERSION,
        config.micro_batch_size,
        config.per_step,
        config.seed,
        config.aug_repeats,
        stores,
        {"sampler": sampler.signature()},
    ]
    samplers = ((of_epochs,),) * len(sources)
    repeated = _repeated(config, of_epochs, per_epoch)
    return Training(repeated, steps, samplers, content)


def _samplers(
    config: PlanConfig,
    source: StoreArrays,
    seed: int,
    size: int = 0,
    per_pass: int = 0,
    offset: int = 0,
) -> tuple[StoreSampler, ...]:
    """Return the samplers of a source: one for each bucket, or a single one.

    Args:
        seed: the source's seed.
        size: draws in a pass by weights; 0 = as many as there are samples.
        per_pass: see `PassSampler`.
        offset: number of the store's first sample in the joined store.

    Raises:
        ConfigError: buckets would be read in groups, or windows without.
    """
    kind, groups = _shuffle(config, source)
    weights = source.weights
    if weights is not None:
        weights = as_integers(weights)
    numbers: Any = slice(None)
    parts = [(numbers, source.selection, seed)]
    if config.train_buckets:
        if kind == "window":
            raise ConfigError(
                f"plan.buckets takes samples from all over a store, and plan.shuffle 'window' reads "
                f"{source.address} group by group: set plan.shuffle=global"
            )
        parts = []
        for bucket in range(len(config.train_buckets)):
            key = int(derive_keys(1, seed, Domain.BUCKET_ORDER, bucket)[0])
            parts.append((*source.in_bucket(bucket), key))
    samplers = list[StoreSampler]()
    for numbers, selection, key in parts:
        shuffle = Shuffle(kind, selection.size, key, groups, config.window_groups)
        if weights is None:
            samplers.append(Permuted(shuffle, selection, offset, per_pass))
        else:
            classes = source.classes
            if classes is not None:
                classes = classes[numbers]
            samplers.append(
                Weighted(weights[numbers], shuffle, selection, size, classes, offset)
            )
    return tuple(samplers)


def _shuffle(
    config: PlanConfig, source: StoreArrays
) -> tuple[ShuffleKind, np.ndarray | None]:
    """Return the kind of shuffle of a source and, for windows, its groups' offsets in samples."""
    kind = config.shuffle
    if isinstance(kind, int) or kind == "auto":
        kind = "global" if source.groups is None else "window"
    if kind != "window":
        return kind, None
    if source.groups is None:
        raise ConfigError(
            f"{source.address} is not read in groups: use plan.shuffle=global"
        )
    return kind, source.selection.numbers(source.groups)


def _content(
    config: PlanConfig, source: StoreArrays, samplers: Sequence[StoreSampler]
) -> list[Any]:
    """Return the parts of a fingerprint: settings, source and samplers (none in a plain plan)."""
    kind, groups = _shuffle(config, source)
    content: list[Any] = [
        _VERSION if samplers or config.seed >= 1 << 32 else _PLAIN_VERSION,
        config.micro_batch_size,
        config.per_step,
        config.seed,
        kind,
        0 if groups is None else config.window_groups or default_window_groups(groups),
        source.selection.size,
        source.fingerprint,
        None if groups is None else hashlib.blake2b(groups.tobytes()).hexdigest(),
    ]
    if source.selection.num_left_out:
        content.append(source.selection.signature())
    if samplers:
        signatures = [sampler.signature() for sampler in samplers]
        content += [config.train_buckets, signatures, config.aug_repeats, "step"]
    return content


def _steps(
    config: PlanConfig, draws: int, drawn: str, unit: str = "draws in an epoch"
) -> tuple[int, int]:
    """Return the number of steps in an epoch, and of the samples that they draw, before these are repeated.

    Args:
        drawn, unit: the store or sampler, and the word for its draws, for errors.

    Raises:
        ConfigError: it has none, or the run has more draws than 64 bits count.
    """
    if draws * config.epochs >= 1 << 62:
        raise ConfigError(
            f"an epoch of {shown(draws)} draws from {drawn}, {config.epochs} times, has more than 2^62: lower "
            "plan.epoch_samples or plan.epochs, or set plan.epoch_samples=shortest"
        )
    if draws < (config.samples_per_step if config.drop_last else 1):
        raise ConfigError(
            f"{drawn} has {draws} {unit}, fewer than a global batch of {config.samples_per_step}: lower "
            "plan.global_batch_size and plan.micro_batch_size"
            + (", or raise plan.epoch_samples" if config.epoch_samples else "")
        )
    if not config.drop_last:
        return -(-draws // config.samples_per_step), draws
    steps = draws // config.samples_per_step
    return steps, steps * (config.samples_per_step // config.aug_repeats)


def _repeated(config: PlanConfig, inner: RunSampler, per_epoch: int) -> RunSampler:
    """Return a sampler that draws so many in an epoch, before they are repeated."""
    if not config.drop_last:
        return WithRest(inner, per_epoch, config.per_step, config.micro_batch_size)
    if config.aug_repeats == 1:
        return inner
    return Repeated(inner, config.aug_repeats, config.micro_batch_size)


def _weights(
    config: PlanConfig, sources: Sequence[str], sizes: Sequence[int]
) -> dict[int, Sequence[float]]:
    """Return the weight of each source by the epoch from which it holds; by default their sizes."""
    if not config.mixture:
        return {0: sizes}
    weights = dict[int, Sequence[float]]()
    for epoch, by_name in config.mixture_by_epoch.items():
        if set(by_name) != set(sources):
            raise ConfigError(
                f"plan.mixture has weights of {', '.join(by_name)}; the stores of store.train are "
                f"{', '.join(sources)}: give each one a weight, which may be 0"
            )
        weights[epoch] = [by_name[name] for name in sources]
    return weights
