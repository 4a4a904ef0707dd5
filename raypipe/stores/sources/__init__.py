"""Sources: formats that are read once, in order, by `raypipe convert`, which makes a store of them.

    format             → what `kind_of` finds                                → what `open_source` gives
    TFRecord             *.tfrecord*, *.tfrec, NAME-00000-of-01024             a `Source`: samples, one after the
    HDF5                 *.h5, *.hdf5                                          other, class names, their number
    MXNet RecordIO       *.rec
    zip                  *.zip
    Arrow                state.json and *.arrow: datasets' save_to_disk
    MDS, LitData         index.json, by what is in it
    tensors, arrays      *.pt, *.pth, *.npz
    a user's             module:name

Each has a module, which imports its library when it is used. Samples are what `raypipe.convert` takes: `image`,
encoded bytes or pixels, `label`, and any other columns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from raypipe.errors import StoreError
from raypipe.storage.filesystem import refuse_credentials
from raypipe.stores.sources.format_source import Asked, Source

__all__ = ["Asked", "Source", "open_source"]


def open_source(address: str | Path, asked: Asked = Asked()) -> Source | None:  # noqa: B008  it cannot change
    """Open the source at an address; None if there is none, as it is a store, or nothing.

    Args:
        address: a path, a URI or `module:name`.
        asked: the columns that become `image` and `label`.

    Raises:
        StoreError: it is damaged, or of a kind or with columns that are not read.
        ConfigError: a library is missing, or the address has credentials.
    """
    from raypipe.stores.kinds import (
        SOURCES,
        full_address,
        kind_of,
    )  # it knows the formats

    refuse_credentials(address)
    text = full_address(address)
    kind = ""
    with contextlib.suppress(StoreError):  # the store says what is wrong
        kind = kind_of(text)
    if kind not in SOURCES:
        return None
    name = SOURCES[kind]
    module = import_module(f"raypipe.stores.sources.{name}")
    make: Callable[..., Source] = getattr(module, f"open_{name}")
    return make(text, asked)
