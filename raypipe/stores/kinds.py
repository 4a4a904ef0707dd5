"""The kind of store or source at an address: by its name, by a folder's files, or by a pattern's first file."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path
from urllib.parse import unquote, urlsplit

from raypipe.errors import StoreError
from raypipe.mistakes import did_you_mean
from raypipe.storage.filesystem import is_remote, join_address, split_address
from raypipe.storage.local_file import OpenFile
from raypipe.stores.addresses import (
    expand,
    folders_at,
    folders_matching,
    list_files,
    names_at,
)
from raypipe.stores.base import IMAGE_SUFFIXES
from raypipe.stores.class_folders import suffix_of
from raypipe.stores.sources.format_source import INDEX, index_at
from raypipe.stores.sources.tfrecord import is_tfrecord

_ARROW = "Arrow of the datasets library"
STORES = {
    "folder": ("folder", "FolderStore"),
    "lmdb": ("lmdb", "LMDBStore"),
    "parquet": ("parquet", "ParquetStore"),
    "table": ("tables", "TableStore"),
    "tar": ("tar", "TarStore"),
}
"""Kind → its module and class."""
SOURCES = {
    "TFRecord": "tfrecord",
    "HDF5": "hdf5",
    "MXNet RecordIO": "recordio",
    "zip": "zips",
    _ARROW: "arrow",
    "MosaicML's MDS": "mds",
    "LitData": "litdata",
    "tensors": "tensors",
    "npz": "npz",
    "samples of a function": "user",
}
"""Kind → its module in `sources`, which has open_MODULE."""
_SUFFIXES = {
    **{kind: kind for kind in ("lmdb", "parquet", "tar", "npz", "zip")},
    **dict.fromkeys(("csv", "tsv", "jsonl"), "table"),
    **dict.fromkeys(("h5", "hdf5", "hdf"), "HDF5"),
    **dict.fromkeys(("pt", "pth"), "tensors"),
    "arrow": _ARROW,
    "rec": "MXNet RecordIO",
}
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
"""Ends of names of compressed tars."""
# several such files may be one data set
_WHOLE_FOLDERS = {"TFRecord", "zip", _ARROW}
_NAMED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_LMDB_MAGIC = b"\xde\xc0\xef\xbe"  # at byte 16 of an LMDB file, which may have any name

_LAYOUTS = """raypipe reads:
  LMDB     raypipe's, and those of other programs: a file, a folder with data.mdb, or a folder of them
  Parquet  a *.parquet file, or a folder of them
  tar      a *.tar of class/image.jpg, or WebDataset's pairs key.jpg, key.cls; a folder of *.tar; also *.tar.gz
  folder   a folder of class/image.jpg
  table    a *.csv, *.tsv or *.jsonl that names image files and their labels
Several files are NAME-*.parquet or NAME-{0000..0099}.tar. All may also be at s3://, gs://, az://,
abfs:// or hdfs://. `raypipe convert` makes a store of TFRecord, HDF5, MXNet .rec, zip, .npz, .pt, MDS, LitData and
Arrow (save_to_disk), and of the samples of a Python function, MODULE:NAME"""


def full_address(address: str | Path) -> str:
    """Return a local path as an absolute one, without file:// or ~, which a shell expands and Python does not."""
    text = str(address)
    if is_remote(text) or _is_named(text):
        return text
    if text.startswith("file://"):
        return unquote(urlsplit(text).path)
    return str(Path(text).expanduser().absolute())


def kind_of(address: str) -> str:
    """Return the kind at an address, which `full_address` returned.

    Raises:
        StoreError: there is nothing, or nothing of a known kind.
    """
    name = split_address(address)[1]
    is_local = not is_remote(address)
    if not is_local and (kind := _kind_of_name(name)):
        return kind
    if folders := folders_matching(address):
        return kind_of(folders[0])
    is_there = is_local and Path(address).exists()
    if not is_there and ("*" in name or expand(address) != [address]):
        # The store checks that the other files have this kind too.
        return kind_of(list_files(address, lambda _: True, "such")[0].address)
    if _is_named(address):
        return "samples of a function"
    if (names := names_at(address)) is not None:
        return _kind_of_folder(address, names)
    if is_local and not is_there:
        raise StoreError(f"{address} does not exist{_near(Path(address))}")
    if kind := _kind_of_name(name):
        return kind
    if is_local and _has_lmdb_magic(address):
        return "lmdb"
    if ".tar." in name:
        raise StoreError(
            f"{address}: of compressed tars, raypipe reads .tar.gz, .tar.bz2 and .tar.xz"
        )
    raise StoreError(f"{address} is not a store; {_LAYOUTS}")


def _is_named(address: str) -> bool:
    """Return whether an address is `module:name`."""
    is_name = not is_remote(address) and _NAMED.fullmatch(address) is not None
    return is_name and not Path(address).exists()


def _near(missing: Path) -> str:
    """Return the end of an error about a missing file: similar names in its folder."""
    with contextlib.suppress(OSError):
        if close := get_close_matches(
            missing.name, [path.name for path in missing.parent.iterdir()]
        ):
            return did_you_mean(str(missing.parent / name) for name in close)
    return ""


def _kind_of_name(name: str) -> str:
    """Return the kind of a file by its name; empty if the suffix is unknown."""
    lower = name.lower()
    if lower == "data.mdb":
        return "lmdb"
    if lower.endswith(COMPRESSED):
        return "tar"
    kind = _SUFFIXES.get(suffix_of(name)[1:], "")
    return kind or ("TFRecord" if is_tfrecord(name) else "")


def _has_lmdb_magic(address: str) -> bool:
    with contextlib.suppress(OSError):
        file = OpenFile(address)
        return os.pread(file.descriptor, 4, 16) == _LMDB_MAGIC
    return False


def _are_lmdbs(address: str, folders: Collection[str]) -> bool:
    """Return whether the folders in a folder are LMDBs, by the first one, to which their names may lead."""
    first = min(folders, default="")
    likely = first.endswith("lmdb") or (bool(first) and not is_remote(address))
    return likely and "data.mdb" in (names_at(join_address(address, first)) or ())


def _are_alike(names: Collection[str]) -> bool:
    """Return whether each Parquet file has a tar of its name, which it describes, as those of img2dataset."""
    tables = (name for name in names if name.endswith(".parquet"))
    return all(f"{name.removesuffix('.parquet')}.tar" in names for name in tables)


def _kind_of_folder(address: str, names: Collection[str]) -> str:
    """Return the kind of a folder, by its files: a store if it has folders, for these may be classes."""
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
    folders = folders_at(address)
    if source := _source_in(address, names, folders):
        return source
    if _are_lmdbs(address, folders):
        return "lmdb"
    if any(not name.startswith("_") for name in folders):
        return "folder"
    if "tar" in suffixes or any(name.lower().endswith(COMPRESSED) for name in names):
        return "tar"
    if folders or any(suffix_of(name) in IMAGE_SUFFIXES for name in names):
        return "folder"
    raise StoreError(f"{address} contains no store; {_LAYOUTS}")


def _source_in(address: str, names: Collection[str], folders: Collection[str]) -> str:
    """Return the kind of source in a folder, by its index or its files; empty if there is none."""
    if "dataset_dict.json" in names or any(name.endswith(".arrow") for name in names):
        return _ARROW
    index = index_at(address) if INDEX in names else None
    if isinstance(index, dict):
        if "shards" in index and any(".mds" in name for name in names):
            return "MosaicML's MDS"
        if "chunks" in index:
            return "LitData"
    kinds = set(map(_kind_of_name, names)) & _WHOLE_FOLDERS
    return kinds.pop() if len(kinds) == 1 and not folders else ""
