"""Sources: formats that are read once, in order, by `raypipe convert`, which makes a store of them.

    format             → what `kind_at` finds                                → what `open_source` gives
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
import re
from collections.abc import Callable, Collection
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

from raypipe.errors import StoreError
from raypipe.storage.filesystem import is_remote, refuse_credentials, split_address
from raypipe.stores.addresses import expand, folders_at, list_files, names_at
from raypipe.stores.sources.format_source import INDEX, Asked, Source, index_at
from raypipe.stores.sources.tfrecord import is_tfrecord

__all__ = ["Asked", "Source", "kind_at", "open_source"]

# Kind → its module, which has open_MODULE.
_SOURCES = {
    "TFRecord": "tfrecord",
    "HDF5": "hdf5",
    "MXNet RecordIO": "recordio",
    "zip": "zips",
    "Arrow of the datasets library": "arrow",
    "MosaicML's MDS": "mds",
    "LitData": "litdata",
    "tensors": "tensors",
    "npz": "npz",
    "samples of a function": "user",
}
_ENDS = {
    **dict.fromkeys((".h5", ".hdf5", ".hdf"), "HDF5"),
    **dict.fromkeys((".pt", ".pth"), "tensors"),
    ".arrow": "Arrow of the datasets library",
    ".npz": "npz",
    ".rec": "MXNet RecordIO",
    ".zip": "zip",
}
# several such files may be one data set
_WHOLE_FOLDERS = (
    "TFRecord",
    "zip",
    "Arrow of the datasets library",
)
_NAMED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def open_source(address: str | Path, asked: Asked = Asked()) -> Source | None:  # noqa: B008  it cannot change
    """Open the source at an address; None if there is none, as it is a store, or nothing.

    Args:
        address: a path, a URI or `module:name`.
        asked: the columns that become `image` and `label`.

    Raises:
        StoreError: it is damaged, or of a kind or with columns that are not read.
        ConfigError: a library is missing, or the address has credentials.
    """
    refuse_credentials(address)
    text = _plain(str(address))
    kind = kind_at(text)
    if not kind:
        return None
    name = _SOURCES[kind]
    module = import_module(f"raypipe.stores.sources.{name}")
    make: Callable[..., Source] = getattr(module, f"open_{name}")
    return make(text, asked)


def kind_at(address: str, names: Collection[str] | None = None) -> str:
    """Return the kind of source at an address; empty if there is none.

    Args:
        names: the files in the folder, if it is one and they are known.
    """
    if _is_named(address):
        return "samples of a function"
    name = split_address(address)[1]
    is_folder = names is not None or (not is_remote(address) and Path(address).is_dir())
    if not is_folder and (kind := _kind_of_name(name)):
        return kind
    if "*" in name or expand(address) != [address]:
        with contextlib.suppress(StoreError):  # the store says that there is nothing
            return _kind_of_name(
                split_address(list_files(address, lambda _: True, "such")[0].address)[1]
            )
        return ""
    if names is None:
        with contextlib.suppress(StoreError):
            names = names_at(address)
    return _kind_of_folder(address, names) if names else ""


def _kind_of_name(name: str) -> str:
    suffix = Path(name).suffix.lower()
    return _ENDS.get(suffix) or ("TFRecord" if is_tfrecord(name) else "")


def _kind_of_folder(address: str, names: Collection[str]) -> str:
    """Return the kind of a folder, by its index or its files; with class folders in it, it is a store."""
    if "dataset_dict.json" in names or any(name.endswith(".arrow") for name in names):
        return "Arrow of the datasets library"
    if INDEX in names:
        index = index_at(address)
        if (
            isinstance(index, dict)
            and "shards" in index
            and any(".mds" in name for name in names)
        ):
            return "MosaicML's MDS"
        if isinstance(index, dict) and "chunks" in index:
            return "LitData"
    kinds = {_kind_of_name(name) for name in names} & set(_WHOLE_FOLDERS)
    if len(kinds) == 1 and not folders_at(address):
        return kinds.pop()
    return ""


def _is_named(address: str) -> bool:
    """Return whether an address is `module:name`."""
    is_name = not is_remote(address) and _NAMED.fullmatch(address) is not None
    return is_name and not Path(address).exists()


def _plain(address: str) -> str:
    """Return a local path as an absolute one, without file:// or ~."""
    if is_remote(address) or _is_named(address):
        return address
    if address.startswith("file://"):
        return unquote(urlsplit(address).path)
    return str(Path(address).expanduser().absolute())
