"""The leaves of a plan: what a store's samples, or those of one of its buckets, are drawn by. Numpy only."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from raypipe.config import PlanConfig
from raypipe.errors import ConfigError, SampleError
from raypipe.plan.buckets import Bucket, Sides, nearest
from raypipe.plan.draws import Leaf, Once
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
from raypipe.plan.selection import Chosen, Selection
from raypipe.plan.weights import Weighted, as_integers, balanced, check_weights
from raypipe.storage.files import read_whole
from raypipe.stores.base import Store, is_class
from raypipe.stores.numbers import read_npy
from raypipe.stores.scan import numbers_of


@dataclass(frozen=True)
class Samples:
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


class Weights(NamedTuple):
    """Of the samples of a store that are kept.

    Attributes:
        values: by number, (num,).
        classes: likewise, where weights are by class; else None.
    """

    values: np.ndarray
    classes: np.ndarray | None


def samples_of(config: PlanConfig, store: Store, kept: Selection, seed: int) -> Samples:
    """Those of a store that are kept, by the seed of the store."""
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
    return Samples(store, kept, num, order, shuffle, groups, window_groups, seed)


def parts_of(config: PlanConfig, samples: Samples) -> list[Any]:
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


def leaf_of(config: PlanConfig, samples: Samples, size: int) -> tuple[Leaf, list[Any]]:
    """The leaf of a store, with `size` draws in a pass where there are weights; and what determines it."""
    parts, weights = parts_of(config, samples), _weights_of(config, samples)
    if weights is None:
        return Once(samples.order), parts
    # Of its own draws a window has as many groups as are usual, unless the settings say.
    window = samples.shuffle, samples.groups if samples.shuffle == "window" else None, config.window_groups
    leaf = Weighted(weights.values, size, samples.seed, samples.kept, *window, weights.classes)
    return leaf, [*parts, leaf.signature()]


def buckets_of(config: PlanConfig, samples: Samples) -> tuple[list[Bucket], list[Any]]:
    """The buckets of a store, by `plan.buckets`; and what determines them.

    Raises:
        ConfigError: the store would be read in groups, or the sizes of images are not known.
    """
    if samples.shuffle == "window":
        raise ConfigError(
            f"plan.buckets takes samples from all over a store, and plan.shuffle 'window' reads "
            f"{samples.store.address} group by group: set plan.shuffle=global"
        )
    weights, buckets = _weights_of(config, samples), list[Bucket]()
    exact = None if weights is None else as_integers(weights.values)  # once, so that buckets have the same unit
    for number, members in enumerate(members_of(samples.store, samples.kept, config.bucket_sides)):
        inside = samples.kept.numbers(members.chosen.astype(np.int64))
        seed = int(derive_keys(1, samples.seed, Domain.BUCKET_ORDER, number)[0])
        leaf: Leaf | None = None
        if weights is None or exact is None:
            num = len(inside)
            order = GlobalOrder(num, seed) if samples.shuffle == "global" else StoredOrder(num)
            leaf = Once(KeptOrder(order, members)) if num else None
        elif exact[inside].any():
            classes = None if weights.classes is None else weights.classes[inside]
            leaf = Weighted(exact[inside], len(inside), seed, members, samples.shuffle, classes=classes)
        buckets.append(Bucket(members, leaf))
    pairs = zip(config.bucket_sides, buckets, strict=True)
    return buckets, [*parts_of(config, samples), "buckets", *([*sides, *each.parts()] for sides, each in pairs)]


def members_of(
    store: Store, kept: Selection, buckets: Sequence[Sides], setting: str = "store.filter"
) -> list[Chosen]:
    """The samples of each bucket, of those of a store that are kept.

    Args:
        setting: that filters this store, for errors.

    Raises:
        ConfigError: the sizes of the images are not known, or not those of some.
    """
    indices = kept.indices(np.arange(len(store) - kept.num_left_out))
    widths, heights = (numbers_of(store, name, "plan.buckets")[indices] for name in ("width", "height"))
    unknown = np.flatnonzero(~((widths >= 1) & (heights >= 1)))  # also where it is NaN
    if unknown.size:
        raise ConfigError(
            f"plan.buckets sorts images by their sizes, and {store.address} has none for {unknown.size} samples, "
            f"the first of them {indices[unknown[0]]}: leave such out by {setting}='width > 0'"
        )
    found = nearest(widths, heights, buckets)
    return [Chosen(indices[found == number], len(store)) for number in range(len(buckets))]


def _weights_of(config: PlanConfig, samples: Samples) -> Weights | None:
    """The weights that a store's samples are drawn by; None = all alike, each once."""
    store, chosen = samples.store, _kept_indices(samples)
    if config.class_balance:
        if not is_class(store):
            raise ConfigError(f"plan.class_balance balances classes, and the labels of {store.address} are none")
        classes = numbers_of(store, "label", "plan.class_balance")[chosen]
        return Weights(balanced(classes, config.class_balance), classes)
    if not config.weights:
        return None
    values = _read_weights(config.weights, store)[chosen]
    if not values.any():
        raise ConfigError(f"plan.weights {config.weights} is 0 for all samples of {store.address}")
    return Weights(values, None)


def _read_weights(source: str, store: Store) -> np.ndarray:
    """The weights of all samples of a store, float64 (N,), from a column or a file."""
    if not source.endswith(".npy"):
        return check_weights(numbers_of(store, source, "plan.weights"), len(store), f"plan.weights {source}")
    content = read_whole(source)
    try:
        if content is None:
            raise SampleError("there is no such file")
        found = read_npy(content)
    except SampleError as error:
        raise ConfigError(f"plan.weights: {source} cannot be read: {error}") from None
    return check_weights(found, len(store), f"plan.weights {source}")


def _kept_indices(samples: Samples) -> Any:
    return samples.kept.indices(np.arange(samples.num)) if samples.kept.num_left_out else slice(None)
