"""Lance data sets, as the library lance (on PyPI `pylance`) writes them: made for reading single rows.

    NAME.lance/_versions/*.manifest     one for each version: its fragments, and the files that they are in
    NAME.lance/data/*.lance             columns of a fragment; never changed once they are written
    NAME.lance/_deletions/*             which of its rows are deleted

A store is one version, the newest when it was first opened, in all processes: what others write meanwhile changes
nothing. It goes by the library, on a disk and in object storage.
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

# Of the library's errors: the place in its own source.
_PLACE = re.compile(r",? ?/\S+\.rs:\d+.*", re.DOTALL)
# Of a column whose values lie apart: in its metadata, or, since format 2.2, its type.
_BLOB, _BLOB_TYPE = b"lance-encoding:blob", "lance.blob.v2"


class LanceStore(FileStore["_Version"]):
    """A store in a Lance data set, `NAME.lance`. Samples are in the data set's order, without deleted rows.

    Null images are None, as are those over 512 MiB, and blobs that are links to files elsewhere; null labels raise
    StoreError. The fingerprint is a hash over columns, class names, and the names and sizes of the files of data
    and of deletions. A copy of the files has the same fingerprint; data that is written again does not, since the
    library gives each file a new name.

    Args:
        address: a path, or a URI: s3://, gs://, az:// or abfs://.
        image_column: the column that becomes `image`: binary, a blob, or a struct with the field `bytes`.
        target_column: the column of numbers, or of lists of them, that becomes `label`; integers are classes. A
            data set without a column `label` is a store without labels; any other name must be there.
    """

    _has_lock = True  # the library's threads

    def __init__(self, address: str | Path, image_column: str = "image", target_column: str = "label") -> None:
        super().__init__(address, image_column, target_column)

    def _open(self) -> _Version:
        opened = _Version(self.address, self._listing, *self._options)
        self._listing = opened.number
        return opened


class _Version(TableColumns):
    """One version of a data set; `number` None = the newest."""

    groups = None

    def __init__(self, address: str, number: int | None, image_column: str, target_column: str) -> None:
        try:
            import lance
        except ImportError as error:
            extra = f"{to_install('lance')}, on every node"
            raise ConfigError(f"{address} needs the library of Lance ({error}): {extra}") from error
        self._address = address
        with _explained(f"{address} cannot be opened as a Lance data set"):
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
        files = [[fragment[name] for name in _OF_A_FRAGMENT if fragment.get(name)] for fragment in fragments]
        self.fingerprint = hash_of_facts((facts, files))

    def __len__(self) -> int:
        return self._num

    def read(self, indices: np.ndarray, columns: tuple[str, ...]) -> Columns:
        stored = {name: self.fields[name].name for name in columns}
        with _explained(f"{self._address}, version {self.number}, cannot be read"):
            # Of a blob this is where it lies.
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
        """The blobs of a column; None for one that is a link to a file elsewhere, which is not followed."""
        places = [] if table is None else table.column(column).to_pylist()
        inside = [at for at, place in enumerate(places) if place is not None and not place.get("blob_uri")]
        contents: list[bytes | None] = [None] * len(places)
        blobs = self._data.take_blobs(column, indices=indices[inside].tolist()) if inside else []
        for at, blob in zip(inside, blobs, strict=True):
            if blob is not None and blob.size() <= MAX_SAMPLE_BYTES:
                contents[at] = blob.readall()
        return contents

    def sample_name(self, index: int) -> str:
        check_indices([index], self._num, self._address)
        return f"{self._address}, version {self.number}, row {index}"


_OF_A_FRAGMENT = ("files", "physical_rows", "deletion_file", "overlays")
"""What tells its contents from another's."""


def _is_blob(field: pa.Field) -> bool:
    """Whether its values lie apart from the rows, in either of the library's ways."""
    return getattr(field.type, "extension_name", "") == _BLOB_TYPE or (field.metadata or {}).get(_BLOB) == b"true"


def _plain(field: pa.Field) -> pa.DataType:
    """The type of a field's values; of an extension, such as the library's encoded images, that of its storage."""
    if _is_blob(field):
        return pa.large_binary()
    return field.type.storage_type if isinstance(field.type, pa.BaseExtensionType) else field.type


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Within, what the library raises becomes a StoreError: it has a dozen types, and a panic is no Exception."""
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
    """An address as the library knows it: without `anonymous@`, and abfs:// by its other name."""
    scheme, mark, rest = address.partition("://")
    if not mark:
        return address
    scheme = {"abfs": "abfss", "gcs": "gs"}.get(scheme, scheme)
    return f"{scheme}://{rest.removeprefix('anonymous@')}"


def _options(address: str) -> dict[str, str]:
    """What the library does not find in the environment where pyarrow finds it, see `storage.filesystem`."""
    scheme, _, rest = address.partition("://")
    environment, options = os.environ.get, {}
    if scheme == "s3":
        endpoint = environment("AWS_ENDPOINT_URL_S3") or environment("AWS_ENDPOINT_URL")
        if endpoint:
            endpoint = endpoint if "://" in endpoint else f"https://{endpoint}"
            options = {"aws_endpoint": endpoint, "allow_http": str(endpoint.startswith("http://")).lower()}
        # It waits by itself, without a line, and its error is then a store's.
        options |= {"client_max_retries": "1000", "client_retry_timeout": f"{patience_s():.0f}"}
    elif scheme in ("az", "abfs", "abfss"):
        names = {"account_name": "ACCOUNT", "account_key": "KEY", "sas_token": "SAS_TOKEN"}
        variables = {name: environment(f"AZURE_STORAGE_{ours}") for name, ours in names.items()}
        options = {f"azure_storage_{name}": value for name, value in variables.items() if value}
    if rest.startswith("anonymous@"):
        options["aws_skip_signature" if scheme == "s3" else "google_skip_signature"] = "true"
    return options
