"""Stores of Arrow files, as Hugging Face's datasets library caches them and as `save_to_disk` writes them.

    state.json           {"_data_files": [{"filename": "data-00000-of-00002.arrow"}, …]}: the order; optional
    dataset_info.json    not read: it repeats the schemas of the files
    data-….arrow         a stream of batches of rows, with the values laid out as in memory

The files are mapped into memory, so a read touches only the rows that it needs.
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
    """A store in local Arrow files with one schema.

    Null images, and images that are only paths to other files, are None; null labels raise StoreError. The
    fingerprint is a hash over columns, class names, the size of each file and the rows of each batch. It does not
    cover the data. A batch is checked when it is first read; compressed files are rejected.

    Args:
        address: path of a file, or of a folder of files.
        image_column: the column that becomes `image`: binary, or a struct with the field `bytes`.
        target_column: the column of numbers, or of lists of numbers, that becomes `label`; integers are classes.
            The store has no labels if its files lack `label`; a column of any other name must exist.
    """

    def __init__(self, address: str | Path, image_column: str = "image", target_column: str = "label") -> None:
        super().__init__(address, image_column, target_column)

    def _open(self) -> _Batches:
        if is_remote(self.address):
            raise StoreError(f"{self.address}: Arrow files can only be read from a local disk: copy them there")
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
        # The file of each batch, and the number of the batch in it.
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
        """Return columns of a batch, after a check that none of its offsets points outside."""
        path, within = self._places[number]
        batch = self._batches[number]
        if not self._checked[number]:
            try:
                batch.validate(full=True)
            except (pa.ArrowException, OSError) as error:
                raise StoreError(
                    f"{path}, batch {within}: damaged: {one_line(error)}; copy the file again"
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
        """Raise StoreError if all images of a batch are only paths to other files."""
        field = self.fields["image"]
        if self.is_hf_image("image") and field.type.get_field_index("path") >= 0:
            images = batch.column(field.name)
            contents, paths = (pc.struct_field(images, name) for name in ("bytes", "path"))
            if contents.null_count == len(contents) > paths.null_count:
                raise StoreError(
                    f"{path} has only the paths of images: write them with "
                    "dataset.to_parquet('train.parquet'), which includes the images"
                )


def _files(address: str) -> list[str]:
    """Return the files of a store, in order."""
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
            raise StoreError(f"{state} names {name!r}, which cannot be a file in this folder")
    if not names:
        raise StoreError(f"{state} names no files")
    return [str(Path(address, name)) for name in names]


def _read_batches(path: str) -> tuple[pa.Schema, list[pa.RecordBatch], int]:
    """Return the schema, the batches, not yet checked, and the size of a file."""
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
                    raise OSError("it has no end mark, so it is truncated or not Arrow; copy it again")
                source = pa.ipc.open_stream(content)
                batches = list(source)
            _ = source.schema.names  # names that are not UTF-8 raise only when they are used
        except (ValueError, TypeError, KeyError) as error:  # the schema is damaged
            raise OSError(f"{error}; copy it again") from error
    buffers = (buffer for batch in batches for column in batch.columns for buffer in column.buffers())
    ends = content.address, content.address + content.size
    if not all(ends[0] <= buffer.address <= ends[1] for buffer in buffers if buffer is not None and buffer.size):
        raise StoreError(f"{path} is compressed, which allows no random access: write it as Parquet")
    return source.schema, batches, content.size
