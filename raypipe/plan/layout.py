"""Lays out what the training epochs draw, from the settings of a plan and its store.

plain       an order of the store's samples, each at most once in an epoch
else        a leaf for each store: its samples once in a pass (`Once`), or by weights (`Weighted`)
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
from raypipe.stores.base import Store
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
    order, shuffle, window_groups, groups = _ordered(config, store, kept, config.seed)
    num, parts = len(store) - kept.num_left_out, _parts(config, store, kept, shuffle, window_groups, groups)
    if num < (_batch(config) if config.is_plain else 1):
        raise ConfigError(_too_small(config, store.address, num, kept))
    if config.is_plain:
        return Layout(order, None, (), num, parts)
    wanted = config.epoch_samples if isinstance(config.epoch_samples, int) else 0
    steps = _steps(config, wanted or num * config.repeats, store.address)
    per_epoch = steps * _units(config)
    leaf = _leaf(config, store, kept, order, shuffle, per_epoch, config.seed)
    if isinstance(leaf, Weighted):
        parts.append(leaf.signature())
    walks = wanted or isinstance(leaf, Weighted)
    draws = _repeated(config, Walk(leaf, per_epoch) if walks else leaf)
    parts.append({"epoch": per_epoch if walks else 0, "repeats": [config.repeats, config.repeats_in]})
    return Layout(None, draws, (leaf,), steps * _batch(config), parts)


def _mixed(config: PlanConfig, store: JoinedStore, kept: JoinedSelection) -> Layout:
    sources = tuple(store.parts)
    leaves, parts = list[Leaf](), list[Any]()
    for number, (part, selection) in enumerate(zip(store.parts.values(), kept.parts, strict=True)):
        num, seed = len(part) - selection.num_left_out, int(derive_keys(1, config.seed, Domain.SOURCE, number)[0])
        if not num:
            raise ConfigError(f"{part.address} has no samples: leave {sources[number]!r} out of store.train")
        order, shuffle, window_groups, groups = _ordered(config, part, selection, seed)
        of_part = _parts(config, part, selection, shuffle, window_groups, groups)
        leaf = _leaf(config, part, selection, order, shuffle, num, seed)
        if isinstance(leaf, Weighted):
            of_part.append(leaf.signature())
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
    return Layout(None, draws, tuple(leaves), steps * _batch(config), parts, sources, store.offsets)


def _batch(config: PlanConfig) -> int:
    return config.micro_batch_size * config.per_step


def _units(config: PlanConfig) -> int:
    """Draws in a step, before they are repeated."""
    return _batch(config) // config.repeats


def _steps(config: PlanConfig, draws: int, address: str) -> int:
    """Whole steps in an epoch."""
    if draws < _batch(config):
        raise ConfigError(
            f"an epoch of {draws} draws from {address} is smaller than a global batch of {_batch(config)}: raise "
            "plan.epoch_samples, or lower plan.global_batch_size and plan.micro_batch_size"
        )
    return draws // _batch(config)


def _too_small(config: PlanConfig, address: str, num: int, kept: Selection) -> str:
    beside = f" beside the {kept.num_left_out} that are left out" if kept.num_left_out else ""
    return (
        f"{address} has {num} samples{beside}, fewer than a global batch of {_batch(config)}: lower "
        "plan.global_batch_size and plan.micro_batch_size"
    )


def _ordered(
    config: PlanConfig, store: Store, kept: Selection, seed: int
) -> tuple[Order, str, int, np.ndarray | None]:
    """The order of a store's samples, how it shuffles, and its window: groups in it, and all groups' offsets."""
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
    return order, shuffle, window_groups, groups


def _parts(
    config: PlanConfig, store: Store, kept: Selection, shuffle: str, window_groups: int, groups: np.ndarray | None
) -> list[Any]:
    """What the fingerprint of a plan has of its settings and of a store."""
    parts = [
        1,  # the version of this algorithm: an old cursor must not continue under a new order
        config.micro_batch_size,
        config.per_step,
        config.seed,
        shuffle,
        window_groups,
        len(store) - kept.num_left_out,
        store.fingerprint,
        None if window_groups == 0 or groups is None else hashlib.blake2b(groups.tobytes()).hexdigest(),
    ]
    return [*parts, kept.signature()] if kept.num_left_out else parts


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


def _leaf(
    config: PlanConfig, store: Store, kept: Selection, order: Order, shuffle: str, size: int, seed: int
) -> Leaf:
    """The leaf of a store: by weights of `size` draws in a pass, where there are weights."""
    classes = None
    if config.class_balance:
        labels = numbers_of(store, "label", "plan.class_balance")
        classes = labels[_kept_indices(store, kept)]
        weights = balanced(classes, config.class_balance)
    elif config.weights:
        weights = _read_weights(config.weights, store)[_kept_indices(store, kept)]
        if not weights.any():
            raise ConfigError(f"plan.weights {config.weights} is 0 for all samples of {store.address}")
    else:
        return Once(order)
    groups = None if store.groups is None or shuffle != "window" else kept.numbers(store.groups)
    return Weighted(weights, size, seed, kept, shuffle, groups, config.window_groups, classes)


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


def _kept_indices(store: Store, kept: Selection) -> Any:
    return kept.indices(np.arange(len(store) - kept.num_left_out)) if kept.num_left_out else slice(None)


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
