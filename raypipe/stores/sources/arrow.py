"""Arrow files of Hugging Face's datasets library: a folder that `save_to_disk` wrote, or its cache.

state.json           {"_data_files": [{"filename": "data-00000-of-00002.arrow"}, …]}: their order; optional
data-….arrow         a stream of batches of rows
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from raypipe.errors import StoreError
from raypipe.storage.files import open_input, read_json
from raypipe.storage.filesystem import is_remote, join_address, open_filesystem
from raypipe.storage.local_file import regular_path
from raypipe.stores.addresses import folders_at, list_files, names_at
from raypipe.stores.arrow_columns import TableColumns, chunked_taker
from raypipe.stores.arrow_messages import check_batches
from raypipe.stores.base import Columns, ColumnValues
from raypipe.stores.sources.format_source import Asked, Source, explained

_FILE_MAGIC = b"ARROW1"
_STATE = "state.json"


def open_arrow(address: str, asked: Asked) -> Source:
    """Open the Arrow files of one split; class names are those of its ClassLabel."""
    names = names_at(address) or ()
    if "dataset_dict.json" in names:
        splits = sorted(folders_at(address))
        raise StoreError(
            f"{address} has the splits {', '.join(splits):.200}. A store is one split: choose it, such as "
            f"{join_address(address, splits[0] if splits else 'train')}"
        )
    if _STATE in names:
        where = join_address(address, _STATE)
        with explained(where):
            files = [str(file["filename"]) for file in read_json(where)["_data_files"]]
            if any("/" in name for name in files):
                raise StoreError(
                    f"{address}: state.json names {files[0]!r}, which is not a file in this folder"
                )
        paths = [join_address(address, name) for name in files]
    else:
        paths = [
            file.address
            for file in list_files(
                address, lambda name: name.endswith(".arrow"), "*.arrow"
            )
        ]
    if not paths:
        raise StoreError(f"{address} has no rows: its state.json names no files")
    schemas = []
    for path in paths:
        with _reader(path) as reader:
            schemas.append((path, reader.schema))
    columns = TableColumns(schemas, asked.image, asked.label)
    return Source(_samples(paths, columns), columns.classes)


def _samples(paths: list[str], columns: TableColumns) -> Iterator[ColumnValues]:
    for path in paths:
        with _reader(path) as reader, _file(path) as file:
            checks = check_batches(path, file)
            while (batch := _next(reader, checks)) is not None:
                rows = np.arange(batch.num_rows)
                opened = {
                    name: columns.opened(
                        name, pa.chunked_array([batch.column(field.name)])
                    )
                    for name, field in columns.fields.items()
                }
                images = chunked_taker(opened.pop("image"))(rows)
                table = columns.table_of(pa.table(opened), lambda _: path)  # noqa: B023  called at once
                values = Columns(images, table)
                _check_embedded(path, batch, columns)
                yield from values.samples()


def _next(reader: Any, checks: Iterator[None]) -> pa.RecordBatch | None:
    next(checks, None)
    try:
        batch = reader.read_next_batch()
    except StopIteration:
        return None
    batch.validate(full=True)  # nothing in it may point outside of it
    return batch


@contextlib.contextmanager
def _reader(path: str) -> Iterator[Any]:
    """Context manager: a reader of a file's batches."""
    with _file(path) as file:
        if file.read(len(_FILE_MAGIC)) == _FILE_MAGIC:
            raise StoreError(
                f"{path} is an Arrow file with a footer, not a stream, as the datasets library writes it"
            )
        file.seek(0)
        with pa.ipc.open_stream(file) as reader:
            yield reader


@contextlib.contextmanager
def _file(path: str) -> Iterator[Any]:
    """Context manager: an open file; a local one is mapped into memory. Errors in its block are explained."""
    with explained(path):
        if is_remote(path):
            with open_input(*open_filesystem(path)) as file:
                yield file
        else:
            with regular_path(path) as checked, pa.memory_map(checked) as file:
                yield file


def _check_embedded(path: str, batch: pa.RecordBatch, columns: TableColumns) -> None:
    """Raise StoreError if the images of a batch are paths to files elsewhere, as in a cache."""
    field = columns.fields["image"]
    if not pa.types.is_struct(field.type) or field.type.get_field_index("path") < 0:
        return
    images = batch.column(field.name)
    if (
        images.field("bytes").null_count
        == len(images)
        > images.field("path").null_count
    ):
        raise StoreError(
            f"{path} has the paths of images and not the images: dataset.save_to_disk(FOLDER) writes them too"
        )
