"""Stores: indexed, read-only collections of encoded samples, and the writers that make them.

`open_store` finds out which store an address is. A store's module, and the library behind it, is
imported when the first such store is opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from raypipe.errors import StoreError
from raypipe.stores.base import Store, StoreWriter

__all__ = ["Store", "StoreWriter", "open_store", "open_writer"]

_LAYOUTS = """understood are:
  LMDB     a *.lmdb file, an environment folder (with data.mdb), or a folder of *.lmdb shards
  Parquet  a *.parquet file, a folder of *.parquet files, or a URI of either (s3://, gs://, ...)
  tar      an uncompressed *.tar of class/image.jpg
  folder   a folder of class/image.jpg"""


def open_store(address: str | Path, **options: Any) -> Store:
    """Return the store at an address, by the address's suffix or by what is in the folder.

    Nothing is read yet but the folder's listing: a broken store raises when it is first used.

    Args:
        address: a local path, or a URI.
        options: arguments of the store's class, such as `image_column` of `ParquetStore`.

    Raises:
        StoreError: there is nothing at the address, or nothing that is understood.
    """
    local = _local_path(address)
    kind = _kind_of_uri(str(address)) if local is None else _kind_of_path(local)
    where = str(address) if local is None else local
    if kind == "lmdb":
        from raypipe.stores.lmdb import LMDBStore

        return LMDBStore(where, **options)
    if kind == "parquet":
        from raypipe.stores.parquet import ParquetStore

        return ParquetStore(where, **options)
    if kind == "tar":
        from raypipe.stores.tar import TarStore

        return TarStore(where, **options)
    from raypipe.stores.folder import FolderStore

    return FolderStore(where, **options)


def open_writer(
    path: str | Path,
    columns: Mapping[str, str] | None = None,
    classes: Sequence[str] | None = None,
    **options: Any,
) -> StoreWriter:
    """Return the writer, not yet entered, for a new file: `.lmdb` or `.parquet`.

    Args:
        path: the file to make.
        columns: all columns, name → int64, float64, binary or string; None for `image` and `label`.
        classes: class names, position = label.
        options: further arguments of the writer's class.
    """
    suffix = Path(path).suffix
    if suffix == ".lmdb":
        from raypipe.stores.lmdb import LMDBWriter

        return LMDBWriter(path, columns, classes, **options)
    if suffix == ".parquet":
        from raypipe.stores.parquet import ParquetWriter

        return ParquetWriter(path, columns, classes, **options)
    raise StoreError(f"{path} cannot be written: the suffix must be .lmdb or .parquet")


def _local_path(address: str | Path) -> Path | None:
    """Return the path that an address means, or None for a URI of another file system."""
    text = str(address)
    if text.startswith("file://"):
        return Path(unquote(urlsplit(text).path))
    return None if "://" in text else Path(text)


def _kind_of_uri(address: str) -> str:
    if address.endswith((".lmdb", ".tar")):
        raise StoreError(f"{address} is remote, which only Parquet can be; copy it to a local disk first")
    return "parquet"


def _kind_of_path(path: Path) -> str:
    if not path.exists():
        raise StoreError(f"{path} does not exist; {_LAYOUTS}")
    name = path.name.lower()
    if path.is_dir():
        return _kind_of_folder(path)
    if name.endswith(".lmdb") or name == "data.mdb":
        return "lmdb"
    if name.endswith(".parquet"):
        return "parquet"
    if name.endswith(".tar"):
        return "tar"
    if ".tar." in name or name.endswith((".tgz", ".tbz2", ".txz")):
        raise StoreError(f"{path} is compressed, which allows no random access: uncompress it to *.tar first")
    raise StoreError(f"{path} is no store; {_LAYOUTS}")


def _kind_of_folder(path: Path) -> str:
    if (path / "data.mdb").exists():
        return "lmdb"
    children = [child for child in path.iterdir() if not child.name.startswith((".", "_"))]
    kinds = {child.suffix[1:] for child in children} & {"lmdb", "parquet"}
    if len(kinds) == 2:
        raise StoreError(f"{path} holds both *.lmdb and *.parquet files; give the address of one kind")
    if kinds:
        return kinds.pop()
    if any(child.is_dir() for child in children):
        return "folder"
    raise StoreError(f"{path} holds no store; {_LAYOUTS}")
