"""Keys of an LMDB file that another program wrote, and the labels that belong to them by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypipe.errors import ConfigError, StoreError
from raypipe.storage.files import read_text
from raypipe.stores.class_folders import refuse_splits
from raypipe.stores.splits import splits_in

_MAX_LIST_BYTES = 1 << 30  # a list of ten million keys of 100 bytes
_NAME = r"(^|/)[^/]*$"  # the last part of a key


@dataclass(frozen=True)
class Labels:
    """Labels of a file's samples: int64 (n,), None if there are none; class names, position = label."""

    numbers: np.ndarray | None = None
    classes: tuple[str, ...] | None = None


def rows_of(keys: pa.LargeBinaryArray, wanted: Sequence[bytes]) -> np.ndarray:
    """Return the row of each wanted key, int64 (n,), -1 for one that is not there."""
    rows = pc.index_in(pa.array(wanted, pa.large_binary()), value_set=keys)
    return rows.fill_null(-1).to_numpy().astype(np.int64)


def labels_of_folders(where: str, keys: pa.LargeBinaryArray, must_have: bool) -> Labels:
    """Return the class of each key `class/name.jpg`: the first folder that is not around all keys.

    Args:
        must_have: whether keys without such folders raise StoreError, and are not samples without labels.
    """
    folder_of_key = pc.replace_substring_regex(keys, _NAME, "").dictionary_encode()
    paths = [
        PurePosixPath(folder.decode(errors="surrogateescape")).parts
        for folder in folder_of_key.dictionary.to_pylist()
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
                f"{where} has keys such as {keys[0].as_py()[:64]!r}, not class/name.jpg of several classes: leave "
                "store.target_column out, or name a list of keys and labels, such as labels.txt"
            )
        return Labels()
    if not must_have:
        refuse_splits(where, splits_in(classes))
    rank = {name: number for number, name in enumerate(classes)}
    numbers = np.array([rank[name] for name in names], np.int64)
    return Labels(numbers[folder_of_key.indices.to_numpy()], classes)


def labels_of_list(where: str, address: str, keys: pa.LargeBinaryArray) -> Labels:
    """Return the labels that a list has for the keys: lines `KEY LABEL`, also with a tab or a comma between.

    Labels are integers, or class names, whose classes are in the order of names. Lines of other keys are ignored.
    """
    try:
        text = read_text(address, _MAX_LIST_BYTES)
    except ConfigError as error:
        raise StoreError(str(error)) from error
    pairs = [_pair(line) for line in text.splitlines() if line.strip()]
    label_of = dict(pairs)
    labels = [label_of.get(key, "") for key in keys.to_pylist()]
    if "" in labels:
        missing = keys[labels.index("")].as_py()
        raise StoreError(
            f"{address} has {len(pairs):,} lines, and none for the key {missing[:64]!r} of {where}: each key "
            "needs a line `KEY LABEL`. Set store.target_column to another list, to 'folder' for the folders in "
            "the keys, or to '' for images without labels"
        )
    try:
        return Labels(np.array([int(label) for label in labels], np.int64))
    except (ValueError, OverflowError):
        # Classes of the whole list: other files of the store may have other keys. A first line may be a heading.
        first = int(rows_of(keys, [pairs[0][0]])[0] < 0)
        classes = tuple(sorted({label for _, label in pairs[first:]}))
        rank = {name: number for number, name in enumerate(classes)}
        return Labels(np.array([rank[label] for label in labels], np.int64), classes)


def _pair(line: str) -> tuple[bytes, str]:
    separator = next((mark for mark in "\t," if mark in line), None)
    key, _, label = (
        line.rpartition(separator) if separator else line.strip().rpartition(" ")
    )
    return key.strip().encode(), label.strip()
