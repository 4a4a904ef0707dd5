"""The protocol of a store, an indexed, read-only collection of N encoded samples; checks that all stores share;
and `MemoryStore`, which keeps its samples in memory.

A store object holds only its address and options. It opens lazily, once per process, and pickles as
its address and options, so that it may be sent to any actor. Stores know neither Ray nor torch.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from raypipe.errors import StoreError
from raypipe.logs import printable
from raypipe.lookup import choices
from raypipe.stores.numbers import exactly

Columns = dict[str, Any]
"""Columns of n samples: `image` is a list of n `bytes`, or of read-only `memoryview` of uint8 where the store has
them in memory (None where it holds no value); int and float columns are numpy arrays of shape (n,), and those of
arrays of one shape are (n, …), where the store knows it; other columns are lists of n objects, and so are numbers
of which some are None, without a value."""

IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif", ".heic", ".heif"}
)
"""Suffixes, in lower case, of the files that folder and tar stores take for samples."""

ARRAY_SUFFIX = ".npy"
"""That of arrays of numpy's, which those stores take for samples where they hold no image: beside images they are
something else, such as features."""

RENAMED = {"image": "image_column", "label": "target_column"}
"""Columns that a store may have under another name, and the setting that says so."""

MAX_SAMPLE_BYTES = 1 << 29
"""A file, member or record above this size is no encoded image, and reading it might take all memory: its sample
has the image None. It is the size of 179 million pixels, the decoder's limit, as RGB uncompressed; what unpacks or
joins such a value holds it twice."""


@runtime_checkable
class Store(Protocol):
    """An indexed, read-only collection of encoded samples.

    A store may have one more method, `sample_name(index: int) -> str`: what a sample is called at its source, such
    as its file and key, for errors and records. See `name_of`. And one more attribute, `label_is_class: bool`,
    False where labels are floats, or arrays; see `is_class`.

    Attributes:
        address: the path or URI that the store was opened with, as a string.
        columns: names of all columns, `image` and `label` first if the store has them.
        classes: class names, position = label; None if the store does not name them.
        groups: offsets, int64 of shape (num_groups + 1,), of runs of samples that are read together
            (Parquet row groups); None if each sample can be read alone at no extra cost.
        fingerprint: 32 hex digits, equal for equal contents in equal order, different otherwise.
    """

    address: str

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def classes(self) -> tuple[str, ...] | None: ...

    @property
    def groups(self) -> np.ndarray | None: ...

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")) -> Columns:
        """Read samples by index, in the order asked for, duplicates included.

        Args:
            indices: int64 of shape (n,), each in [0, len(self)).
            columns: the columns wanted.

        Returns:
            One entry per column asked for, see `Columns`. A sample whose value is missing or damaged
                has `image` None or undecodable bytes; the bad-sample policy decides what happens then.

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
"""What a `FileStore` holds while it is open: as a store, but asked only for indices and columns that are there."""


class FileStore(ABC, Generic[C]):
    """A `Store` at an address: `_open` makes its contents at first use.

    Args:
        address: a path or URI; a relative path is made absolute, since other processes have other folders.
        options: what else the constructor of the subclass takes, in its order.
    """

    # Whether what it holds while it is open has a lock: then a forked child opens the store itself, since its
    # parent's lock may have been held.
    _has_lock: ClassVar[bool] = False

    def __init__(self, address: str | Path, *options: Any) -> None:
        self.address = str(address) if "://" in str(address) else str(Path(address).absolute())
        self._options = options
        self._opened: C | None = None
        self._pid = 0
        # Of a remote store, what who opened it first has found there: others need not ask, and notice a change.
        self._listing: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.address, *self._options), {"_listing": self._listing}

    @abstractmethod
    def _open(self) -> C:
        """Find out what is at the address; raises StoreError."""

    @property
    def _contents(self) -> C:
        if self._has_lock and self._pid != os.getpid():
            self.close()
        if self._opened is None:
            self._opened, self._pid = self._open(), os.getpid()
        return self._opened

    @property
    def columns(self) -> tuple[str, ...]:
        return self._contents.columns

    @property
    def classes(self) -> tuple[str, ...] | None:
        return self._contents.classes

    @property
    def groups(self) -> np.ndarray | None:
        return self._contents.groups

    @property
    def label_is_class(self) -> bool:
        return getattr(self._contents, "label_is_class", True)

    @property
    def fingerprint(self) -> str:
        return self._contents.fingerprint

    def __len__(self) -> int:
        return len(self._contents)

    def read(self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")) -> Columns:
        """Read samples, see `Store.read`."""
        wanted = check_indices(indices, len(self), self.address)
        check_columns(columns, self.columns, self.address)
        return self._contents.read(wanted, columns)

    def sample_name(self, index: int) -> str:
        """A sample's file, and its place in it."""
        return self._contents.sample_name(index)

    def close(self) -> None:
        self._opened = None


def name_of(store: Store, index: int) -> str:
    """A store's name for a sample, printable in one line; empty if it has none, or cannot tell now."""
    try:
        return printable(str(store.sample_name(index))).replace("\n", r"\n")  # type: ignore[attr-defined]
    except Exception:  # it is for the record of what is wrong already
        return ""


def is_class(store: Store) -> bool:
    """Whether a store's labels are integers, one for each sample, as far as it says so; or it has none."""
    return bool(getattr(store, "label_is_class", True))


def title_of(address: object, index: object, name: object) -> str:
    """A sample of a store, as errors and lists call it; `name` as from `name_of`."""
    return f"{address or 'store'} sample {index}{f' ({name})' if name else ''}"


def as_text(content: bytes | None) -> str | None:
    """The value of a text column; None if there is none, or it is not UTF-8."""
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError:
        return None


def part_of(bounds: np.ndarray, index: int) -> tuple[int, int]:
    """The part that holds a sample, and its number within it; part i begins with the sample bounds[i]."""
    number = int(np.searchsorted(bounds, index, "right")) - 1
    return number, index - int(bounds[number])


def by_part(indices: np.ndarray, bounds: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each part that holds some of the samples, see `part_of`, and their positions, by ascending index."""
    order = np.argsort(indices, kind="stable")
    ends = np.searchsorted(indices[order], bounds)
    for number in np.flatnonzero(np.diff(ends)).tolist():
        yield number, order[ends[number] : ends[number + 1]]


def join_fingerprints(parts: Sequence[str]) -> str:
    """The fingerprint of a single file, or the hash over those of several."""
    if len(parts) == 1:
        return parts[0]
    return hashlib.blake2b("".join(parts).encode(), digest_size=16).hexdigest()


def check_indices(indices: Sequence[int] | np.ndarray, num_samples: int, address: str) -> np.ndarray:
    """Return the indices as int64 of shape (n,).

    Raises:
        IndexError: an index is outside [0, num_samples). Negative ones do not count from the end.
    """
    wanted = np.asarray(indices)
    if wanted.size == 0:
        return np.empty(0, np.int64)
    if wanted.ndim != 1 or wanted.dtype.kind not in "iu":
        raise IndexError(f"indices must be integers of shape (n,), not {wanted.dtype} of {wanted.shape}")
    outside = wanted[(wanted < 0) | (wanted >= num_samples)]
    if outside.size:
        raise IndexError(f"index {outside[0]} is outside [0, {num_samples}) of {address}")
    return wanted.astype(np.int64, copy=False)


def missing(where: object, name: str, present: Collection[str], setting: str = "", what: str = "column") -> str:
    """The message about a column that is not there: the setting that names it, and the columns that are.

    Args:
        where: the store, its file or its record.
        present: names of columns, or name → kind.
        setting: may be empty.
        what: the format's own word for a column.
    """
    named = f" for {setting}" if setting else ""
    return f"{where} has no {what} {name!r}{named}{choices(name, present, f'its {what}s are'):.1500}"


def stored_names(where: object, present: Collection[str], renamed: Mapping[str, str]) -> dict[str, str]:
    """Name in the store → name in its files, `image` and `label` first.

    Args:
        where: the store, or a file of it, for the error.
        present: names of the columns in the files.
        renamed: of `image` and `label` the columns that become them; a store without `label` has no labels.

    Raises:
        StoreError: a column that is named is not there.
    """
    stored = {}
    for name, place in renamed.items():
        if place in present:
            stored[name] = place
        elif name == "image" or place != "label":
            raise StoreError(missing(where, place, present, RENAMED[name]))
    others = (name for name in present if name not in renamed and name not in renamed.values())
    return stored | {name: name for name in others}


def hash_of_facts(facts: object) -> str:
    """A fingerprint of what a store's files say of it."""
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def check_columns(wanted: Iterable[str], present: Collection[str], address: str) -> None:
    """Raise StoreError if the store lacks a wanted column."""
    for name in wanted:
        if name not in present:
            raise StoreError(missing(address, name, present, RENAMED.get(name, "")))


class MemoryStore:
    """A store that holds its samples, and pickles with them.

    Args:
        images: encoded images, or None for a missing one; views of others' memory are copied.
        labels: one for each image: integers, which are classes, or floats, or arrays of one shape; None = a store
            without labels.
        classes: class names, position = label.
        columns: extra columns, name → one value per image. Numbers, and arrays (n, …), become numpy arrays.
        group_size: samples per group, the last one may be smaller; None for a store without groups.
    """

    def __init__(
        self,
        images: Sequence[bytes | memoryview | None],
        labels: Sequence[int] | np.ndarray | None,
        classes: Sequence[str] | None = None,
        columns: Mapping[str, Sequence[Any] | np.ndarray] | None = None,
        group_size: int | None = None,
    ) -> None:
        self._columns: dict[str, Any] = {
            "image": [bytes(image) if isinstance(image, memoryview) else image for image in images]
        }
        self.label_is_class = True
        if labels is not None:
            numbers = exactly(labels)
            self.label_is_class = (numbers.ndim == 1 and numbers.dtype.kind in "iub") or not numbers.size
            self._columns["label"] = exactly(numbers, np.int64) if self.label_is_class else numbers
        for name, values in (columns or {}).items():
            self._columns[name] = exactly(values) if _are_numbers(values) else list(values)
        for name, values in self._columns.items():
            if len(values) != len(self):
                raise ValueError(f"column {name!r} has {len(values)} values for {len(self)} images")
        self.columns = tuple(self._columns)
        self.classes = None if classes is None else tuple(classes)
        self.groups: np.ndarray | None = None
        if group_size is not None:
            if group_size < 1:
                raise ValueError(f"group_size must be at least 1, not {group_size}")
            self.groups = np.append(np.arange(0, len(self), group_size, dtype=np.int64), len(self))
        self.fingerprint = self._hash(group_size)
        self.address = f"memory:{self.fingerprint[:8]}"

    def __len__(self) -> int:
        return len(self._columns["image"])

    def read(self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")) -> Columns:
        """Read samples, see `Store.read`."""
        wanted = check_indices(indices, len(self), self.address)
        check_columns(columns, self.columns, self.address)
        return {
            name: values[wanted] if isinstance(values, np.ndarray) else [values[i] for i in wanted.tolist()]
            for name, values in ((name, self._columns[name]) for name in columns)
        }

    def close(self) -> None:
        """Do nothing: there are no files."""

    def _hash(self, group_size: int | None) -> str:
        digest = hashlib.blake2b(repr((self.classes, group_size)).encode(), digest_size=16)
        for name, values in self._columns.items():
            digest.update(repr((name, len(values))).encode())
            if isinstance(values, np.ndarray):
                digest.update(str(values.dtype).encode() + values.tobytes())
                continue
            for value in values:
                content = value if isinstance(value, bytes) else repr(value).encode()
                digest.update(f"{type(value).__name__}:{len(content)}:".encode())
                digest.update(content)
        return digest.hexdigest()


def _are_numbers(values: Sequence[Any] | np.ndarray) -> bool:
    if isinstance(values, np.ndarray):
        return values.dtype.kind in "biuf"
    return len(values) > 0 and all(isinstance(value, int | float | np.number) for value in values)
