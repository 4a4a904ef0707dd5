"""Stores of files that a table names: a row is a sample, with the path or URI of its image, label, other columns.

A path is a link, as on a page at the table's address: `a.jpg`, `../a.jpg`, `/a.jpg`, `s3://bucket/a.jpg`. Files
are read when they are used, and one that is not there is a missing sample.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urljoin

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import BufferReader, ChunkedArray, Table, csv
from pyarrow.json import ParseOptions, read_json

from raypipe.errors import StoreError
from raypipe.storage.files import RemoteFile, open_object, read_whole
from raypipe.storage.filesystem import is_remote
from raypipe.storage.read_limit import check_read
from raypipe.storage.retries import error_reason
from raypipe.stores.addresses import list_files
from raypipe.stores.arrow_columns import TableColumns, class_names
from raypipe.stores.arrow_values import is_text
from raypipe.stores.base import (
    RENAMED,
    Columns,
    FileStore,
    check_columns,
    hash_of_facts,
)
from raypipe.stores.image_files import FileFacts, read_files, written_at
from raypipe.stores.kept import UNUSABLE
from raypipe.stores.scan import spread

logger = logging.getLogger(__name__)

# Names, in lower case, that people give to these columns.
_USUAL = {
    "image": "image path file filename file_name filepath file_path image_path img img_path url",
    "label": "label labels class target category class_name class_id category_id",
}
_CLASSES = "classes.txt"
_IN_BRACES = re.compile(r"\{(.+?)\}")
_GROUP = re.compile(r"\(\?P<(\w+)>")
_Classes = tuple[str, ...] | None
_NUM_PROBED = 1000  # rows of JSON that show the columns
_MAX_LOOKED_AT = 1 << 16  # files that are looked at within a second


class TableStore(FileStore["ListedFiles"]):
    """A store of the files that a CSV, TSV or JSON-lines table names; several files may be one table.

    An image that cannot be read, or is over 512 MiB, is None. The fingerprint is a hash over the table, the
    options, and the sizes of files on this machine's disks, of 65,536 of them in longer tables. It does not look
    at remote files: give a changed one another name.

    Args:
        address: path or URI of a file, or a pattern.
        image_column: the column of paths, "image" = the one with a usual name; or a path with columns in braces,
            such as `images/{id}.jpg`.
        target_column: the column of labels, "label" = the one with a usual name, or no labels; empty = no labels.
            Or a regular expression with one named group, which is the label: it is searched in the column that
            the group names, else in the path. Labels are numbers, or names of classes, which are numbered as
            classes.txt in the table's folder lists them, or sorted.
    """

    def __init__(
        self,
        address: str | Path,
        image_column: str = "image",
        target_column: str = "label",
    ) -> None:
        super().__init__(address, image_column, target_column)

    def _open(self) -> ListedFiles:
        files = list_files(self.address, lambda _: True, "such")
        return read_tables(self.address, files, *self._options)


class ListedFiles(FileFacts, TableColumns):
    """Contents of a store of files that a table names.

    Args:
        address: address of the table.
        rows: the table.
        facts: of each file, a hash of its content, and what changes when it is replaced.
        image_column, target_column: see `TableStore`.
    """

    groups = None

    def __init__(
        self,
        address: str,
        rows: Table,
        facts: Sequence[object],
        image_column: str,
        target_column: str,
    ) -> None:
        self._address = address
        names = rows.column_names
        parts, label = _chosen(address, names, image_column, target_column)
        check_columns(parts[1::2], names, address)
        parts[1::2] = [_texts(rows[name]) for name in parts[1::2]]
        self._paths = pc.binary_join_element_wise(*parts, "").fill_null("")
        columns = dict(zip(names, rows.columns, strict=True))
        columns["image"] = self._paths.cast(pa.binary())
        classes = None
        if label:
            columns["label"], classes = _labels(address, rows, self._paths, label)
        self._rows = pa.table(columns)
        schemas = [(address, self._rows.schema)]
        TableColumns.__init__(self, schemas, "image", label and "label")
        self.classes = classes
        self.identity = hash_of_facts((facts, image_column, label, classes))

    def __len__(self) -> int:
        return len(self._rows)

    def look(self) -> list[tuple[int, ...]]:
        """Look at local files that are spread over the table."""
        indices = spread(len(self), _MAX_LOOKED_AT).tolist()
        return list(map(written_at, map(self.sample_name, indices)))

    def read(self, indices: np.ndarray, columns: tuple[str, ...]) -> Columns:
        images = None
        if "image" in columns:
            images = read_files([self.sample_name(index) for index in indices.tolist()])
        others = [name for name in columns if name != "image"]
        read = self._rows.select(others).take(pa.array(indices))
        return Columns(images, self.table_of(read, self.sample_name))

    def names(self, indices: np.ndarray) -> list[str]:
        """Return the paths of samples, as the table has them."""
        return self._paths.take(pa.array(indices)).to_pylist()

    def sample_name(self, index: int) -> str:
        """Return the path or URI of a sample's file."""
        return _address_of(self._paths[index].as_py(), self._address)


def _address_of(path: str, table: str) -> str:
    """Return the address of a path in the table at an address."""
    if is_remote(path):
        return path
    if is_remote(table):
        scheme, _, place = table.partition("://")
        # urljoin knows few other schemes
        return urljoin(f"http://{place}", quote(path)).replace("http", scheme, 1)
    if path.startswith("file://"):
        path = unquote(path.removeprefix("file://"))
    folder, _, _ = table.rpartition("/")
    return path if path.startswith("/") else f"{folder}/{path}"


def _chosen(
    address: str, names: Sequence[str], *settings: str
) -> tuple[list[Any], str]:
    """Return what paths consist of, every second part a column; and the column or pattern of labels, "" = none."""
    chosen = []
    for (column, usual), setting in zip(_USUAL.items(), settings, strict=True):
        found = [name for name in names if name.strip().lower() in usual.split()]
        if setting != column or column in names:
            found = [setting]
        if len(found) > 1 or (column == "image" and not found):
            raise StoreError(
                f"{address} has the columns {', '.join(names):.300}: choose the {column}, store.{RENAMED[column]}"
                ": NAME, and write a line of names above the rows if there is none, such as path,label"
            )
        chosen.append("".join(found))
    image, label = chosen
    parts = _IN_BRACES.split(image)
    return parts if len(parts) > 1 else ["", image, ""], label


def _texts(column: ChunkedArray) -> ChunkedArray:
    """Return a column as texts: the paths, where Hugging Face's Parquet only names files."""
    if pa.types.is_struct(column.type):
        column = pc.struct_field(column, "path")
    return column.cast(pa.string())


def _labels(
    address: str, rows: Table, paths: ChunkedArray, label: str
) -> tuple[ChunkedArray, _Classes]:
    """Return the labels in a column, or those that a pattern finds, and their class names."""
    if group := _GROUP.search(label):
        texts = _texts(rows[group[1]]) if group[1] in rows.column_names else paths
        labels = pc.struct_field(pc.extract_regex(texts, label), 0)
    else:
        check_columns([label], rows.column_names, address)
        labels = rows[label]
    classes: _Classes = class_names(rows.schema, label)
    if is_text(labels.type):
        labels, classes = _numbered(address, labels)
    if labels.null_count:
        path = paths.filter(labels.is_null())[0]
        raise StoreError(
            f"{address}: {path} has no label: give it one, change store.target_column if this is a pattern, or "
            "set it to '' for no labels"
        )
    return labels, classes


def _numbered(address: str, labels: ChunkedArray) -> tuple[ChunkedArray, _Classes]:
    """Return labels as numbers, with the class names if they are names."""
    labels = pc.utf8_trim_whitespace(_texts(labels))
    labels = pc.if_else(pc.equal(labels, ""), pa.scalar(None, pa.string()), labels)
    distinct = pc.unique(labels).drop_null()
    for kind in (pa.int64(), pa.float64()):
        with contextlib.suppress(pa.ArrowInvalid):
            numbers = distinct.cast(kind)  # slow where it fails
            if pc.all(pc.is_finite(numbers), min_count=0).as_py():
                return labels.cast(kind), None
    names = sorted(distinct.to_pylist())
    classes = _listed_classes(address)
    classes = classes or [name for name in names if not _is_number(name)]
    if wrong := sorted(set(names).difference(classes)):
        such_as = "".join(f", such as {name!r:.100}" for name in classes[:1])
        raise StoreError(
            f"{address}: the label {wrong[0]!r:.100} is not among the names of classes{such_as}: write numbers or "
            f"names in all rows, or list all names in order in {_CLASSES} next to the table"
        )
    indices = pc.index_in(labels, pa.array(classes)).cast(pa.int64())
    return indices, tuple(classes)


def _listed_classes(address: str) -> list[str]:
    """Return the names in the file of classes next to a table; none without such a file."""
    listed = read_whole(_address_of(_CLASSES, address)) or b""
    lines = listed.removeprefix(codecs.BOM_UTF8).decode().splitlines()
    names = list(filter(None, map(str.strip, lines)))
    for name, num in Counter(names).items():
        if num > 1:
            raise StoreError(
                f"{address}: {_CLASSES} next to the table has {name!r:.100} {num} times: write each name once"
            )
    return names


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def read_tables(where: str, files: Sequence[RemoteFile], *columns: str) -> ListedFiles:
    """Read the files of a table; `columns` are image_column and target_column, see `TableStore`."""
    tables = []
    facts = []
    with as_table(where):
        for listed in files:
            with open_object(listed.address) as (file, current):
                check_read(listed.address, current.num_bytes)
                content = file.read()
            is_alone = len(files) == 1
            tables.append(_parsed(listed.address, content, is_alone, *columns))
            facts.append(hashlib.sha256(content).hexdigest())
        rows = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
        del content, tables
        pa.default_memory_pool().release_unused()
        return ListedFiles(files[0].address, rows, facts, *columns)


@contextlib.contextmanager
def as_table(where: str) -> Iterator[None]:
    """Context manager: turn an error of pyarrow or of JSON into StoreError."""
    try:
        yield
    except UNUSABLE as error:
        raise StoreError(
            f"{where} cannot be read as a table: {error_reason(error):.300}; write UTF-8, a line of names, as "
            "many values in each row, or in .jsonl an object in each line, with one type of values for each name"
        ) from error


def _parsed(address: str, content: bytes, is_alone: bool, *columns: str) -> Table:
    """Return the rows in a file's content; those of several files must have equal types of texts."""
    _, _, suffix = address.lower().rpartition(".")
    if suffix == "parquet":
        file = pq.ParquetFile(BufferReader(content))
        groups = map(file.metadata.row_group, range(file.num_row_groups))
        unpacked = sum(group.total_byte_size for group in groups)
        check_read(address, unpacked, len(content))
        return file.read()
    content = content.removeprefix(codecs.BOM_UTF8)
    if suffix == "jsonl":
        return _from_jsonl(address, content)
    return _from_csv(address, content, is_alone, *columns)


def _from_jsonl(address: str, content: bytes) -> Table:
    lines = content.split(b"\n", _NUM_PROBED)[:_NUM_PROBED]
    rows = list(map(json.loads, filter(bytes.strip, lines)))
    first = Table.from_pylist(rows)
    if later := set[str]().union(*rows) - set(first.column_names):
        logger.warning(
            "%s: left out, as the first row lacks them: %.300s",
            *(address, ", ".join(sorted(later))),
        )
    # pyarrow infers types by recursion, which any depth of others would overflow
    known = ParseOptions(first.schema, unexpected_field_behavior="ignore")
    return read_json(BufferReader(content), parse_options=known)


def _from_csv(address: str, content: bytes, is_alone: bool, *columns: str) -> Table:
    header = content.partition(b"\n")[0].decode()
    separated = csv.ParseOptions(
        delimiter=max(",\t;", key=header.count), newlines_in_values=True
    )
    reader = csv.open_csv(BufferReader(content), parse_options=separated)
    # pandas writes its index without a name
    names = list(filter(None, reader.schema.names))
    parts, label = _chosen(address, names, *columns)
    texts = [*parts[1::2], label, *_GROUP.findall(label)]
    options = csv.ConvertOptions(
        include_columns=names,
        column_types=dict.fromkeys(texts, pa.string()),
        null_values=[""],
        strings_can_be_null=True,
        auto_dict_encode=is_alone,
    )
    return csv.read_csv(BufferReader(content), None, separated, options)
