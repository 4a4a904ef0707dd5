"""Stores: indexed, read-only collections of encoded samples, and the writers that make them.

`open_store` detects the kind of store at an address. The module of a store, and its library, is imported when the
first such store is opened; every other public name is imported when it is first used.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from difflib import get_close_matches
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from raypipe.errors import ConfigError, StoreError
from raypipe.mistakes import did_you_mean
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
# Kind → its module and class. A kind of files is also the suffix of their names, unless `_SUFFIXES` has these.
_STORES = {
    "folder": ("folder", "FolderStore"),
    "lmdb": ("lmdb", "LMDBStore"),
    "parquet": ("parquet", "ParquetStore"),
    "table": ("tables", "TableStore"),
    "tar": ("tar", "TarStore"),
}
_SUFFIXES = dict.fromkeys(("csv", "tsv", "jsonl"), "table")
# What to do where a kind of store lacks an option.
_INSTEAD = {
    "image_column": ": its images have no other name, so leave image_column out; give it to `raypipe convert`, "
    "which copies another column's images as `image`"
}
_LMDB_MAGIC = b"\xde\xc0\xef\xbe"  # at byte 16 of an LMDB file, which may have any name
_COMPRESSED_TARS = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")

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

_LAYOUTS = """raypipe reads:
  LMDB     raypipe's, and those of other programs: a file, a folder with data.mdb, or a folder of them
  Parquet  a *.parquet file, or a folder of them
  tar      a *.tar of class/image.jpg, or WebDataset's pairs key.jpg, key.cls; a folder of *.tar; also *.tar.gz
  folder   a folder of class/image.jpg
  table    a *.csv, *.tsv or *.jsonl that names image files and their labels
Several files are NAME-*.parquet or NAME-{0000..0099}.tar. All may also be at s3://, gs://, az://,
abfs:// or hdfs://. `raypipe convert` makes a store of TFRecord, HDF5, MXNet .rec, zip, .npz, .pt, MDS, LitData and
Arrow (save_to_disk), and of the samples of a Python function, MODULE:NAME"""


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

    refuse_credentials(address)
    text = str(address)
    if text.startswith("file://"):
        text = unquote(urlsplit(text).path)
    elif text.startswith("~/"):  # a shell expands it, YAML and Python do not
        text = str(Path(text).expanduser())
    kind = _kind_of(text)
    module, name = _STORES[kind]
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


def _near(missing: Path) -> str:
    """Return the end of an error about a missing file: similar names in its folder."""
    with contextlib.suppress(OSError):
        if close := get_close_matches(
            missing.name, [path.name for path in missing.parent.iterdir()]
        ):
            return did_you_mean(str(missing.parent / name) for name in close)
    return ""


def _kind_of(address: str) -> str:
    """Return the kind of a path or URI, by its name, by a folder's content, or by a pattern's first file."""
    from raypipe.storage.filesystem import is_remote, split_address
    from raypipe.stores.addresses import expand, folders_matching, list_files, names_at

    name = split_address(address)[1].lower()
    if is_remote(address) and _kind_of_name(name):
        return _kind_of_name(name)
    if folders := folders_matching(address):
        return _kind_of(folders[0])
    names = names_at(address)
    if names is not None:
        return _kind_of_folder(address, names)
    if not _kind_of_name(name):
        _refuse_source(address)
    if not is_remote(address) and not Path(address).exists():
        if "*" not in name and expand(address) == [address]:
            raise StoreError(f"{address} does not exist{_near(Path(address))}")
        # The store checks that the other files have this kind too.
        return _kind_of(list_files(address, lambda _: True, "such")[0].address)
    if not is_remote(address) and (kind := _kind_of_name(name)):
        return kind
    if not is_remote(address) and _has_lmdb_magic(address):
        return "lmdb"
    if ".tar." in name:
        raise StoreError(
            f"{address}: of compressed tars, raypipe reads .tar.gz, .tar.bz2 and .tar.xz"
        )
    raise StoreError(f"{address} is not a store; {_LAYOUTS}")


def _kind_of_name(name: str) -> str:
    """Return the kind of a file by its name; empty if the suffix is unknown."""
    if name == "data.mdb":
        return "lmdb"
    if name.endswith(_COMPRESSED_TARS):
        return "tar"
    _, mark, suffix = name.rpartition(".")
    kind = _SUFFIXES.get(suffix, suffix)
    is_of_files = kind in _STORES and suffix not in ("folder", "table")
    return kind if mark and is_of_files else ""


def _has_lmdb_magic(address: str) -> bool:
    from raypipe.storage.local_file import OpenFile

    with contextlib.suppress(OSError):
        file = OpenFile(address)
        return os.pread(file.descriptor, 4, 16) == _LMDB_MAGIC
    return False


def _are_lmdbs(address: str, folders: Collection[str]) -> bool:
    """Return whether the folders in a folder are LMDBs, by the first one, to which their names may lead."""
    from raypipe.storage.filesystem import is_remote, join_address
    from raypipe.stores.addresses import names_at

    first = min(folders, default="")
    likely = first.endswith("lmdb") or (bool(first) and not is_remote(address))
    return likely and "data.mdb" in (names_at(join_address(address, first)) or ())


def _refuse_source(address: str, names: set[str] | None = None) -> None:
    """Raise StoreError if an address is a source, with the command that makes a store of it."""
    from raypipe.stores.sources import kind_at

    if kind := kind_at(address, names):
        raise StoreError(
            f"{address} is {kind}, which is read once, in order: `raypipe convert {address} train.lmdb` makes a "
            "store of it"
        )


def _are_alike(names: Collection[str]) -> bool:
    """Return whether each Parquet file has a tar of its name, which it describes, as those of img2dataset."""
    tables = (name for name in names if name.endswith(".parquet"))
    return all(f"{name.removesuffix('.parquet')}.tar" in names for name in tables)


def _kind_of_folder(address: str, names: set[str]) -> str:
    from raypipe.stores.addresses import folders_at
    from raypipe.stores.base import IMAGE_SUFFIXES
    from raypipe.stores.class_folders import suffix_of

    suffixes = {Path(name).suffix[1:] for name in names}
    kinds = sorted(suffixes & {"lmdb", "parquet", "tar"})
    if kinds == ["parquet", "tar"] and _are_alike(names):
        return "tar"
    if len(kinds) > 1:
        both = " and ".join(f"*.{kind}" for kind in kinds)
        raise StoreError(
            f"{address} has both {both} files; give the address of one kind, such as "
            f"{address.rstrip('/')}/*.{kinds[-1]}, in quotes"
        )
    if "lmdb" in suffixes or "data.mdb" in names:
        return "lmdb"
    if "parquet" in suffixes:
        return "parquet"
    _refuse_source(address, names)
    folders = folders_at(address)
    if _are_lmdbs(address, folders):
        return "lmdb"
    if any(not name.startswith("_") for name in folders):
        return "folder"
    if "tar" in suffixes or any(
        name.lower().endswith(_COMPRESSED_TARS) for name in names
    ):
        return "tar"
    if folders or any(suffix_of(name) in IMAGE_SUFFIXES for name in names):
        return "folder"
    raise StoreError(f"{address} contains no store; {_LAYOUTS}")
