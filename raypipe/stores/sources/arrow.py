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
from raypipe.storage.files import read_json
from raypipe.storage.filesystem import join_address
from raypipe.stores.addresses import folders_at, list_files, names_at
from raypipe.stores.arrow_columns import TableColumns, chunked_taker
from raypipe.stores.arrow_messages import check_batches
from raypipe.stores.base import Columns, ColumnValues
from raypipe.stores.sources.format_source import Asked, Source, explained, opened

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
        with _reader(path) as reader, opened(path) as file:
            for _, batch in zip(check_batches(path, file), reader, strict=True):
                batch.validate(full=True)  # nothing in it may point outside of it
                stored = pa.Table.from_batches([batch])
                chosen = {
                    name: columns.opened(name, stored[field.name])
                    for name, field in columns.fields.items()
                }
                images = chunked_taker(chosen.pop("image"))(np.arange(len(stored)))
                table = columns.table_of(pa.table(chosen), lambda _: path)  # noqa: B023  called at once
                _check_embedded(path, batch, columns)
                yield from Columns(images, table).samples()


@contextlib.contextmanager
def _reader(path: str) -> Iterator[Any]:
    """Context manager: a reader of a file's batches. Errors in its block are explained."""
    with opened(path) as file:
        if file.peek(len(_FILE_MAGIC)).startswith(_FILE_MAGIC):
            raise StoreError(
                f"{path} is an Arrow file with a footer, not a stream, as the datasets library writes it"
            )
        with pa.ipc.open_stream(file) as reader:
            yield reader


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
