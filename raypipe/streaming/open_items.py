"""Opens the stream of a map-style Dataset: its items are made by index under their keys, and joined by a collate
function, where a store's samples are read and transformed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raypipe.config import PlanConfig, TransformConfig
from raypipe.errors import ConfigError
from raypipe.importing import loaded_module
from raypipe.plan.places import Split
from raypipe.stores.indexed import IndexStore
from raypipe.streaming.items import DatasetItems
from raypipe.streaming.planning import PerSource, plan_of_selected
from raypipe.transform.columns import SampleColumns

_NAME = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")
# Settings of a transform that hold for any code that makes samples.
_FOR_ITEMS = ("max_bad_fraction", "time_limit_s")


def is_dataset(train: Any) -> bool:
    """Return whether what a stream is opened with is a Dataset, `module:function`, or the items of one."""
    if isinstance(train, DatasetItems):
        return True
    if isinstance(train, str):
        return bool(_NAME.fullmatch(train)) and not Path(train).exists()
    if isinstance(train, Path | Mapping) or hasattr(train, "read"):
        return False
    if isinstance(train, list | tuple) and isinstance(next(iter(train), ""), str):
        return False  # of addresses
    return hasattr(type(train), "__getitem__") or _is_iterable(train)


def items_of(dataset: Any, argument: str, collate: Any) -> DatasetItems:
    """Return a Dataset's items; raises ConfigError if it is none that is read by index."""
    if isinstance(dataset, DatasetItems):
        return dataset
    if not is_dataset(dataset):
        raise ConfigError(
            f"raypipe.open_stream: {argument} is a {type(dataset).__name__}, and the other split is a Dataset: "
            "give both as Datasets, or both as stores"
        )
    check_has_index(dataset)
    return DatasetItems(dataset, collate)


def check_has_index(dataset: Any) -> None:
    """Raise ConfigError for an IterableDataset."""
    if _is_iterable(dataset):
        raise ConfigError(
            f"{type(dataset).__name__} is an IterableDataset, whose samples have no index, and so no seed and no "
            "place to resume at: give it __getitem__ and __len__, or write it as a store with "
            "raypipe.convert(dataset, 'train.lmdb'), for raypipe.open_stream"
        )


def _is_iterable(dataset: Any) -> bool:
    torch_data = loaded_module("torch.utils.data")
    return torch_data is not None and isinstance(dataset, torch_data.IterableDataset)


def open_items(
    train: Any,
    val: Any,
    collate_fn: Any,
    plan: PlanConfig,
    transform: TransformConfig,
    exclude: PerSource,
    take: str | Mapping[str, str],
) -> dict[str, Any]:
    """Return the parts of a `StreamSpec` that Datasets decide, by name.

    Raises:
        ConfigError: a Dataset cannot be read by index, or sent to the actors; or a setting is for stores.
    """
    defaults = vars(TransformConfig()).items()
    of_stores = {name: value for name, value in defaults if name not in _FOR_ITEMS}
    check_for_items("transform.", vars(transform), of_stores)
    items: dict[Split, DatasetItems] = {"train": items_of(train, "train", collate_fn)}
    stores: dict[Split, IndexStore] = {"train": _store_of(items["train"])}
    if val is None and "val" in take:
        # a part of it
        items["val"] = items["train"]
        stores["val"] = stores["train"]
    elif val is not None and plan.val_interval:
        items["val"] = items_of(val, "val", collate_fn)
        items["train"].share_with(items["val"])
        stores["val"] = _store_of(items["val"])
    laid_out = plan_of_selected(
        plan, stores["train"], stores.get("val"), exclude, "", take
    )
    return {
        "plan": laid_out,
        "stores": stores,
        "transforms": items,
        "columns": SampleColumns(reads_class=False),
    }


def check_for_items(
    place: str, values: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Raise ConfigError for a setting that is for stores, and that a Dataset does itself.

    Args:
        place: begins the settings' names in the message.
        values: settings by name, and others.
        defaults: those that are for stores.
    """
    for name, default in defaults.items():
        if values[name] != default:
            raise ConfigError(
                f"{place}{name} is for stores, and a Dataset makes its items itself: do it in __getitem__, or in "
                "collate_fn"
            )


def _store_of(items: DatasetItems) -> IndexStore:
    facts = {name: part.digest() for name, part in items.facts.items()}
    return IndexStore(len(items.dataset), items.name, facts)
