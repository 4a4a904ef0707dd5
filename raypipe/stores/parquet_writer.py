"""Writes Parquet stores in the flat layout, one new file each."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.errors import StoreError
from raypipe.stores.record import DEFAULT_COLUMNS, Fingerprint, RecordLayout

# A group is what one read costs at least: big enough for throughput, small enough to shuffle well.
GROUP_BYTES = 8 << 20

_ARROW_TYPES = {
    "int64": pa.int64(),
    "float64": pa.float64(),
    "binary": pa.binary(),
    "string": pa.string(),
}


class ParquetWriter:
    """Writes one new Parquet file in the flat layout.

    The class names go into the schema's metadata as a Hugging Face ClassLabel, and a hash of all
    samples into the footer.

    Args:
        path: the file to make; it must not exist.
        columns: all columns, name → one of `raypipe.stores.record.COLUMN_TYPES`, in order; None for
            `image` and `label` alone.
        classes: class names, position = label; None where there are none.
        row_group_size: samples per row group; None for as many as make up about 8 MiB.
    """

    def __init__(
        self,
        path: str | Path,
        columns: Mapping[str, str] | None = None,
        classes: Sequence[str] | None = None,
        row_group_size: int | None = None,
    ) -> None:
        self._path = Path(path)
        self._layout = RecordLayout(DEFAULT_COLUMNS if columns is None else columns)
        if row_group_size is not None and row_group_size < 1:
            raise ValueError(f"row_group_size must be at least 1, not {row_group_size}")
        self._row_group_size = row_group_size
        self._fingerprint = Fingerprint(self._layout.types, classes)
        self._schema = _schema(self._layout.types, classes)
        self._pending: dict[str, list[Any]] = {name: [] for name in self._layout.types}
        self._num_pending = 0
        self._pending_bytes = 0

    def __enter__(self) -> ParquetWriter:
        # Of images (JPEGs, mostly) there is nothing to compress, and statistics would repeat whole ones.
        small = [name for name in self._schema.names if name != "image"]
        try:
            self._file = self._path.open("xb")
        except OSError as error:
            raise StoreError(f"{self._path} cannot be made: {error}") from error
        self._writer = pq.ParquetWriter(
            self._file,
            self._schema,
            compression={name: "none" if name == "image" else "zstd" for name in self._schema.names},
            use_dictionary=small,
            write_statistics=small,
        )
        return self

    def append(self, sample: Mapping[str, Any]) -> None:
        """Add one sample with exactly the declared columns; None is allowed in binary and string ones."""
        record = self._layout.pack(sample)
        self._fingerprint.add(record)
        for name, value in sample.items():
            self._pending[name].append(value)
        self._num_pending += 1
        self._pending_bytes += len(record)
        if self._num_pending == self._row_group_size or (
            self._row_group_size is None and self._pending_bytes >= GROUP_BYTES
        ):
            self._flush()

    def __exit__(self, *exc: object) -> None:
        finished = False
        try:
            if exc[0] is None:
                self._finish()
                finished = True
        except (pa.ArrowException, OSError) as error:
            raise StoreError(f"{self._path} cannot be written: {error}") from error
        finally:
            if not finished:
                # What is still buffered goes into a file that is about to be removed.
                with contextlib.suppress(pa.ArrowException, OSError):
                    self._writer.close()
                self._path.unlink(missing_ok=True)
            self._file.close()

    def _finish(self) -> None:
        self._flush()
        self._writer.add_key_value_metadata({"raypipe.fingerprint": self._fingerprint.hexdigest()})
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())

    def _flush(self) -> None:
        if self._num_pending:
            try:
                self._writer.write_table(pa.table(self._pending, schema=self._schema))
            except (pa.ArrowException, OSError) as error:
                raise StoreError(f"{self._path} cannot be written: {error}") from error
        self._pending = {name: [] for name in self._layout.types}
        self._num_pending = self._pending_bytes = 0


def _schema(types: Mapping[str, str], classes: Sequence[str] | None) -> pa.Schema:
    schema = pa.schema([(name, _ARROW_TYPES[kind]) for name, kind in types.items()])
    if classes is None or "label" not in types:
        return schema
    features: dict[str, Any] = {name: {"dtype": kind, "_type": "Value"} for name, kind in types.items()}
    features["label"] = {"names": list(classes), "_type": "ClassLabel"}
    return schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})
