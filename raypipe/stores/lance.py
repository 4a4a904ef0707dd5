"""Lance datasets, as the library lance (on PyPI `pylance`) writes them: a format for reading single rows.

    NAME.lance/_versions/*.manifest     one for each version: its fragments, and their files
    NAME.lance/data/*.lance             columns of a fragment; never changed after they are written
    NAME.lance/_deletions/*             deleted rows of a fragment

A store is one version in all processes, the newest when it was first opened, so later writes have no effect on it.
The lance library does all reads, from a disk and from object storage.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from raypipe.errors import ConfigError, StoreError
from raypipe.lookup import to_install
from raypipe.storage.patience import one_line, patience_s
from raypipe.stores.arrow_columns import TableColumns
from raypipe.stores.base import MAX_SAMPLE_BYTES, Columns, FileStore, check_indices, hash_of_facts

# Source position at the end of the library's errors.
_PLACE = re.compile(r",? ?/\S+\.rs:\d+.*", re.DOTALL)
# Mark of a blob column: in its metadata or, since format 2.2, its type.
_BLOB, _BLOB_TYPE = b"lance-encoding:blob", "lance.blob.v2"


class LanceStore(FileStore["_Version"]):
    """A store in a Lance dataset, `NAME.lance`. Samples are in the dataset's order, without deleted rows.

    Null images, images over 512 MiB, and blobs that are links to other files are None; null labels raise
    StoreError. The fingerprint is a hash over columns, class names, and the names and sizes of the data and
    deletion files. The library gives each file a new random name, so a copy of the files keeps the fingerprint,
    and a rewritten dataset gets a new one.

    Args:
        address: a path, or a URI: s3://, gs://, az:// or abfs://.
        image_column: the column that becomes `image`: binary, a blob, or a struct with the field `bytes`.
        target_column: the column of numbers, or of lists of numbers, that becomes `label`; integers are classes.
            The store has no labels if the dataset lacks `label`; a column of any other name must exist.
    """

    _has_lock = True  # held by the library's threads

    def __init__(self, address: str | Path, image_column: str = "image", target_column: str = "label") -> None:
        super().__init__(address, image_column, target_column)

    def _open(self) -> _Version:
        opened = _Version(self.address, self._listing, *self._options)
        self._listing = opened.number
        return opened


class _Version(TableColumns):
    """A version of a dataset; `number` None = the newest."""

    groups = None

    def __init__(self, address: str, number: int | None, image_column: str, target_column: str) -> None:
        try:
            import lance
        except ImportError as error:
            extra = f"{to_install('lance')}, on every node"
            raise ConfigError(f"{address} needs the library of Lance ({error}): {extra}") from error
        self._address = address
        with _explained(f"{address} cannot be opened as a Lance dataset"):
            self._data = lance.dataset(_uri(address), version=number, storage_options=_options(address))
            self.number = int(self._data.version)
            schema = self._data.schema
            fragments = [fragment.metadata.to_json() for fragment in self._data.get_fragments()]
            self._num = int(self._data.count_rows())
        self._blobs = {field.name for field in schema if _is_blob(field)}
        plain = [field.with_type(_plain(field)) for field in schema]
        schema = pa.schema(plain, schema.metadata)
        super().__init__([(address, schema)], image_column, target_column)
        facts = [(name, str(field)) for name, field in self.fields.items()], self.classes
        files = [[fragment[name] for name in _FRAGMENT_FACTS if fragment.get(name)] for fragment in fragments]
        self.fingerprint = hash_of_facts((facts, files))

    def __len__(self) -> int:
        return self._num

    def read(self, indices: np.ndarray, columns: tuple[str, ...]) -> Columns:
        stored = {name: self.fields[name].name for name in columns}
        with _explained(f"{self._address}, version {self.number}, cannot be read"):
            # For a blob, `take` returns only its place.
            table = self._data.take(indices.tolist(), columns=list(stored.values())) if len(indices) else None
            return {
                name: self._contents_of(column, table, indices)
                if column in self._blobs
                else self._values(name, table)
                for name, column in stored.items()
            }

    def _values(self, name: str, table: pa.Table | None) -> Any:
        field = self.fields[name]
        column = pa.chunked_array([], field.type) if table is None else table.column(field.name)
        if isinstance(column.type, pa.BaseExtensionType):
            column = pa.chunked_array([chunk.storage for chunk in column.chunks], field.type)
        rows = np.arange(len(column))
        values = self.opened(name, column, self._address).take(rows)
        if name == "image":
            values = [None if image is None or len(image) > MAX_SAMPLE_BYTES else image for image in values]
        return self.join(name, [values], rows)

    def _contents_of(self, column: str, table: pa.Table | None, indices: np.ndarray) -> list[bytes | None]:
        """Return the blobs of a column; None for a link to another file, which is not followed."""
        places = [] if table is None else table.column(column).to_pylist()
        inside = [row for row, place in enumerate(places) if place is not None and not place.get("blob_uri")]
        contents: list[bytes | None] = [None] * len(places)
        blobs = self._data.take_blobs(column, indices=indices[inside].tolist()) if inside else []
        for row, blob in zip(inside, blobs, strict=True):
            if blob is not None and blob.size() <= MAX_SAMPLE_BYTES:
                contents[row] = blob.readall()
        return contents

    def sample_name(self, index: int) -> str:
        check_indices([index], self._num, self._address)
        return f"{self._address}, version {self.number}, row {index}"


_FRAGMENT_FACTS = ("files", "physical_rows", "deletion_file", "overlays")
"""Fields of a fragment's metadata that identify its contents."""


def _is_blob(field: pa.Field) -> bool:
    """Return whether values are stored outside the rows, in either of the library's two ways."""
    return getattr(field.type, "extension_name", "") == _BLOB_TYPE or (field.metadata or {}).get(_BLOB) == b"true"


def _plain(field: pa.Field) -> pa.DataType:
    """Return the type of a field's values; for an extension, such as encoded images, its storage type."""
    if _is_blob(field):
        return pa.large_binary()
    return field.type.storage_type if isinstance(field.type, pa.BaseExtensionType) else field.type


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Context manager: turn the library's errors, a dozen types and Rust panics, into StoreError."""
    try:
        yield
    except (StoreError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise StoreError(
            f"{what}: {_PLACE.sub('', one_line(error))[:500]}; check the address, or copy it again"
        ) from error


def _uri(address: str) -> str:
    """Return an address in the library's form: without `anonymous@`, and with abfss:// for abfs://."""
    scheme, mark, rest = address.partition("://")
    if not mark:
        return address
    scheme = {"abfs": "abfss", "gcs": "gs"}.get(scheme, scheme)
    return f"{scheme}://{rest.removeprefix('anonymous@')}"


def _options(address: str) -> dict[str, str]:
    """Return storage options from variables that pyarrow reads and lance does not; see `storage.filesystem`."""
    scheme, _, rest = address.partition("://")
    environment, options = os.environ.get, {}
    if scheme == "s3":
        endpoint = environment("AWS_ENDPOINT_URL_S3") or environment("AWS_ENDPOINT_URL")
        if endpoint:
            endpoint = endpoint if "://" in endpoint else f"https://{endpoint}"
            options = {"aws_endpoint": endpoint, "allow_http": str(endpoint.startswith("http://")).lower()}
        # The library retries silently by itself; after that its error becomes a StoreError.
        options |= {"client_max_retries": "1000", "client_retry_timeout": f"{patience_s():.0f}"}
    elif scheme in ("az", "abfs", "abfss"):
        names = {"account_name": "ACCOUNT", "account_key": "KEY", "sas_token": "SAS_TOKEN"}
        variables = {name: environment(f"AZURE_STORAGE_{suffix}") for name, suffix in names.items()}
        options = {f"azure_storage_{name}": value for name, value in variables.items() if value}
    if rest.startswith("anonymous@"):
        options["aws_skip_signature" if scheme == "s3" else "google_skip_signature"] = "true"
    return options
