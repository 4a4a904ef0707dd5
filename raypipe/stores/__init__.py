"""Stores: indexed, read-only collections of encoded samples, and the writers that make them.

`open_store` detects the kind of store at an address. The module of a store, and its library, is imported when the
first such store is opened; every other public name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypipe.errors import ConfigError, StoreError
from raypipe.stores.base import (
    Columns,
    Store,
    check_columns,
    check_indices,
)

if TYPE_CHECKING:
    from raypipe.stores.memory import MemoryStore as MemoryStore
    from raypipe.stores.simple import SimpleStore as SimpleStore
    from raypipe.stores.writers import LMDBWriter as LMDBWriter
    from raypipe.stores.writers import ParquetWriter as ParquetWriter

_HOME = {
    "LMDBWriter": "writers",
    "MemoryStore": "memory",
    "ParquetWriter": "writers",
    "SimpleStore": "simple",
    "digits_stores": "destination",
    "open_writer": "writers",
}
# What to do where a kind of store lacks an option.
_INSTEAD = {
    "image_column": ": its images have no other name, so leave image_column out; give it to `raypipe convert`, "
    "which copies another column's images as `image`"
}

__all__ = [
    "Columns",
    "LMDBWriter",
    "MemoryStore",
    "ParquetWriter",
    "SimpleStore",
    "Store",
    "StoreError",
    "check_columns",
    "check_indices",
    "digits_stores",
    "open_store",
    "open_writer",
    "store_options",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'raypipe.stores' has no attribute {name!r}")
    value = getattr(import_module(f"raypipe.stores.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def open_store(address: str | Path, **options: Any) -> Store:
    """Open the store at an address; the suffix, or the files in the folder, determine the kind of store.

    Opening reads no more than a folder's listing: a broken store raises when it is first used.

    Args:
        address: a local path, or a URI.
        options: arguments of the store's class, such as `image_column` of `ParquetStore`.

    Raises:
        StoreError: there is nothing at the address, or its format is unknown.
        ConfigError: the store has no such option, or the address contains credentials.
    """
    from raypipe.storage.filesystem import refuse_credentials
    from raypipe.stores.kinds import STORES, full_address, kind_of

    refuse_credentials(address)
    text = full_address(address)
    kind = kind_of(text)
    if kind not in STORES:
        raise StoreError(
            f"{address} is {kind}, which is read once, in order: `raypipe convert {address} train.lmdb` makes a "
            "store of it"
        )
    module, name = STORES[kind]
    make = getattr(import_module(f"raypipe.stores.{module}"), name)
    allowed = list(signature(make).parameters)
    if "trust_pickles" not in allowed:  # no other kind has pickles
        options.pop("trust_pickles", None)
    if "target_column" not in allowed and options.get("target_column") == "":
        # nothing to be left out
        del options["target_column"]
    for option, value in options.items():
        if option not in allowed:
            instead = _INSTEAD.get(option, "")
            raise ConfigError(
                f"{option}={value!r}: {address} is {kind}, which has no option {option!r}{instead}"
            )
    return make(text, **options)


def store_options(
    image_column: str = "image",
    target_column: str = "label",
    trust_pickles: bool = False,
) -> dict[str, Any]:
    """Return the options for `open_store` that are not the default: some kinds of store lack them.

    Args:
        image_column: name of the image column; for WebDataset, the suffix of the images.
        target_column: name of the label column; for WebDataset, the suffix of the labels, or their JSON field;
            "" = no label is needed.
        trust_pickles: whether pickled values in LMDB may be opened.
    """
    options: dict[str, Any] = {}
    if image_column not in ("image", ""):
        options["image_column"] = image_column
    if target_column != "label":
        options["target_column"] = target_column
    if trust_pickles:
        options["trust_pickles"] = True
    return options
