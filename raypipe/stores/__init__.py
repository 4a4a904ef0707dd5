"""Stores: indexed, read-only collections of encoded samples, and the writers that make them.

`open_store` finds out which store an address is. A store's module, and the library behind it, is
imported when the first such store is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from raypipe.errors import ConfigError, StoreError
from raypipe.stores.base import Store, StoreWriter

__all__ = ["WRITTEN_SUFFIXES", "Store", "StoreWriter", "open_store", "open_writer", "store_options"]

WRITTEN_SUFFIXES = (".lmdb", ".parquet", ".tar")
"""Of the files that `open_writer` makes."""

_LAYOUTS = """understood are:
  LMDB     a *.lmdb file, an environment folder (with data.mdb), or a folder of *.lmdb shards
  Parquet  a *.parquet file, or a folder of them
  tar      an uncompressed *.tar of class/image.jpg, or of WebDataset's key.jpg beside key.cls; a folder of *.tar
  zip      a *.zip of class/image.jpg
  folder   a folder of class/image.jpg
  TFRecord *.tfrecord or NAME-00000-of-01024, or a folder of them
  HDF5     a *.h5 or *.hdf5 file
several files, but of HDF5, as NAME-*.parquet or NAME-{0000..0099}.tar; and the first four at s3://, gs://, az://
or abfs:// too"""

_FROM_ARROW = (
    "as the datasets library caches them, which raypipe does not read: write it as Parquet, "
    "load_dataset(…) or load_from_disk(…), then ['train'].to_parquet('train.parquet')"
)


def open_store(address: str | Path, **options: Any) -> Store:
    """Return the store at an address, by the address's suffix or by what is in the folder.

    Nothing is read yet but a folder's listing: a broken store raises when it is first used.

    Args:
        address: a local path, or a URI.
        options: arguments of the store's class, such as `image_column` of `ParquetStore`, `layout` of `LMDBStore`.

    Raises:
        StoreError: there is nothing at the address, or nothing that is understood.
        ConfigError: the store has no such option, or the address holds credentials.
    """
    from raypipe.storage.filesystem import refuse_credentials

    refuse_credentials(address)
    local = _local_path(address)
    kind = _kind_of_uri(str(address)) if local is None else _kind_of_path(local)
    where = str(address) if local is None else local
    store_class = _class_of(kind)
    known = list(signature(store_class).parameters)
    for name in options:
        if name not in known:
            raise ConfigError(
                f"{where} is {kind}, which has no option {name!r}, as {options[name]!r} was given for"
            )
    return store_class(where, **options)


def store_options(
    image_column: str = "image", label_column: str = "label", layout: str = "auto"
) -> dict[str, str]:
    """The options that are not left as they are by default, for `open_store`: not every kind of store has them.

    Args:
        image_column: name of the image column of Parquet; of WebDataset, the suffix of the images; of TFRecord,
            the feature; of HDF5, the dataset.
        label_column: likewise; of WebDataset the suffix of the labels, or their field in the JSON.
        layout: of LMDB that raypipe did not write: auto, image, scene-text, pickle or module:function.
    """
    given = {"image_column": image_column, "label_column": label_column, "layout": layout}
    usual = {"image_column": "image", "label_column": "label", "layout": "auto"}
    return {name: value for name, value in given.items() if value != usual[name]}


def _class_of(kind: str) -> Callable[..., Store]:
    if kind == "lmdb":
        from raypipe.stores.lmdb import LMDBStore

        return LMDBStore
    if kind == "parquet":
        from raypipe.stores.parquet import ParquetStore

        return ParquetStore
    if kind == "tar":
        from raypipe.stores.tar import TarStore

        return TarStore
    if kind == "zip":
        from raypipe.stores.zip import ZipStore

        return ZipStore
    if kind == "tfrecord":
        from raypipe.stores.tfrecord import TFRecordStore

        return TFRecordStore
    if kind == "hdf5":
        from raypipe.stores.hdf5 import HDF5Store

        return HDF5Store
    from raypipe.stores.folder import FolderStore

    return FolderStore


def open_writer(
    path: str | Path,
    columns: Mapping[str, str] | None = None,
    classes: Sequence[str] | None = None,
    **options: Any,
) -> StoreWriter:
    """Return the writer, not yet entered, for a new file: `.lmdb`, `.parquet` or `.tar`.

    Args:
        path: the file to make.
        columns: all columns, name → int64, float64, binary or string; None for `image` and `label`.
        classes: class names, position = label.
        options: further arguments of the writer's class.
    """
    suffix = Path(path).suffix
    if suffix == ".lmdb":
        from raypipe.stores.lmdb_shard import LMDBWriter

        return LMDBWriter(path, columns, classes, **options)
    if suffix == ".parquet":
        from raypipe.stores.parquet_files import ParquetWriter

        return ParquetWriter(path, columns, classes, **options)
    if suffix == ".tar":
        from raypipe.stores.tar import TarWriter

        return TarWriter(path, columns, classes, **options)
    raise StoreError(f"{path} cannot be written: the suffix must be one of {', '.join(WRITTEN_SUFFIXES)}")


def _local_path(address: str | Path) -> Path | None:
    """Return the path that an address means, or None for a URI of another file system."""
    text = str(address)
    if text.startswith("file://"):
        return Path(unquote(urlsplit(text).path))
    return None if "://" in text else Path(text)


def _kind_of_uri(address: str) -> str:
    name = address.partition("?")[0].rstrip("/").rpartition("/")[2].lower()
    for kind in ("lmdb", "parquet", "tar", "zip"):
        if name.endswith(f".{kind}"):
            return kind
    from raypipe.stores.remote import kind_of_folder

    kind = kind_of_folder(address)
    if not kind:
        raise StoreError(f"{address} is no folder of *.lmdb, *.parquet or *.tar files of one kind; {_LAYOUTS}")
    return kind


def _kind_of_path(path: Path) -> str:
    name = path.name.lower()
    if not path.exists():
        if "*" in name or "{" in name:
            return _kind_of_pattern(path)
        raise StoreError(f"{path} does not exist; {_LAYOUTS}")
    if path.is_dir():
        return _kind_of_folder(path)
    if name.endswith(".lmdb") or name == "data.mdb":
        return "lmdb"
    for kind in ("parquet", "tar", "zip"):
        if name.endswith(f".{kind}"):
            return kind
    if name.endswith((".h5", ".hdf5")):
        return "hdf5"
    if _is_tfrecord(name):
        return "tfrecord"
    if name.endswith(".arrow"):
        raise StoreError(f"{path} is Arrow, {_FROM_ARROW}")
    if ".tar." in name or name.endswith((".tgz", ".tbz2", ".txz")):
        raise StoreError(f"{path} is compressed, which allows no random access: uncompress it to *.tar first")
    raise StoreError(f"{path} is no store; {_LAYOUTS}")


def _kind_of_pattern(path: Path) -> str:
    """What the first of the files is that a pattern finds: who reads them will see whether all are."""
    from raypipe.stores.addresses import list_files

    first = Path(list_files(str(path.absolute()), lambda _: True, "such")[0])
    kind = _kind_of_path(first)
    if kind in ("folder", "hdf5"):
        raise StoreError(f"{path} finds {first.name}: a pattern is not for folders and HDF5; {_LAYOUTS}")
    return kind


def _kind_of_folder(path: Path) -> str:
    if (path / "data.mdb").exists():
        return "lmdb"
    children = [child for child in path.iterdir() if not child.name.startswith((".", "_"))]
    kinds = {child.suffix[1:] for child in children} & {"lmdb", "parquet"}
    if len(kinds) == 2:
        raise StoreError(f"{path} holds both *.lmdb and *.parquet files; give the address of one kind")
    if kinds:
        return kinds.pop()
    names = {child.name for child in children}
    if "dataset_dict.json" in names or any(name.endswith(".arrow") for name in names):
        raise StoreError(f"{path} is a data set in Arrow files, {_FROM_ARROW}")
    if any(_is_tfrecord(name) for name in names):
        return "tfrecord"
    if any(child.is_dir() for child in children):
        return "folder"
    if any(child.suffix == ".tar" for child in children):
        return "tar"
    raise StoreError(f"{path} holds no store; {_LAYOUTS}")


def _is_tfrecord(name: str) -> bool:
    from raypipe.stores.tfrecord import is_tfrecord

    return is_tfrecord(name)
