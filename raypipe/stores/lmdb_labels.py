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
from raypipe.stores.lmdb_file import Entries
from raypipe.stores.splits import splits_in

_MAX_LIST_BYTES = 1 << 30  # a list of ten million keys of 100 bytes
_ROWS_AT_ONCE = 100_000


@dataclass(frozen=True)
class Labels:
    """Labels of a file's samples: int64 (n,), None if there are none; class names, position = label."""

    numbers: np.ndarray | None = None
    classes: tuple[str, ...] | None = None


class KeyTable:
    """Keys of a file's samples.

    Args:
        content: the bytes of all keys, end to end, uint8.
        starts: where each key begins, and the last one ends, int64 (n + 1,).
    """

    def __init__(self, content: np.ndarray, starts: np.ndarray) -> None:
        self.content = content
        self.starts = starts

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def key_bytes(self) -> np.ndarray:
        """Return the length of each key."""
        return np.diff(self.starts)

    def key(self, row: int) -> bytes:
        return self.content[self.starts[row] : self.starts[row + 1]].tobytes()

    def keys(self, rows: np.ndarray) -> list[bytes]:
        """Return the keys of some rows."""
        bounds = zip(
            self.starts[rows].tolist(), self.starts[rows + 1].tolist(), strict=True
        )
        return [self.content[start:stop].tobytes() for start, stop in bounds]

    def all_keys(self) -> list[bytes]:
        whole = self.content.tobytes()
        return [whole[start:stop] for start, stop in pairwise(self.starts.tolist())]

    def spread(self, num: int) -> list[int]:
        """Return some rows, from everywhere."""
        if len(self):
            return np.unique(np.linspace(0, len(self) - 1, num).astype(int)).tolist()
        return []

    def reordered(self, order: np.ndarray) -> KeyTable:
        """Return the keys of these rows, in this order."""
        sizes = self.key_bytes[order]
        starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        content = np.empty(int(starts[-1]), np.uint8)
        for first in range(0, len(order), _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            # Byte b of the result comes from byte b + shift of its key's row.
            shifts = self.starts[order[rows]] - starts[:-1][rows]
            start = starts[first]
            stop = starts[min(rows.stop, len(order))]
            sources = np.repeat(shifts, sizes[rows]) + np.arange(start, stop)
            content[start:stop] = self.content[sources]
        return KeyTable(content, starts)

    def hash(self, value_sizes: np.ndarray) -> bytes:
        """Return a hash of all keys and of the lengths of all values."""
        digest = hashlib.blake2b(digest_size=16)
        sizes = self.key_bytes.astype(np.int32)
        for array in (self.content, sizes, value_sizes.astype(np.uint32)):
            digest.update(len(array).to_bytes(8, "little"))
            digest.update(array.tobytes())
        return digest.digest()

    def numbers(self) -> np.ndarray | None:
        """Return the keys as decimal numbers; None if one of them is not, or they are too long."""
        is_digit = (self.content >= ord("0")) & (self.content <= ord("9"))
        if not is_digit.all() or self.key_bytes.max(initial=0) > 18:
            return None
        return self._padded().astype(np.int64)

    def rows(self, keys: Sequence[bytes]) -> np.ndarray:
        """Return the row of each of these keys, -1 for one that is not there; this table's keys must ascend."""
        if not len(self) or not len(keys):
            return np.full(len(keys), -1, np.int64)
        if any(key[-1:] == b"\0" for key in keys):  # numpy ignores zeros at the end
            by_key = {key: row for row, key in enumerate(self.all_keys())}
            return np.array([by_key.get(key, -1) for key in keys], np.int64)
        own_keys = self._padded()
        sought = np.array(keys)
        rows = np.minimum(np.searchsorted(own_keys, sought), len(own_keys) - 1)
        return np.where(own_keys[rows] == sought, rows, -1)

    def _padded(self) -> np.ndarray:
        """Return the keys as an array of bytes, which compares as LMDB does."""
        sizes = self.key_bytes
        longest = max(1, int(sizes.max(initial=1)))
        padded = np.zeros((len(sizes), longest), np.uint8)
        padded[np.arange(longest) < sizes[:, None]] = self.content
        return padded.view(f"S{longest}")[:, 0]


def table_of(batches: Sequence[Entries]) -> tuple[KeyTable, np.ndarray]:
    """Return the keys of entries, and the lengths of their values, uint32 (n,)."""
    content = np.frombuffer(b"".join(batch.keys for batch in batches), np.uint8)
    none = np.empty(0, np.uint32)
    key_sizes = np.concatenate([none, *(batch.key_sizes for batch in batches)])
    value_sizes = np.concatenate([none, *(batch.value_sizes for batch in batches)])
    starts = np.concatenate([[0], np.cumsum(key_sizes, dtype=np.int64)])
    return KeyTable(content, starts), value_sizes


def labels_of_folders(where: str, table: KeyTable, must_have: bool) -> Labels:
    """Return the class of each key `class/name.jpg`: the first folder that is not around all keys.

    Args:
        must_have: whether keys without such folders raise StoreError, and are not samples without labels.
    """
    folders: dict[bytes, int] = {}
    numbers = np.empty(0, np.int64)
    if any(b"/" in table.key(row) for row in table.spread(16)):
        keys = table.all_keys()
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
    if not must_have:
        refuse_splits(where, splits_in(classes))
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
    lines = np.full(len(table), -1, np.int64)
    is_sample = rows >= 0
    lines[rows[is_sample]] = np.flatnonzero(is_sample)
    if (lines < 0).any():
        missing = table.key(int(np.flatnonzero(lines < 0)[0]))
        raise StoreError(
            f"{address} has {len(pairs):,} lines, and none for the key {missing[:64]!r} of {where}: each key "
            "needs a line `KEY LABEL`. Set store.target_column to another list, to 'folder' for the folders in "
            "the keys, or to '' for images without labels"
        )
    labels = [pairs[line][1] for line in lines.tolist()]
    try:
        return Labels(np.array([int(label) for label in labels], np.int64))
    except (ValueError, OverflowError):
        # Classes of the whole list: other files of the store may have other keys. A first line may be a heading.
        first = 0 if rows[0] >= 0 else 1
        classes = tuple(sorted({label for _, label in pairs[first:]}))
        rank = {name: number for number, name in enumerate(classes)}
        return Labels(np.array([rank[label] for label in labels], np.int64), classes)


def _pair(line: str) -> tuple[bytes, str]:
    separator = next((mark for mark in "\t," if mark in line), None)
    key, _, label = (
        line.rpartition(separator) if separator else line.strip().rpartition(" ")
    )
    return key.strip().encode(), label.strip()
