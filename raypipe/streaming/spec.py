"""What a stream is, as a plain value that pickles, built on the driver; `raypipe.streaming.pipeline` runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from raypipe.config import ColumnOptions, PlanConfig, PoolConfig, RunConfig, TransformConfig, column_options
from raypipe.errors import ConfigError
from raypipe.logs import LogFormat
from raypipe.plan.places import Split
from raypipe.plan.schedule import Plan
from raypipe.plan.selection import Selection
from raypipe.section import check
from raypipe.storage.filesystem import join
from raypipe.stores import open_store, store_options
from raypipe.stores.base import Store
from raypipe.stores.joined import JoinedStore
from raypipe.stores.record import read_bad_list
from raypipe.streaming.planning import make_plan
from raypipe.transform.column_types import NUM_PROBED, find_columns
from raypipe.transform.columns import NO_COLUMNS, MakeColumns, SampleColumns
from raypipe.transform.crop_room import check_crops
from raypipe.transform.encoded import EncodedTransform
from raypipe.transform.fields import LABEL
from raypipe.transform.presets import build_transform, check_transform, num_pixels, takes_size
from raypipe.transform.sample_cache import check_cache
from raypipe.transform.samples import Wanted
from raypipe.transform.sizes import has_sizes
from raypipe.transform.targets import check_columns, target_pipeline
from raypipe.transform.transform_steps import Steps, brief, config_without_files, without_files
from raypipe.transform.views import makes_views

Transform = Callable[..., Any] | str | Steps | Mapping[str, Any] | None
"""A callable on uint8 RGB (H, W, 3), or on what `transform.decode_as` gives, an Albumentations or torchvision v2
pipeline, None, or what `transform.train` may be; or views of several, `{NAME: (transform, count), …}`."""

Train = Store | str | Path | Mapping[str, Store | str | Path]
"""A training store or its address; or several, by names, which a mixture draws from."""
PerSource = str | Path | Mapping[str, str]
"""What there is one of for a store; of a mixture one for all its stores, or some by their names."""


@dataclass(frozen=True, init=False)
class StreamSpec:
    """Everything that determines a stream, and the pool that makes it: a plain value that can be pickled.

    Attributes:
        plan: the order.
        stores: the store of each split of the schedule.
        transforms: the CPU transform of each split.
        transform: decode and bad-sample settings.
        pool: the actor pool.
        quarantine: URI of the folder that records bad samples; empty = log only.
        run: name of the run, for metrics and logs.
        log: format of its log lines.
        columns: what batches have beside images, and the target where that is no class.
    """

    plan: Plan
    stores: dict[Split, Store]
    transforms: dict[Split, Transform] = field(repr=False)
    transform: TransformConfig
    pool: PoolConfig
    quarantine: str = ""
    run: str = ""
    log: LogFormat = "text"
    columns: SampleColumns = field(default=NO_COLUMNS, repr=False)

    def __init__(
        self,
        train: Train,
        val: Store | str | Path | None = None,
        *,
        plan: PlanConfig | None = None,
        transform: TransformConfig | None = None,
        pool: PoolConfig | None = None,
        train_transform: Transform = "",
        val_transform: Transform = "",
        exclude: PerSource = "",
        val_exclude: str | Path = "",
        filter: PerSource = "",
        val_filter: str = "",
        quarantine: str = "",
        run: str = "",
        log: LogFormat = "text",
        image_column: str = "image",
        label_column: str | None = "label",
        columns: Sequence[str] | Mapping[str, Mapping[str, Any] | None] = (),
        make_columns: MakeColumns | str | None = None,
    ) -> None:
        """Open the stores and lay out the plan.

        Args:
            train, val: stores or their addresses; `train` may have several, by names, for a mixture.
            plan, transform, pool: settings; None = the defaults.
            train_transform, val_transform: used instead of those that `transform` names; None = pixels as they
                are stored. A train_transform that does not follow transform.size needs a val_transform too.
            exclude, val_exclude: lists of bad samples of each store, see `StoreConfig`.
            filter, val_filter: expressions of columns, true for the samples to draw from, see `StoreConfig`.
            quarantine, run, log: see above.
            image_column, label_column: see `StoreConfig`, of stores that are given by their addresses. A
                label_column of "" or None, for any store, makes batches without a target.
            columns: names of columns that batches get, or their options by name, see `StoreConfig`. `label`, or
                the column's own name, stands for the target.
            make_columns: makes the batch's columns of those, sample by sample, `module:function` or a callable;
                None = as `transform` says, see docs/columns.md.

        Raises:
            StoreError, ConfigError: a store or a setting is wrong.
        """
        check("StreamSpec: plan", plan, PlanConfig | None)
        check("StreamSpec: transform", transform, TransformConfig | None)
        check("StreamSpec: pool", pool, PoolConfig | None)
        declared = renamed(column_options(columns), label_column)
        transform = config_without_files(transform or TransformConfig())
        plan_config, pool = plan or PlanConfig(), pool or PoolConfig()
        check_cache(pool, transform)
        options = store_options(image_column, label_column or "")
        train_store = open_stores(train, options)
        val_store = None if val is None else _opened(val, options)
        stores: dict[Split, Store] = {"train": train_store}
        if val_store is not None and plan_config.val_interval:
            stores["val"] = val_store
        chosen: dict[Split, Transform] = {
            "train": transform.train if train_transform == "" else train_transform,
            "val": transform.val if val_transform == "" else val_transform,
        }
        if "val" in stores and val_transform == "" != train_transform:
            check_follows(chosen["train"], transform)
        transforms = {split: without_files(chosen[split]) for split in stores}
        check_transforms(transform, transforms, stores)
        laid_out = make_plan(
            plan_config,
            train_store,
            val_store,
            selections=select(train_store, exclude, filter),
            val_selection=next(iter(select(val_store, val_exclude, val_filter, "store.val_")), None),
        )
        for split in stores:
            check_sizes(transform, split, transforms[split], plan_config)
            if not plan_config.sides_in(split):  # which images belong to a bucket is not known here
                check_crops(transform, split, transforms[split], stores[split], laid_out.kept[split])
        make = make_columns or transform.make_columns or None
        found = _columns_of(stores, declared, make, laid_out, pool, bool(label_column))
        sizes = list(transform.size_by_epoch.items())
        fields = {
            "plan": laid_out.bound_to({"sizes": sizes}) if len(sizes) > 1 else laid_out,
            "columns": found,
            "stores": stores,
            "transforms": transforms,
            "transform": transform,
            "pool": pool,
            "quarantine": quarantine,
            "run": run,
            "log": log,
        }
        self.__dict__.update(fields)  # the class is frozen

    def replace(self, **changes: Any) -> StreamSpec:
        """A copy with different values of some attributes."""
        assert changes.keys() <= self.__dict__.keys()
        copy = object.__new__(StreamSpec)
        copy.__dict__.update(self.__dict__, **changes)
        return copy

    @property
    def wanted(self) -> Wanted:
        """What is read of samples beside the image."""
        columns = dict.fromkeys((*self.columns.stored, *self.transform.target_columns.values()))
        return Wanted(self.columns.reads_class, tuple(columns))

    def readers(self) -> dict[Split, Store]:
        """The stores that the read stage reads; the actors read the others themselves."""
        if self.pool.read == "auto":
            return {split: store for split, store in self.stores.items() if store.groups is not None}
        return dict(self.stores) if self.pool.read == "stage" else {}


def _columns_of(
    stores: Mapping[Split, Store],
    declared: Mapping[str, ColumnOptions],
    make: MakeColumns | str | None,
    plan: Plan,
    pool: PoolConfig,
    label: bool,
) -> SampleColumns:
    """The columns of a stream; raises ConfigError as `find_columns` does, and where a cache would lose them."""

    def first(split: Split) -> np.ndarray:
        kept = plan.kept[split]
        return kept.indices(np.arange(min(NUM_PROBED, kept.size)))

    found = find_columns(stores, declared, make, first, label)
    if found and pool.cache == "disk":
        raise ConfigError(
            f"pool.cache={pool.cache!r} keeps images and classes, and no columns or other targets: set "
            "pool.cache='off', or leave store.columns out"
        )
    return found


def open_stores(train: Train, options: Mapping[str, str]) -> Store:
    """The store at an address, or of several, by names, one that joins them; `options` see `store_options`."""
    if not isinstance(train, Mapping):
        return _opened(train, options)
    if not train:
        raise ConfigError("store.train names no store: give {NAME: ADDRESS, …}")
    return JoinedStore({name: _opened(each, options) for name, each in train.items()})


def _opened(store: Store | str | Path, options: Mapping[str, str]) -> Store:
    if isinstance(store, str | Path):
        return open_store(store, **options)
    if options:
        (setting, value), *_ = options.items()
        raise ConfigError(
            f"{setting}={value!r} is for an address, and {store.address} is an open store: give the option to "
            "raypipe.open_store"
        )
    return store


def select(store: Store | None, exclude: PerSource, filter: PerSource, prefix: str = "store.") -> list[Selection]:
    """The samples of a store without those of a list, and those that a filter is not true for.

    Args:
        store: None = the run reads none.
        prefix: of the settings' names, for errors.

    Returns:
        A selection for each part of a joined store, or one.

    Raises:
        ConfigError: a list or a filter is wrong, or nothing is left.
    """
    if isinstance(store, JoinedStore):
        _check_names(store, f"{prefix}exclude", exclude, or_one=False)
        _check_names(store, f"{prefix}filter", filter, or_one=True)
        return [
            _selected(part, _of_source(name, exclude), str(_of_source(name, filter)), prefix)
            for name, part in store.parts.items()
        ]
    if isinstance(exclude, Mapping) or isinstance(filter, Mapping):
        raise ConfigError(f"{prefix}exclude and {prefix}filter have names, which only a mixture's stores have")
    if store is None:
        read_bad_list(exclude, None, f"{prefix}exclude")
        if filter:
            raise ConfigError(f"{prefix}filter: there is {filter!r}, and no store to filter")
        return []
    return [_selected(store, exclude, str(filter), prefix)]


def _selected(store: Store, exclude: str | Path, filter: str, prefix: str) -> Selection:
    left_out = read_bad_list(exclude, store, f"{prefix}exclude")
    if not filter:
        return Selection(left_out, len(store))
    from raypipe.stores.filter import matching  # which imports pyarrow.compute

    keep = matching(store, filter, f"{prefix}filter")
    keep[left_out] = False
    if not keep.any():
        raise ConfigError(f"{prefix}exclude and {prefix}filter leave out all of {store.address}: mend one of them")
    return Selection.where(keep)


def _check_names(store: JoinedStore, setting: str, given: PerSource, or_one: bool) -> None:
    if set(given) - set(store.parts) if isinstance(given, Mapping) else given and not or_one:
        raise ConfigError(
            f"{setting} must be {{NAME: …}} by the stores of store.train, {', '.join(store.parts)}, got {given!r}"
        )


def _of_source(name: str, given: PerSource) -> str | Path:
    return given.get(name, "") if isinstance(given, Mapping) else given


def with_digits(run: RunConfig) -> RunConfig:
    """The run, on the digits that scikit-learn ships where it names no store; they are written on first use."""
    if run.store.train:
        return run
    from raypipe.stores.destination import digits_stores  # which imports what writes

    train, val = digits_stores()
    return replace(run, store=replace(run.store, train=train, val=run.store.val or val))


def open_train(run: RunConfig) -> Store:
    """The training store of a run."""
    store = with_digits(run).store
    return open_stores(store.train, store_options(store.image_column, store.label_column))


def spec_of(run: RunConfig, run_uri: str = "") -> StreamSpec:
    """The stream of a run, whose folder, if it has one, has the record of its bad samples."""
    store = with_digits(run).store
    return StreamSpec(
        store.train,
        store.val or None,
        plan=run.plan,
        transform=run.transform,
        pool=run.pool,
        exclude=store.exclude,
        val_exclude=store.val_exclude,
        filter=store.filter,
        val_filter=store.val_filter,
        quarantine=join(run_uri, "quarantine") if run_uri else "",
        run=run.name,
        log=run.log,
        image_column=store.image_column,
        label_column=store.label_column,
        columns=store.columns,
    )


def run_columns(run: RunConfig, store: Store) -> SampleColumns:
    """The columns of a run, by its training store alone."""
    declared = column_options(renamed(run.store.columns, run.store.label_column))
    make, indices = run.transform.make_columns or None, np.arange(min(NUM_PROBED, len(store)))
    has_label = bool(run.store.label_column) and LABEL in store.columns  # any store may be looked at
    return find_columns({"train": store}, declared, make, lambda _: indices, has_label)


def renamed(columns: Any, label_column: str | None) -> dict[str, Any]:
    """The columns that are named, with their options: the one that is the target is `label` in its store."""
    given = columns if isinstance(columns, Mapping) else dict.fromkeys(columns)
    return {LABEL if name == label_column else name: options for name, options in given.items()}


def check_transforms(
    config: TransformConfig, transforms: Mapping[Split, Any], stores: Mapping[Split, Store]
) -> None:
    """Raise ConfigError where `content_of` would, as far as can be known without the user's code."""
    for split, store in stores.items():
        transform = transforms[split]
        if config.decode == "gpu":
            EncodedTransform(transform, config)
        check_transform(transform, config.final_size, config.decode_as == "array")
        if makes_views(transform):
            _check_views(config, split)
        check_columns(store, config.target_columns)
        if config.target_columns:
            target_pipeline(build_transform(transform, config.final_size), set(config.target_columns))


def check_follows(transform: Transform, config: TransformConfig) -> None:
    """Raise ConfigError where a train_transform has a size of its own, and validations that of the defaults."""
    defaults = (config.val, config.size) == (TransformConfig.val, TransformConfig.size)
    if defaults and not takes_size(transform) and num_pixels(transform, config.final_size) is None:
        raise ConfigError(
            f"train_transform is {_name_of(transform)}, and there is no val_transform: validations would have the "
            f"default size, {config.final_size} px, whatever the training has. Write val_transform=PIPELINE, for "
            "the same size and without random steps; or 'center', with transform=TransformConfig(size=…); or "
            "None: pixels as they are stored"
        )


def _name_of(transform: Any) -> str:
    """A transform for a message."""
    known = isinstance(transform, str | list) or makes_views(transform)
    return brief(transform) if known else "None" if transform is None else f"a {type(transform).__name__}"


def _check_views(config: TransformConfig, split: Split) -> None:
    """Raise ConfigError where something does not go with a split's views."""
    reason = ""
    if config.target_columns:
        reason = f"{config.target_settings} is of one image: leave it out"
    elif config.crop_decode == "scaled":
        reason = (
            "transform.crop_decode='scaled' decodes each crop by itself, where views share one decoding: leave it "
            "out, or set transform.decode_min_side"
        )
    if reason:
        raise ConfigError(f"transform.{split} makes views, and {reason}")


def check_sizes(config: TransformConfig, split: Split, transform: Any, plan: PlanConfig) -> None:
    """Raise ConfigError where a split's images have several sizes, and its transform can make but one."""
    if has_sizes(config, split, plan.sides_in(split)) and not takes_size(transform):
        several = "plan.buckets" if plan.sides_in(split) else "transform.size"
        raise ConfigError(
            f"transform.{split} is {_name_of(transform)}, which is made once, and {several} has several "
            "sizes: use a preset, or module:function, which is called with each size and returns a transform"
        )
