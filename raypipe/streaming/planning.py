"""Makes a plan from stores: reads the arrays that it needs of them, which are never images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from raypipe.config import PlanConfig
from raypipe.errors import ConfigError, SampleError, StoreError
from raypipe.plan.compose import StoreArrays
from raypipe.plan.custom import CustomSampler, Population
from raypipe.plan.places import Sides
from raypipe.plan.schedule import Plan
from raypipe.plan.selection import JoinedSelection, Selection
from raypipe.plan.takes import BY_CLASS, taken
from raypipe.section import shown
from raypipe.storage.files import read_whole
from raypipe.stores.bad_list import read_bad_list
from raypipe.stores.base import Store, is_class
from raypipe.stores.joined import JoinedStore
from raypipe.stores.numbers import read_npy
from raypipe.stores.scan import numbers_of

PerSource = str | Path | Mapping[str, str | Path]
"""A value for the training stores; or values by a mixture's names, or `train`, and `val`."""


def make_plan(
    config: PlanConfig,
    train: Store,
    val: Store | None = None,
    *,
    selections: Sequence[Selection] | None = None,
    val_selection: Selection | None = None,
) -> Plan:
    """The plan of a run over a training store and, optionally, a validation store.

    Args:
        train: the training store; a `JoinedStore` for a mixture.
        selections: the samples to draw from, of each part of the training store; None = all.
        val_selection: samples to draw from, of the validation store.

    Raises:
        ConfigError: a setting does not go with a store, see `Plan.of`, or a column or file that it names is wrong.
    """
    if isinstance(train, JoinedStore):
        parts = train.parts
    else:
        parts = {"": train}
    selections = selections or [Selection([], len(store)) for store in parts.values()]
    for (name, store), selection in zip(parts.items(), selections, strict=True):
        if not selection.size:
            remedy = f": leave {name!r} out of store.train" if name else " to draw from"
            raise ConfigError(f"{store.address} has no samples{remedy}")
    sampler = None
    if config.sampler:
        population = _population(config, list(parts.values()), selections)
        sampler = CustomSampler(config.sampler, population)
    source = None
    if val is not None:
        selection = val_selection or Selection([], len(val))
        if sampler:
            selection = sampler.validated(_population(config, [val], [selection]))
        buckets = config.sides_in("val") if config.val_interval else []
        source = _read_source(val, selection, buckets, "{val: width > 0}")
    pairs = zip(parts.items(), selections, strict=True)
    sources = {
        name: _read_train(config, store, selection)
        for (name, store), selection in pairs
    }
    return Plan.of(
        config,
        sources if isinstance(train, JoinedStore) else sources[""],
        source,
        sampler,
    )


def plan_of_selected(
    config: PlanConfig,
    train: Store,
    val: Store | None,
    exclude: PerSource,
    filter: PerSource,
    take: PerSource,
) -> Plan:
    """The plan of a run over the selected samples of its stores, see `make_plan` and `select`."""
    selections, val_selection = select(train, val, exclude, filter, take)
    plan = make_plan(
        config, train, val, selections=selections, val_selection=val_selection
    )
    if take and val_selection:
        return plan.bound_to({"val": val_selection.signature()})
    return plan


def _population(
    config: PlanConfig, stores: Sequence[Store], selections: Sequence[Selection]
) -> Population:
    """Return the selected samples of one store or several, as a user's sampler sees them."""

    def read(column: str) -> np.ndarray:
        """Read a column of the selected samples of all stores."""
        columns = [
            _of_selected(numbers_of(store, column, "plan.sampler"), selection)
            for store, selection in zip(stores, selections, strict=True)
        ]
        return np.concatenate(columns)

    if len(stores) > 1:
        return Population(JoinedSelection(selections), config.seed, read)
    selection = selections[0]
    groups = stores[0].groups
    if groups is not None:
        groups = selection.numbers(groups)
    return Population(selection, config.seed, read, groups)


def _read_train(config: PlanConfig, store: Store, selection: Selection) -> StoreArrays:
    weights = classes = None
    if config.weights and isinstance(config.weights, str):
        weights = _read_weights(config.weights, store, selection)
        if selection.size and not weights.any():
            raise ConfigError(
                f"plan.weights {config.weights} is 0 for all samples of {store.address}"
            )
    elif config.weights:
        if not is_class(store):
            raise ConfigError(
                f"plan.weights {config.weights} balances classes, and the labels of {store.address} are none"
            )
        classes = _of_selected(numbers_of(store, "label", "plan.weights"), selection)
        weights = balanced(classes, config.weights)
    source = _read_source(store, selection, config.sides_in("train"), "width > 0")
    return replace(source, weights=weights, classes=classes)


def _read_source(
    store: Store, selection: Selection, buckets: Sequence[Sides], remedy: str
) -> StoreArrays:
    """A store as the plan sees it.

    Args:
        buckets: height and width of each; empty = none.
        remedy: a store.filter that leaves only samples of known sizes, for errors.

    Raises:
        ConfigError: the sizes of the images are not known, or not those of some.
    """
    groups = store.groups
    if groups is not None and (
        [*groups[:1], *groups[-1:]] != [0, len(store)] or (np.diff(groups) < 0).any()
    ):
        raise StoreError(
            f"{store.address}: its groups must ascend from 0 to its {len(store)} samples, both included"
        )
    source = StoreArrays(store.address, store.fingerprint, selection, groups)
    if not buckets:
        return source
    columns = [numbers_of(store, name, "plan.buckets") for name in ("width", "height")]
    widths, heights = (_of_selected(column, selection) for column in columns)
    unknown = np.flatnonzero(~((widths >= 1) & (heights >= 1)))  # also where it is NaN
    if unknown.size:
        raise ConfigError(
            f"plan.buckets sorts images by their sizes, and {store.address} has none for {unknown.size} "
            f"samples, the first of them {selection.indices(unknown[:1])[0]}: set store.filter to {remedy}"
        )
    return replace(source, buckets=nearest(widths, heights, buckets))


def nearest(
    widths: np.ndarray, heights: np.ndarray, buckets: Sequence[Sides]
) -> np.ndarray:
    """Return each image's bucket, intp (n,), by its sides, positive integers (n,).

    It is the bucket with the nearest aspect ratio, by the ratio of the ratios; among several, the one with the
    nearest area by their ratio; among those, the first.
    """
    widths, heights = widths.astype(np.float64), heights.astype(np.float64)
    bucket_of = np.zeros(len(widths), np.intp)
    least = np.full((2, len(widths)), np.inf)
    for bucket, (height, width) in enumerate(buckets):
        # Products of whole numbers are exact here, and so equal ratios are equal numbers.
        ratio = _apart(widths * height, heights * width)
        area = _apart(widths * heights, np.float64(width * height))
        nearer = (ratio < least[0]) | ((ratio == least[0]) & (area < least[1]))
        bucket_of[nearer] = bucket
        least[:, nearer] = ratio[nearer], area[nearer]
    return bucket_of


def _apart(sides: np.ndarray, target: np.ndarray | np.float64) -> np.ndarray:
    return np.maximum(sides, target) / np.minimum(sides, target)


def balanced(labels: np.ndarray, exponent: float) -> np.ndarray:
    """Weights float64 (n,) by class: a sample of a class of m samples has the weight m^-exponent.

    So a class is drawn in proportion to m^(1-exponent): 1 = all classes equally often, 0 = as it is.
    """
    _, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    return (counts.astype(np.float64) ** -exponent)[inverse]


def _of_selected(values: np.ndarray, selection: Selection) -> np.ndarray:
    if selection.num_left_out:
        return values[selection.indices(np.arange(selection.size))]
    return values


def _read_weights(source: str, store: Store, selection: Selection) -> np.ndarray:
    """The weights of the selected samples of a store, float64 (n,), from a column or a file."""
    if source.endswith(".npy"):
        content = read_whole(source)
        try:
            if content is None:
                raise SampleError("the file does not exist")
            weights = read_npy(content)
        except SampleError as error:
            raise ConfigError(
                f"plan.weights: {source} cannot be read: {error}"
            ) from None
    else:
        weights = numbers_of(store, source, "plan.weights")
    return check_weights(weights, selection, f"plan.weights {source}")


def check_weights(
    weights: np.ndarray, selection: Selection, setting: str
) -> np.ndarray:
    """The weights of the selected samples of a store, float64 (n,); raises ConfigError where they are none."""
    weights = np.asarray(weights)
    if weights.shape != (selection.num_samples,) or weights.dtype.kind not in "iufb":
        raise ConfigError(
            f"{setting} has {weights.dtype} of {weights.shape}: it must have one number for each of the "
            f"store's {selection.num_samples} samples"
        )
    weights = _of_selected(weights, selection).astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if wrong.size:
        raise ConfigError(
            f"{setting} is {weights[wrong[0]]} for sample {selection.indices(wrong[:1])[0]}: weights are finite "
            "numbers of at least 0; exclude other samples with store.filter"
        )
    return weights


def select(
    train: Store,
    val: Store | None,
    exclude: PerSource,
    filter: PerSource,
    take: PerSource = "",
) -> tuple[list[Selection], Selection | None]:
    """Select the samples of a run's stores: shares, without those of a list and those for which a filter is false.

    Args:
        val: None = the run does not validate; `train` = a part of it is held out, with the same list and filter.

    Returns:
        A selection for each part of the training store, and one for the validation store.

    Raises:
        ConfigError: a share, a list or a filter is wrong, or nothing is left.
    """
    is_mixture = isinstance(train, JoinedStore)
    if isinstance(train, JoinedStore):
        parts = train.parts
    else:
        parts = {"train": train}
    names = list(parts)
    takes = _by_name("store.take", take, parts, val, names)
    shares = _shares(train, parts, val, takes) if any(takes.values()) else {}
    if val is train:
        names.append("val")
    lists = _by_name("store.exclude", exclude, parts, val, [] if is_mixture else names)
    filters = _by_name("store.filter", filter, parts, val, names)

    def selected(name: str, store: Store) -> Selection:
        return _selected(
            store, lists.get(name, ""), str(filters.get(name, "")), shares.get(name)
        )

    return [selected(name, store) for name, store in parts.items()], selected(
        "val", val
    ) if val else None


def _shares(
    train: Store,
    parts: Mapping[str, Store],
    val: Store | None,
    takes: Mapping[str, str | Path],
) -> dict[str, np.ndarray]:
    """Return the samples of each part of the training store, by its name, and of `val`, bool (N,) each.

    Training and validation never share any of one store: if only one takes a share, the other has the rest.
    """
    words = takes.get("val")
    shares = {name: _share(store, takes.get(name)) for name, store in parts.items()}
    if val is None:
        return shares
    if val.fingerprint != train.fingerprint:
        return shares | {"val": _share(val, words, is_val=True)}
    of_val = []
    for name, store in parts.items():
        kept = _share(store, words, is_val=True)
        both = shares[name] & kept
        if takes.get(name) and words and both.any():
            raise ConfigError(
                f"store.take: {takes[name]!r} for training and {words!r} for validation overlap in "
                f"{store.address}: take less, or cut both in the same order"
            )
        rest = shares[name] if words else kept
        rest &= ~both
        of_val.append(kept)
    return shares | {"val": np.concatenate(of_val)}


def _share(
    store: Store, words: str | Path | None, *, is_val: bool = False
) -> np.ndarray:
    """Return which samples of a store a share has, bool (N,); no words = all."""
    if not words:
        return np.ones(len(store), bool)
    classes = None
    if BY_CLASS in str(words):
        classes = numbers_of(store, "label", "store.take")
    return taken(str(words), len(store), classes, is_val)


def _by_name(
    setting: str,
    value: PerSource,
    parts: Mapping[str, Store],
    val: Store | None,
    unnamed: Sequence[str],
) -> Mapping[str, str | Path]:
    """Return each store's own value of a setting; a value without names is for the stores `unnamed`."""
    names = [*parts, "val"]
    if isinstance(value, Mapping):
        is_known = set(value) <= set(names)
    else:
        is_known = bool(unnamed) or not value
    if not is_known:
        raise ConfigError(
            f"{setting} must be {{NAME: …}} by {', '.join(names)}, got {shown(value)}"
        )
    if not isinstance(value, Mapping):
        return dict.fromkeys(unnamed, value)
    if value.get("val") and val is None:
        raise ConfigError(
            f"{setting}: there is {value['val']!r} for validation, and no store.val"
        )
    return value


def _selected(
    store: Store, exclude: str | Path, filter: str, keep: np.ndarray | None
) -> Selection:
    """Return the samples to draw from; `keep`, bool (N,), has those of the store's share."""
    left_out = read_bad_list(exclude, store, "store.exclude")
    if not filter and keep is None:
        return Selection(left_out, len(store))
    if keep is None:
        keep = np.ones(len(store), bool)
    if filter:
        from raypipe.stores.filter import matching  # this imports pyarrow.compute

        keep = keep & matching(store, filter)
    keep[left_out] = False
    if not keep.any():
        raise ConfigError(
            f"store.take, store.exclude and store.filter leave nothing of {store.address}: fix one of them"
        )
    return Selection.where(keep)
