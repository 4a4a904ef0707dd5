"""Stores of Arrow files, as Hugging Face's datasets library caches them and as `save_to_disk` writes them.

    state.json           {"_data_files": [{"filename": "data-00000-of-00002.arrow"}, …]}: their order; optional
    dataset_info.json    what the schemas of the files say too
    data-….arrow         a stream of batches of rows, whose values lie in the file as they do in memory

The files are mapped into memory: a read touches the rows that it needs and nothing else.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypipe.errors import ConfigError, StoreError
from raypipe.storage.files import read_json
from raypipe.storage.filesystem import explained, is_remote
from raypipe.storage.local_file import regular_path
from raypipe.storage.patience import one_line
from raypipe.stores.addresses import list_files
from raypipe.stores.arrow_columns import StoredColumn, TableParts
from raypipe.stores.base import FileStore, hash_of_facts, part_of

_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
_FILE_MAGIC = b"ARROW1"


class ArrowStore(FileStore["_Batches"]):
    """A store in local Arrow files that all have one schema.

    Null images are None, as are those that are paths to files elsewhere; null labels raise StoreError. The
    fingerprint is a hash over columns, class names, and the rows of each batch with the size of its file. It does
    not cover the data. Batches are checked when they are first read; compressed ones are refused.

    Args:
        address: path of a file, or of a folder of them.
        image_column: the column that becomes `image`: binary, or a struct with the field `bytes`.
        target_column: the column of numbers, or of lists of them, that becomes `label`; integers are classes. A
            file without a column `label` is a store without labels; any other name must be there.
    """

    def __init__(self, address: str | Path, image_column: str = "image", target_column: str = "label") -> None:
        super().__init__(address, image_column, target_column)

    def _open(self) -> _Batches:
        if is_remote(self.address):
            raise StoreError(
                f"{self.address} is in Arrow files, which are read from a disk only: copy them to one"
            )
        return _Batches(self.address, *self._options)


class _Batches(TableParts):
    """The batches of all files, as one sequence."""

    groups = None

    def __init__(self, address: str, image_column: str, target_column: str) -> None:
        paths = _files(address)
        files = [_read_batches(path) for path in paths]
        schemas = [(path, schema) for path, (schema, _, _) in zip(paths, files, strict=True)]
        super().__init__(schemas, image_column, target_column)
        self._batches = [batch for _, batches, _ in files for batch in batches]
        # Of each batch: its file, and its number in it.
        self._places = [
            (p, n) for p, (_, batches, _) in zip(paths, files, strict=True) for n in range(len(batches))
        ]
        self.bounds = np.cumsum([0, *(batch.num_rows for batch in self._batches)], dtype=np.int64)
        self._checked = [False] * len(self._batches)
        self._opened: list[dict[str, StoredColumn]] = [{} for _ in self._batches]
        sizes = [(num_bytes, [batch.num_rows for batch in batches]) for _, batches, num_bytes in files]
        facts = ([(name, str(field)) for name, field in self.fields.items()], self.classes, sizes)
        self.fingerprint = hash_of_facts(facts)

    def sample_name(self, index: int) -> str:
        number, row = part_of(self.bounds, index)
        path, within = self._places[number]
        return f"{path}, batch {within}, row {row}"

    def _part(self, number: int, names: tuple[str, ...]) -> dict[str, StoredColumn]:
        """Columns of a batch, in which nothing points outside of it."""
        path, within = self._places[number]
        batch = self._batches[number]
        if not self._checked[number]:
            try:
                batch.validate(full=True)
            except (pa.ArrowException, OSError) as error:
                raise StoreError(
                    f"{path}, batch {within}, is damaged: {one_line(error)}; copy it again"
                ) from error
            self._checked[number] = True
            self._check_embedded(batch, path)
        opened = self._opened[number]
        for name in names:
            if name not in opened:
                column = pa.chunked_array([batch.column(self.fields[name].name)])
                opened[name] = self.opened(name, column, path)
        return opened

    def _check_embedded(self, batch: pa.RecordBatch, path: str) -> None:
        """Raise StoreError where all images of a batch are paths to files that are elsewhere."""
        field = self.fields["image"]
        if self.is_hf_image("image") and field.type.get_field_index("path") >= 0:
            images = batch.column(field.name)
            contents, paths = (pc.struct_field(images, name) for name in ("bytes", "path"))
            if contents.null_count == len(contents) > paths.null_count:
                raise StoreError(
                    f"{path} holds the paths of images, and not the images: write it by "
                    "dataset.to_parquet('train.parquet'), which holds them too"
                )


def _files(address: str) -> list[str]:
    """The files of a store, in their order."""
    state = Path(address, "state.json")
    if not state.exists():
        return [file.address for file in list_files(address, lambda name: name.endswith(".arrow"), "*.arrow")]
    try:
        names = [file["filename"] for file in read_json(state)["_data_files"]]
    except (ConfigError, LookupError, TypeError) as error:
        raise StoreError(
            f"{state} cannot be understood: {type(error).__name__}: {error}; copy it again"
        ) from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
            raise StoreError(f"{state} names the file {name!r}, which is none in this folder")
    if not names:
        raise StoreError(f"{state} names no files")
    return [str(Path(address, name)) for name in names]


def _read_batches(path: str) -> tuple[pa.Schema, list[pa.RecordBatch], int]:
    """The schema and the batches of a file, and its size; the batches are not checked yet."""
    with explained(StoreError, f"{path} cannot be read as Arrow"):
        with regular_path(path) as opened:
            mapped = pa.memory_map(opened)
        content = mapped.read_buffer()
        try:
            if content[: len(_FILE_MAGIC)].to_pybytes() == _FILE_MAGIC:
                source = pa.ipc.open_file(content)
                batches = [source.get_batch(number) for number in range(source.num_record_batches)]
            else:
                if content[-len(_STREAM_END) :].to_pybytes() != _STREAM_END:
                    raise OSError("it has no end mark, so it is truncated, or no Arrow; copy it again")
                source = pa.ipc.open_stream(content)
                batches = list(source)
            _ = source.schema.names  # what is no UTF-8 shows only when it is asked for
        except (ValueError, TypeError, KeyError) as error:  # of a damaged schema
            raise OSError(f"{error}; copy it again") from error
    buffers = (buffer for batch in batches for column in batch.columns for buffer in column.buffers())
    ends = content.address, content.address + content.size
    if not all(ends[0] <= buffer.address <= ends[1] for buffer in buffers if buffer is not None and buffer.size):
        raise StoreError(f"{path} is compressed, which allows no random access: write it as Parquet")
    return source.schema, batches, content.size
