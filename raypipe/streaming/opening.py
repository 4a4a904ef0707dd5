"""Opens streams, from arguments or from the settings of a run: their stores, transforms, plan and columns."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from raypipe.config import (
    ColumnOptions,
    PlanConfig,
    PoolConfig,
    RunConfig,
    TransformConfig,
    column_options,
)
from raypipe.errors import ConfigError
from raypipe.logs import LogFormat
from raypipe.mistakes import checks_keywords
from raypipe.plan.places import Split
from raypipe.plan.schedule import Plan
from raypipe.section import check
from raypipe.storage.filesystem import join_address, split_address
from raypipe.stores import open_store, store_options
from raypipe.stores.base import Store
from raypipe.stores.facts import facts_of
from raypipe.stores.in_memory import InMemoryStore
from raypipe.stores.joined import JoinedStore
from raypipe.streaming.open_items import check_for_items, is_dataset, open_items
from raypipe.streaming.planning import PerSource, plan_of_selected
from raypipe.streaming.record.opened import opened_with
from raypipe.streaming.spec import StreamSpec, UserTransform
from raypipe.transform.checks import (
    check_follows,
    check_sizes,
    check_strength,
    check_transforms,
)
from raypipe.transform.column_types import NUM_PROBED, find_columns
from raypipe.transform.columns import MakeColumns, SampleColumns
from raypipe.transform.ending import Ending
from raypipe.transform.fields import LABEL
from raypipe.transform.split_endings import take_endings
from raypipe.transform.transform_steps import brief

Train = Any
"""A training store or its address; or several, by names, which a mixture draws from; or a map-style Dataset."""

_Section = TypeVar("_Section")
# Arguments of `open_stream` that say how stores are read and transformed, and their defaults.
_FOR_STORES: Mapping[str, Any] = {
    "train_transform": "",
    "val_transform": "",
    "filter": "",
    "image_column": "image",
    "target_column": "label",
    "trust_pickles": False,
    "columns": (),
    "make_columns": None,
    "in_memory": False,
}
_MEMBERS = ("address", "schema", "classes", "groups", "fingerprint", "__len__", "read")


def join_train_run() -> None:
    """Make the run of the calling trainer one of raypipe's, see `train_runs`; do nothing outside of Ray Train."""
    # A process without this module has no train function, and need not wait 2 s for its import.
    if "ray.train" in sys.modules:
        from raypipe.rayext.train_runs import join_run_of_trainer

        join_run_of_trainer()


@checks_keywords
def open_stream(
    train: Train,
    val: Any = None,
    *,
    plan: PlanConfig | None = None,
    transform: TransformConfig | None = None,
    pool: PoolConfig | None = None,
    train_transform: UserTransform = "",
    val_transform: UserTransform = "",
    exclude: PerSource = "",
    filter: PerSource = "",
    take: str | Mapping[str, str] = "",
    quarantine: str = "",
    run: str = "",
    log_format: LogFormat = "text",
    image_column: str = "image",
    target_column: str | None = "label",
    trust_pickles: bool = False,
    columns: Sequence[str] | Mapping[str, Mapping[str, Any] | None] = (),
    make_columns: MakeColumns | str | None = None,
    in_memory: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> StreamSpec:
    """Open the stores of a stream, check the settings against them, and lay out the plan.

    Args:
        train, val: stores or their addresses; `train` may have several, by names, for a mixture. Or map-style
            Datasets, such as torch's, or `module:function` that makes one: the actors make their items by index,
            and a batch has what collate_fn makes as `batch.collated`.
        plan, transform, pool: settings; None = the defaults.
        train_transform, val_transform: used instead of those that `transform` names; None = pixels as they
            are stored. A train_transform that does not follow transform.size needs a val_transform too.
        exclude: lists of bad samples, see `StoreConfig`.
        filter: expressions of columns, true for the samples to draw from, see `StoreConfig`.
        take: shares of the stores, see `StoreConfig`. `{"val": "10%"}` without `val` holds out a part of `train`.
        quarantine, run, log_format: see `StreamSpec`.
        image_column, target_column: see `StoreConfig`, of stores that are given by their addresses. A
            target_column of "" or None, for any store, makes batches without a target.
        trust_pickles: see `StoreConfig`.
        columns: names of columns that batches get, or their options by name, see `StoreConfig`. `label`, or
            the column's own name, stands for the target.
        make_columns: makes the batch's columns of those, sample by sample, `module:function` or a callable;
            None = as `transform` says, see docs/targets.md.
        in_memory: see `StoreConfig`.
        collate_fn: makes a nest of tensors, arrays and other values of B items of a Dataset; None = torch's
            `default_collate`.

    Raises:
        StoreError, ConfigError: a store or a setting is wrong.
    """
    arguments = dict(locals())
    join_train_run()
    plan = _checked("plan", plan, PlanConfig)
    transform = _checked("transform", transform, TransformConfig)
    pool = _checked("pool", pool, PoolConfig)
    arguments |= {"plan": plan, "transform": transform}
    spec_of_parts = functools.partial(
        StreamSpec,
        transform=transform,
        pool=pool,
        quarantine=quarantine,
        run=run,
        log_format=log_format,
    )
    if is_dataset(train):
        check_for_items("raypipe.open_stream: ", arguments, _FOR_STORES)
        parts = open_items(train, val, collate_fn, plan, transform, exclude, take)
        opened = opened_with(arguments) | {"train": train, "val": val}
        return spec_of_parts(opened=opened, **parts)
    declared = renamed(column_options(columns), target_column)
    options = store_options(image_column, target_column or "", trust_pickles)
    # windows of a number of groups need a store in groups
    shuffle = "window" if isinstance(plan.shuffle, int) else plan.shuffle
    index = ""
    if quarantine:  # next to the folder of its bad samples
        index = join_address(split_address(quarantine)[0], "index")
    open_one = functools.partial(
        _open, options=options, shuffle=shuffle, index=index, in_memory=in_memory
    )
    train_store = _joined(train, open_one)
    val_store = None if val is None else open_one(val)
    if val is None and "val" in take:
        val_store = train_store  # a part of it
    stores = _stores_by_split(train_store, val_store, plan, bool(target_column))
    transforms, endings = _transforms_of(
        stores, transform, train_transform, val_transform
    )
    laid_out = plan_of_selected(plan, train_store, val_store, exclude, filter, take)
    check_sizes(transform, transforms, stores, plan)
    sample_columns = _columns_of(
        stores,
        declared,
        make_columns or transform.make_columns,
        laid_out,
        bool(target_column),
    )
    return spec_of_parts(
        plan=_bound_to_pixels(laid_out, transform, endings),
        stores=stores,
        transforms=transforms,
        columns=sample_columns,
        endings=endings,
        store_facts={split: facts_of(store) for split, store in stores.items()},
        opened=opened_with(arguments),
    )


def _checked(argument: str, value: _Section | None, kind: type[_Section]) -> _Section:
    """Return the settings that an argument gives, by default those of their class; check their type."""
    check(f"raypipe.open_stream: {argument}", value, kind | None)
    return kind() if value is None else value


def _bound_to_pixels(
    plan: Plan, transform: TransformConfig, endings: Mapping[Split, Ending]
) -> Plan:
    """Return a plan whose fingerprint has the settings of pixels, too, which a resume must not change.

    Those that have their defaults are not in it.
    """
    sizes = list(transform.size_by_epoch.items())
    if len(sizes) > 1:
        plan = plan.bound_to({"sizes": sizes})
    strength = transform.strength
    if strength != 1:
        epochs = plan.config.epochs if isinstance(strength, tuple) else 0
        plan = plan.bound_to({"strength": strength, "epochs": epochs})
    if endings:
        described = {split: ending.described for split, ending in endings.items()}
        plan = plan.bound_to({"endings": described})
    if transform.decode == "device":
        plan = plan.bound_to({"decode": transform.decode})
    return plan


def _stores_by_split(
    train: Store, val: Store | None, plan: PlanConfig, has_target: bool
) -> dict[Split, Store]:
    """The stores of the splits that the plan has; raises ConfigError if their classes differ."""
    if val is None or not plan.val_interval:
        return {"train": train}
    if has_target and train.classes and val.classes and train.classes != val.classes:
        raise ConfigError(
            f"{train.address} has {len(train.classes)} classes, and {val.address} {len(val.classes)} with other "
            "names or in another order, so their labels mean different things: convert both with the same classes "
            "(raypipe convert --classes A,B), give a folder an empty folder for each class that it lacks, or list "
            "all names in order in classes.txt next to a table"
        )
    return {"train": train, "val": val}


def _transforms_of(
    stores: Mapping[Split, Store],
    config: TransformConfig,
    train: UserTransform,
    val: UserTransform,
) -> tuple[dict[Split, UserTransform], dict[Split, Ending]]:
    """Return the transform of each split, and its ending; an empty one is that of the settings."""
    for split, given in (("train", train), ("val", val)):
        setting = getattr(config, split)
        # "none" names no transform either
        if given != "" and setting not in ("none", getattr(TransformConfig, split)):
            raise ConfigError(
                f"{split}_transform and TransformConfig({split}={brief(setting)}) are both given, and only one "
                "can hold: leave one out"
            )
    chosen: dict[Split, UserTransform] = {
        "train": config.train if train == "" else train,
        "val": config.val if val == "" else val,
    }
    if "val" in stores and val == "" != train:
        check_follows(chosen["train"], config)
    transforms = {split: chosen[split] for split in stores}
    check_transforms(config, transforms, stores)
    taken, endings = take_endings(transforms, config)
    check_strength(config, taken["train"])
    return taken, endings


def _columns_of(
    stores: Mapping[Split, Store],
    declared: Mapping[str, ColumnOptions],
    make: MakeColumns | str,
    plan: Plan,
    label: bool,
) -> SampleColumns:
    """The columns of a stream; raises ConfigError as `find_columns` does."""

    def first(split: Split) -> np.ndarray:
        kept = plan.kept[split]
        return kept.indices(np.arange(min(NUM_PROBED, kept.size)))

    return find_columns(stores, declared, make or None, first, label)


def _joined(train: Train, open_one: Callable[..., Store]) -> Store:
    """The store at an address, or of several, by names, one that joins them."""
    if not isinstance(train, Mapping):
        return open_one(train)
    if not train:
        raise ConfigError("store.train names no store: give {NAME: ADDRESS, …}")
    if "val" in train:
        raise ConfigError(
            "store.train: 'val' is the name of the validation store; choose another one"
        )
    return JoinedStore({name: open_one(store) for name, store in train.items()})


def _open(
    store: Store | str | Path,
    options: Mapping[str, Any],
    shuffle: str = "auto",
    index: str = "",
    in_memory: bool = False,
) -> Store:
    """The store at an address, or an open one, as the stream reads it.

    Args:
        options: see `store_options`.
        shuffle: see `PlanConfig`; some stores can be read with or without groups.
        index: address of the run's folder of indexes; empty = none.
        in_memory: whether stores are kept in shared memory; each of several, so that streams of one share it.
    """
    opened = _of_address(store, options)
    adapted = getattr(opened, "adapted", None)
    if adapted is not None:
        opened = adapted(shuffle, index)
    if not in_memory:
        return opened
    if isinstance(opened, JoinedStore):
        return _joined(opened.parts, InMemoryStore)
    return InMemoryStore(opened)


def _of_address(store: Store | str | Path, options: Mapping[str, Any]) -> Store:
    if isinstance(store, str | Path):
        return open_store(store, **options)
    if type(store).__module__.startswith("ray.data."):
        raise ConfigError(
            "a stream reads samples by index, which a ray.data.Dataset has none of: raypipe.convert(dataset, "
            "'train.lmdb') writes it as a store, in parallel on its cluster; then open 'train.lmdb'"
        )
    if lacking := [name for name in _MEMBERS if not hasattr(store, name)]:
        raise ConfigError(
            f"a {type(store).__name__} is not a store: it lacks {lacking[0]}; give an address, or {{NAME: "
            "ADDRESS, …} for a mixture (docs/formats.md shows raypipe.convert, and how to write a store)"
        )
    for setting, value in options.items():
        if not value:  # a stream of any store may have no target
            continue
        raise ConfigError(
            f"{setting}={value!r} is for an address, and {store.address} is an open store: give the option to "
            "raypipe.open_store"
        )
    return store


def with_digits(run: RunConfig) -> RunConfig:
    """The run, on the digits that raypipe ships where it names no store; they are written on first use."""
    if run.store.train != "":  # an empty mapping names no store, which is an error
        return run
    from raypipe.stores.destination import digits_stores  # this imports the writers

    train, val = digits_stores()
    return replace(run, store=replace(run.store, train=train, val=run.store.val or val))


def open_train(run: RunConfig) -> Store:
    """The training store of a run."""
    store = with_digits(run).store
    options = store_options(
        store.image_column, store.target_column, store.trust_pickles
    )
    return _joined(store.train, functools.partial(_open, options=options))


def spec_of(run: RunConfig, run_uri: str = "") -> StreamSpec:
    """The stream of a run, whose folder, if it has one, has the record of its bad samples."""
    store = with_digits(run).store
    return open_stream(
        store.train,
        store.val or None,
        plan=run.plan,
        transform=run.transform,
        pool=run.pool,
        exclude=store.exclude,
        filter=store.filter,
        take=store.take,
        quarantine=join_address(run_uri, "quarantine") if run_uri else "",
        run=run.name,
        log_format=run.log_format,
        image_column=store.image_column,
        trust_pickles=store.trust_pickles,
        target_column=store.target_column,
        columns=store.columns,
        in_memory=store.in_memory,
    )


def run_columns(run: RunConfig, store: Store) -> SampleColumns:
    """Return the columns of a run, using only its training store."""
    declared = column_options(renamed(run.store.columns, run.store.target_column))
    make = run.transform.make_columns or None
    indices = np.arange(min(NUM_PROBED, len(store)))
    # any store may be looked at
    has_label = bool(run.store.target_column) and LABEL in store.schema.names
    return find_columns({"train": store}, declared, make, lambda _: indices, has_label)


def renamed(columns: Any, target_column: str | None) -> dict[str, Any]:
    """The columns that are named, with their options: the one that is the target is `label` in its store."""
    if isinstance(columns, Mapping):
        options_by_name = columns
    else:
        options_by_name = dict.fromkeys(columns)
    return {
        LABEL if name == target_column else name: options
        for name, options in options_by_name.items()
    }
