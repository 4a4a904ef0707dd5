"""Keys of an LMDB file that another program wrote, as arrays, and the labels that belong to them by name."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath

import numpy as np

from raypipe.errors import ConfigError, StoreError
from raypipe.storage.files import read_text
from raypipe.stores.class_folders import refuse_splits
from raypipe.stores.lmdb_pages import Leaf

_MAX_LIST_BYTES = 1 << 30  # a list of ten million keys of 100 bytes


@dataclass(frozen=True)
class Labels:
    """Labels of a file's samples: int64 (n,), None if there are none; class names, position = label."""

    numbers: np.ndarray | None = None
    classes: tuple[str, ...] | None = None


class KeyTable:
    """Keys of samples in ascending order, and the lengths of their values, while a file is listed."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._key_bytes: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []
        self._joined: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def add(self, leaf: Leaf, slots: np.ndarray) -> None:
        """Add entries of a page."""
        starts = leaf.key_starts[slots]
        sizes = leaf.key_bytes[slots]
        before = np.cumsum(sizes) - sizes
        places = np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()))
        self._parts.append(np.frombuffer(leaf.page, np.uint8)[places])
        self._key_bytes.append(sizes.astype(np.int32))
        self._lengths.append(leaf.lengths[slots].astype(np.uint32))

    def __len__(self) -> int:
        return len(self.key_bytes)

    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if self._joined is None:
            content = np.concatenate([np.empty(0, np.uint8), *self._parts])
            key_bytes = np.concatenate([np.empty(0, np.int32), *self._key_bytes])
            self._joined = (
                content,
                key_bytes,
                np.concatenate([[0], np.cumsum(key_bytes, dtype=np.int64)]),
            )
            self._parts = []
            self._key_bytes = []
        return self._joined

    @property
    def key_bytes(self) -> np.ndarray:
        """Return the length of each key."""
        return self._arrays()[1]

    def key(self, row: int) -> bytes:
        content, _, starts = self._arrays()
        return content[starts[row] : starts[row + 1]].tobytes()

    def keys(self) -> list[bytes]:
        content, _, starts = self._arrays()
        whole = content.tobytes()
        bounds = starts.tolist()
        return [whole[start:stop] for start, stop in pairwise(bounds)]

    def spread(self, most: int) -> list[int]:
        """Return some rows, from everywhere."""
        if len(self):
            return np.unique(np.linspace(0, len(self) - 1, most).astype(int)).tolist()
        return []

    def hash(self) -> bytes:
        """Return a hash of all keys and of the lengths of all values."""
        content, key_bytes, _ = self._arrays()
        digest = hashlib.blake2b(digest_size=16)
        for part in (
            content,
            key_bytes,
            np.concatenate([np.empty(0, np.uint32), *self._lengths]),
        ):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part.tobytes())
        return digest.digest()

    def numbers(self) -> np.ndarray | None:
        """Return the keys as decimal numbers; None if one of them is not, or they are too long."""
        content, key_bytes, _ = self._arrays()
        if (
            not ((content >= ord("0")) & (content <= ord("9"))).all()
            or key_bytes.max(initial=0) > 18
        ):
            return None
        return self._padded().astype(np.int64)

    def rows(self, keys: Sequence[bytes]) -> np.ndarray:
        """Return the row of each of these keys, -1 for one that is not there."""
        if not len(self) or not len(keys):
            return np.full(len(keys), -1, np.int64)
        if any(key[-1:] == b"\0" for key in keys):  # numpy ignores zeros at the end
            by_key = {key: row for row, key in enumerate(self.keys())}
            return np.array([by_key.get(key, -1) for key in keys], np.int64)
        known = self._padded()
        wanted = np.array(keys)
        rows = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        return np.where(known[rows] == wanted, rows, -1)

    def _padded(self) -> np.ndarray:
        """Return the keys as an array of bytes, which compares as LMDB does."""
        content, key_bytes, _ = self._arrays()
        longest = max(1, int(key_bytes.max(initial=1)))
        padded = np.zeros((len(key_bytes), longest), np.uint8)
        padded[np.arange(longest) < key_bytes[:, None]] = content
        return padded.view(f"S{longest}")[:, 0]


def labels_of_folders(where: str, table: KeyTable, must_have: bool) -> Labels:
    """Return the class of each key `class/name.jpg`: the first folder that is not around all keys.

    Args:
        must_have: whether keys without such folders raise StoreError, and are not samples without labels.
    """
    folders: dict[bytes, int] = {}
    numbers = np.empty(0, np.int64)
    if any(b"/" in table.key(row) for row in table.spread(16)):
        keys = table.keys()
        ids = [
            folders.setdefault(key.rpartition(b"/")[0], len(folders)) for key in keys
        ]
        numbers = np.array(ids, np.int64)
    paths = [
        PurePosixPath(folder.decode(errors="surrogateescape")).parts
        for folder in folders
    ]
    depth = 0
    while (
        all(len(path) > depth + 1 for path in paths)
        and len({path[depth] for path in paths}) == 1
    ):
        depth += 1
    names = [path[depth] if len(path) > depth else "" for path in paths]
    classes = tuple(sorted(set(names)))
    if len(classes) < 2 or "" in classes:
        if must_have:
            raise StoreError(
                f"{where} has keys such as {table.key(0)[:64]!r}, not class/name.jpg of several classes: leave "
                "store.target_column out, or name a list of keys and labels, such as labels.txt"
            )
        return Labels()
    refuse_splits(where, classes)
    rank = {name: number for number, name in enumerate(classes)}
    return Labels(np.array([rank[name] for name in names], np.int64)[numbers], classes)


def labels_of_list(where: str, address: str, table: KeyTable) -> Labels:
    """Return the labels that a list has for the keys: lines `KEY LABEL`, also with a tab or a comma between.

    Labels are integers, or class names, whose classes are in the order of names. Lines of other keys are ignored.
    """
    try:
        text = read_text(address, _MAX_LIST_BYTES)
    except ConfigError as error:
        raise StoreError(str(error)) from error
    pairs = [_pair(line) for line in text.splitlines() if line.strip()]
    rows = table.rows([key for key, _ in pairs])
    places = np.full(len(table), -1, np.int64)
    found = np.flatnonzero(rows >= 0)
    places[rows[found]] = found
    if (places < 0).any():
        missing = table.key(int(np.flatnonzero(places < 0)[0]))
        raise StoreError(
            f"{address} has {len(pairs):,} lines, and none for the key {missing[:64]!r} of {where}: each key "
            "needs a line `KEY LABEL`. Set store.target_column to another list, to 'folder' for the folders in "
            "the keys, or to '' for images without labels"
        )
    labels = [pairs[place][1] for place in places.tolist()]
    try:
        return Labels(np.array([int(label) for label in labels], np.int64))
    except (ValueError, OverflowError):
        # Classes of the whole list: other files of the store may have other keys. A first line may be a heading.
        first = 0 if rows[0] >= 0 else 1
        classes = tuple(sorted({label for _, label in pairs[first:]}))
        rank = {name: number for number, name in enumerate(classes)}
        return Labels(np.array([rank[label] for label in labels], np.int64), classes)


def _pair(line: str) -> tuple[bytes, str]:
    separator = next((each for each in "\t," if each in line), None)
    key, _, label = (
        line.rpartition(separator) if separator else line.strip().rpartition(" ")
    )
    return key.strip().encode(), label.strip()
