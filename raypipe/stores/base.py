"""The protocol of a store, an indexed, read-only collection of N encoded samples, with the code that stores share.

A store object consists of an address and options. It opens lazily, once per process, and pickles as address and
options, so it can be sent to any actor. Importing a store imports neither Ray nor torch.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Protocol,
    TypeVar,
    runtime_checkable,
)

import numpy as np

from raypipe.errors import StoreError
from raypipe.mistakes import choices
from raypipe.printing import printable
from raypipe.stores.numbers import MAX_SAMPLE_BYTES as MAX_SAMPLE_BYTES

if TYPE_CHECKING:
    import pyarrow as pa


_NO_LABELS = np.empty(0, np.int64)


class Columns(Mapping[str, Any]):
    """Columns of n samples; `columns[name]` are a column's values as NumPy and Python have them, see
    `raypipe.stores.arrow_values`.

    Attributes:
        images: the column `image`: n `bytes`, or read-only `memoryview` of uint8 if the store has them in memory,
            or None for a missing value; None = it was not requested.
        table: all other columns, with n rows.
        labels: int64 (n,), classes on their way to a micro-batch, see `raypipe.transform.samples`; else empty.
        read_s, outage_s: seconds that a reader spent on them, and those for which object storage did not answer.
    """

    def __init__(
        self,
        images: Sequence[bytes | memoryview | None] | None,
        table: pa.Table,
        labels: np.ndarray = _NO_LABELS,
        read_s: float = 0.0,
        outage_s: float = 0.0,
    ) -> None:
        self.images: Any = images
        self.table = table
        self.labels = labels
        self.read_s = read_s
        self.outage_s = outage_s

    def __getitem__(self, name: str) -> Any:
        if name == "image" and self.images is not None:
            return self.images
        # importing pyarrow takes time
        from raypipe.stores.arrow_values import to_values

        return to_values(self.table[name])

    def __iter__(self) -> Iterator[str]:
        if self.images is not None:
            yield "image"
        yield from self.table.column_names

    def __len__(self) -> int:
        return len(self.table.column_names) + (self.images is not None)

    @cached_property
    def _values(self) -> dict[str, Any]:
        return {name: self[name] for name in self.table.column_names}

    def row(self, number: int) -> dict[str, Any]:
        """Return the values of one sample in the table, by column."""
        return {name: values[number] for name, values in self._values.items()}

    def samples(self) -> Iterator[dict[str, Any]]:
        """Yield the values of each sample, by column, its image among them."""
        names = list(self)
        for values in zip(*self.values(), strict=True):
            yield dict(zip(names, values, strict=True))

    def rows(self, rows: slice) -> Columns:
        """Return some of the samples, with their images."""
        table = self.table.slice(rows.start, rows.stop - rows.start)
        return Columns(self.images[rows], table, self.labels[rows])


IMAGE_SUFFIXES = frozenset(
    {
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".jif", ".jfi", ".pjpeg", ".pjp", ".mpo"),
        *(".png", ".apng", ".webp", ".gif", ".tif", ".tiff", ".bmp"),
        *(".avif", ".avifs", ".heic", ".heics", ".heif", ".heifs", ".hif"),
    }
)
"""Suffixes, in lower case, of the samples in folder and tar stores: all of those of the formats that
`raypipe.transform.decode.image_header` knows."""

ARRAY_SUFFIX = ".npy"
"""Suffix of numpy arrays, which are samples only in a store without images: next to images they are something
else, such as features."""

ColumnValues = Mapping[str, Any]
"""A sample from outside: column → value."""

NAME = "name"
"""Column of the samples' names, which each store at an address has: a path, a key, or the number of the row."""

RENAMED = {"image": "image_column", "label": "target_column"}
"""Columns that a store may have under another name → the setting that gives that name."""


@runtime_checkable
class Store(Protocol):
    """An indexed, read-only collection of encoded samples.

    A store may also have a method `sample_name(index: int) -> str`, which returns a sample's name at its source,
    such as file and key, for errors and records; see `name_of`. It may also have a method `forwards() ->
    Store`, see `forwards`.

    Attributes:
        address: the path or URI that the store was opened with, as a string.
        schema: names and types of all columns, `image` and `label` first if the store has them. `image` is
            binary; an integer `label` is a class, and has the type int64.
        classes: class names, position = label; None if the store does not name them.
        groups: offsets, int64 of shape (num_groups + 1,), of runs of samples that are read together
            (Parquet row groups); None if reading a single sample has no extra cost.
        fingerprint: 32 hex digits, equal for equal contents in equal order, different otherwise.
    """

    address: str

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def classes(self) -> tuple[str, ...] | None: ...

    @property
    def groups(self) -> np.ndarray | None: ...

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...

    def read(
        self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")
    ) -> Columns:
        """Read samples by index, in the requested order, including duplicates.

        Args:
            indices: int64 of shape (n,), each in [0, len(self)).
            columns: names of the columns to read.

        Returns:
            The requested columns, with the types of the schema. A missing or damaged image is None or undecodable
                bytes; the bad-sample policy handles it.

        Raises:
            IndexError: an index is outside [0, len(self)).
            StoreError: the store itself is damaged, or lacks a column; the message names the file,
                the key or the column.
        """
        ...

    def close(self) -> None:
        """Release files and maps; the next read opens them again."""
        ...


C = TypeVar("C", bound=Any)
"""Contents of an open `FileStore`: like a store, with `written` and `sample_name`, but callers have checked
indices and columns. Without a column `name`, a method `names(indices: np.ndarray) -> list[str]` makes one; without
the method it has the indices."""
_T = TypeVar("_T")


class FileStore(ABC, Generic[C]):
    """A `Store` at an address: `_open` makes its contents at first use.

    Args:
        address: a path or URI; a relative path is made absolute, since processes differ in their working folder.
        options: the other arguments of the subclass's constructor, in order.
    """

    # Whether the contents have a lock. A forked child then opens the store again, since its parent may have held
    # the lock during the fork.
    _has_lock: ClassVar[bool] = False

    def __init__(self, address: str | Path, *options: Any) -> None:
        if "://" in str(address):
            self.address = str(address)
        else:
            self.address = str(Path(address).absolute())
        self._options = options
        self._opened: C | None = None
        self._pid = 0
        # Listing of a remote store by the process that opened it first: other processes neither list it again nor
        # miss a change.
        self._listing: Any = None
        # What the process that sent the store here had opened; "" = it was not sent.
        self._identity = ""

    def __reduce__(self) -> tuple[Any, ...]:
        if self._opened is None:
            identity = self._identity
        else:
            identity = _identity_of(self._opened)
        state = {"_listing": self._listing, "_identity": identity}
        return type(self), (self.address, *self._options), state

    @abstractmethod
    def _open(self) -> C:
        """Open the contents of the address; raise StoreError if there are none."""

    @property
    def options(self) -> tuple[Any, ...]:
        """The arguments besides the address with which it was opened."""
        return self._options

    @property
    def _contents(self) -> C:
        if self._has_lock and self._pid != os.getpid():
            self.close()
        if self._opened is None:
            # another process has had it, if there is an identity
            opened = self._patiently(self._open) if self._identity else self._open()
            if self._identity and self._identity != _identity_of(opened):
                raise other_contents(self.address)
            self._opened = opened
            self._pid = os.getpid()
        return self._opened

    @property
    def stored(self) -> pa.Schema:
        """The columns that the files have; `schema` has `name` too."""
        return self._contents.schema

    @property
    def schema(self) -> pa.Schema:
        import pyarrow as pa  # importing it takes time

        stored = self.stored
        if NAME in stored.names:
            return stored
        return stored.append(pa.field(NAME, pa.string()))

    @property
    def has_names(self) -> bool:
        """Tell whether `name` is more than the number of the row."""
        return NAME in self.stored.names or hasattr(self._contents, "names")

    @property
    def classes(self) -> tuple[str, ...] | None:
        return self._contents.classes

    @property
    def groups(self) -> np.ndarray | None:
        return self._contents.groups

    @property
    def fingerprint(self) -> str:
        return self._contents.fingerprint

    @property
    def written(self) -> str:
        """A hash of sizes, times of change and inodes of the files, or of the objects' versions.

        It differs where they were written or replaced, which the fingerprint may not show. A copy has another one,
        as has each machine.
        """
        return str(self._contents.written)

    def __len__(self) -> int:
        return len(self._contents)

    def read(
        self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")
    ) -> Columns:
        """Read samples, see `Store.read`."""
        rows = check_indices(indices, len(self), self.address)
        check_columns(columns, self.schema.names, self.address)
        in_files = self._in_files(columns)
        read = self._patiently(lambda: self._contents.read(rows, in_files))
        if in_files == columns:
            return read
        import pyarrow as pa

        names_of = getattr(self._contents, "names", np.ndarray.tolist)
        names = pa.array(map(_as_name, names_of(rows)), pa.string())
        arrays = [*read.table.columns, names]
        return Columns(read.images, pa.table(arrays, [*read.table.column_names, NAME]))

    def _in_files(self, columns: tuple[str, ...]) -> tuple[str, ...]:
        """Return the columns without `name` if the files do not have it."""
        if NAME not in columns or NAME in self.stored.names:
            return columns
        return tuple(column for column in columns if column != NAME)

    def _patiently(self, do: Callable[[], _T]) -> _T:
        """Call `do`; if the store has vanished from this machine, as with a mount, wait for it as for a bucket."""
        from raypipe.storage.retries import retried  # this imports pyarrow

        def is_there() -> bool:
            return "://" in self.address or os.access(self.address, os.F_OK)

        def again() -> _T:
            if not is_there():
                raise ConnectionError(f"{self.address} has vanished")
            self.close()
            return do()

        try:
            return do()
        except Exception:
            if is_there():
                raise
            return retried("read", self.address, again)

    def sample_name(self, index: int) -> str:
        """Return a sample's file, its place in the file, and the name that is stored there."""
        place = self._contents.sample_name(index)
        if NAME not in self.stored.names:
            return place
        (name,) = self.read(np.array([index]), (NAME,))[NAME]
        return f"{place}, {name}"

    def is_at_hand(self, indices: np.ndarray, columns: tuple[str, ...]) -> bool:
        """See the function `is_at_hand`. Contents that the node's cache may have tell it themselves."""
        from raypipe.storage.filesystem import is_remote  # this imports pyarrow

        if not is_remote(self.address):
            return True
        contents = self._contents
        return hasattr(contents, "is_at_hand") and contents.is_at_hand(
            indices, self._in_files(columns)
        )

    @property
    def keeps_groups(self) -> bool:
        """See the function `keeps_groups`."""
        return hasattr(self._contents, "is_at_hand")

    def close(self) -> None:
        self._opened = None


def _identity_of(contents: Any) -> str:
    """Return what tells contents from others: the fingerprint, unless it takes long."""
    return str(getattr(contents, "identity", None) or contents.fingerprint)


def other_contents(address: str) -> StoreError:
    """Return the error about a store that differs from the one that another process has sent."""
    return StoreError(
        f"{address} has other contents on this machine ({socket.gethostname()}), or by now, than "
        "where it was opened first: give all nodes the same files, and leave them as they are"
    )


def forwards(store: Store) -> Store:
    """Return a store for a single pass from start to end: its own `forwards()`, which keeps less, or itself."""
    return store.forwards() if hasattr(store, "forwards") else store


def name_of(store: Store, index: int) -> str:
    """Return a store's name for a sample, as one printable line; empty if there is none, or the store fails."""
    try:
        return printable(str(store.sample_name(index))).replace("\n", r"\n")  # type: ignore[attr-defined]
    except Exception:  # a name only describes an earlier error, and must not hide it
        return ""


def is_at_hand(store: Store, indices: np.ndarray, columns: tuple[str, ...]) -> bool:
    """Return whether this process can read samples now, without fetching anything from object storage."""
    from raypipe.storage.filesystem import is_remote  # this imports pyarrow

    if hasattr(store, "is_at_hand"):
        return store.is_at_hand(indices, columns)
    return not is_remote(store.address)


def keeps_groups(store: Store) -> bool:
    """Return whether the groups that are fetched for samples are on the node's disk, for all of its processes.

    Then each can read its own samples. Groups that are decoded as a whole, as of Parquet, are not on disk.
    """
    return getattr(store, "keeps_groups", False)


def is_class(store: Store) -> bool:
    """Return whether a store's labels are integers, one per sample; also True for no labels."""
    from raypipe.stores.arrow_values import is_integer  # importing pyarrow takes time

    schema = store.schema
    return "label" not in schema.names or is_integer(schema.field("label").type)


def title_of(address: object, index: object, name: object) -> str:
    """Return a sample's title in errors and lists; `name` comes from `name_of`."""
    return f"{address or 'store'} sample {index}{f' ({name})' if name else ''}"


def _as_name(name: str | int | None) -> str | None:
    """Return a sample's name as text, also if it is a path whose bytes are not UTF-8."""
    if name is None:
        return None
    return str(name).encode(errors="surrogateescape").decode(errors="backslashreplace")


def as_text(content: bytes | None) -> str | None:
    """Return the value of a text column; None for no value, or bytes that are not UTF-8."""
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError:
        return None


class PartedStore(ABC):
    """Samples in parts that are read one at a time, such as files or row groups.

    Attributes:
        schema: the columns of all parts.
        offsets: int64 (parts + 1,), the first sample of each part, and the number of samples.
    """

    schema: pa.Schema
    offsets: np.ndarray

    def __len__(self) -> int:
        return int(self.offsets[-1])

    @abstractmethod
    def _read(
        self, number: int, rows: np.ndarray, columns: tuple[str, ...]
    ) -> Mapping[str, Any]:
        """Read rows of a part, ascending: a list of images; the other columns as NumPy or Arrow have them."""

    def part_of(self, index: int) -> tuple[int, int]:
        """Return the part that has a sample, and the sample's row in it."""
        number = int(np.searchsorted(self.offsets, index, "right")) - 1
        return number, index - int(self.offsets[number])

    def by_part(self, indices: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield each part that has requested samples, and their positions, by ascending index."""
        order = np.argsort(indices, kind="stable")
        ends = np.searchsorted(indices[order], self.offsets)
        for number in np.flatnonzero(np.diff(ends)).tolist():
            yield number, order[ends[number] : ends[number + 1]]

    def read(self, indices: np.ndarray, columns: tuple[str, ...]) -> Columns:
        """Return columns of samples, with one read of each part."""
        import pyarrow as pa  # importing it takes time

        parts: dict[str, list[Any]] = {name: [] for name in columns}
        positions_of = [np.empty(0, np.int64)]
        for number, positions in self.by_part(indices):
            rows = indices[positions] - self.offsets[number]
            for name, values in self._read(number, rows, columns).items():
                parts[name].append(values)
            positions_of.append(positions)
        order = np.argsort(np.concatenate(positions_of), kind="stable")
        images = None
        if "image" in parts:
            every = list(itertools.chain.from_iterable(parts.pop("image")))
            images = [every[row] for row in order.tolist()]
        arrays = {
            name: _joined(self.schema.field(name).type, values, order)
            for name, values in parts.items()
        }
        return Columns(images, pa.table(arrays))


def _joined(kind: pa.DataType, parts: list[Any], order: np.ndarray) -> pa.ChunkedArray:
    """Return the values of several parts as one column, in an order, int64 (n,)."""
    import pyarrow as pa  # importing it takes time

    from raypipe.stores.arrow_values import take, to_arrow

    if parts and all(isinstance(part, np.ndarray) for part in parts):
        return pa.chunked_array([to_arrow(np.concatenate(parts)[order])])
    chunks = list[pa.Array]()
    for part in parts:
        values = to_arrow(part) if isinstance(part, np.ndarray) else part
        chunks += values.chunks if isinstance(values, pa.ChunkedArray) else [values]
    if not chunks:
        return pa.chunked_array([], kind)
    return take(pa.chunked_array(chunks), order)


def join_fingerprints(parts: Sequence[str]) -> str:
    """Return the fingerprint of a single file, or the hash over several fingerprints."""
    if len(parts) == 1:
        return parts[0]
    return hashlib.blake2b("".join(parts).encode(), digest_size=16).hexdigest()


def check_indices(
    indices: Sequence[int] | np.ndarray, num_samples: int, address: str
) -> np.ndarray:
    """Return the indices as int64 of shape (n,).

    Raises:
        IndexError: an index is outside [0, num_samples). Negative ones do not count from the end.
    """
    rows = np.asarray(indices)
    if rows.size == 0:
        return np.empty(0, np.int64)
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise IndexError(
            f"indices must be integers of shape (n,), not {rows.dtype} of {rows.shape}"
        )
    outside = rows[(rows < 0) | (rows >= num_samples)]
    if outside.size:
        raise IndexError(
            f"index {outside[0]} is outside [0, {num_samples}) of {address}"
        )
    return rows.astype(np.int64, copy=False)


def missing(
    where: object,
    name: str,
    present: Collection[str],
    setting: str = "",
) -> str:
    """Return the message about a missing column, with the setting that names it and the columns that exist.

    Args:
        where: the store, its file or its record.
        present: names of columns, or name → kind.
        setting: may be empty.
    """
    named = f" for {setting}" if setting else ""
    return f"{where} has no column {name!r}{named}{choices(name, present, 'its columns are'):.1500}"


def stored_names(
    where: object,
    present: Collection[str],
    asked: Mapping[str, str],
    usual: Mapping[str, Sequence[str]] = {},
) -> dict[str, str]:
    """Return `image`, and `label` if there is one, → its name in the files.

    Args:
        where: the store, one of its files, or its record, for the error.
        present: names of the columns in the files, or name → kind.
        asked: `image` and `label` → the name that they are to have there, the same one = or a usual one, empty =
            none. Without a column `label` there are no labels.
        usual: `image` and `label` → the usual names, the likeliest first.

    Raises:
        StoreError: there is no such column, or no usual one of images.
    """
    names: dict[str, str] = {}
    for column, name in asked.items():
        if not name:
            continue
        candidates = [name, *usual.get(column, ())] if name == column else [name]
        stored = next(
            (candidate for candidate in candidates if candidate in present), None
        )
        if stored is not None:
            names[column] = stored
        elif name != "label":
            raise StoreError(missing(where, name, present, RENAMED[column]))
    return names


def others(present: Iterable[str], names: Mapping[str, str]) -> list[str]:
    """Return the columns besides image and label, by the result of `stored_names`."""
    return [
        name for name in present if name not in names.values() and name not in RENAMED
    ]


def hash_of_facts(facts: object) -> str:
    """Return a fingerprint of facts about a store, such as sizes and names."""
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def check_columns(
    requested: Iterable[str], present: Collection[str], address: str
) -> None:
    """Raise StoreError if the store lacks a requested column."""
    for name in requested:
        if name not in present:
            raise StoreError(missing(address, name, present, RENAMED.get(name, "")))
