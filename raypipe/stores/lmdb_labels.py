"""Keys of an LMDB file that another program wrote, and the labels that belong to them by name.

Labels are an array of int64, or of names of classes: dictionary-encoded, with all classes in order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypipe.errors import ConfigError, StoreError
from raypipe.storage.files import read_text
from raypipe.storage.filesystem import is_remote
from raypipe.stores.class_folders import BY_FOLDER, refuse_splits
from raypipe.stores.splits import splits_in

_LIST_SUFFIXES = (".txt", ".csv", ".tsv")
_LIST_INSIDE = "labels.txt"
_MAX_LIST_BYTES = 1 << 30  # a list of ten million keys of 100 bytes
_NAME = r"(^|/)[^/]*$"  # the last part of a key


def find_list(where: str, target_column: str) -> str:
    """Return the list of keys and labels that is named, or is next to a local LMDB; empty if there is none."""
    path = Path(where)
    if target_column in ("", BY_FOLDER):
        return ""
    if target_column.endswith(_LIST_SUFFIXES):
        if is_remote(target_column):
            return target_column
        return str(path.parent / target_column)  # an absolute path stays as it is
    if is_remote(where):
        return ""
    stem = path.stem if path.suffix in (".lmdb", ".mdb") else path.name
    lists = path / _LIST_INSIDE, path.with_name(f"{stem}.txt")
    return next((str(file) for file in lists if file.is_file()), "")


def rows_of(keys: pa.LargeBinaryArray, wanted: Sequence[bytes]) -> np.ndarray:
    """Return the row of each wanted key, int64 (n,), -1 for one that is not there."""
    rows = pc.index_in(pa.array(wanted, pa.large_binary()), value_set=keys)
    return rows.fill_null(-1).to_numpy().astype(np.int64)


def labels_of_folders(
    where: str, keys: pa.LargeBinaryArray, must_have: bool
) -> pa.DictionaryArray | None:
    """Return the class of each key `class/name.jpg`: the first folder that is not around all keys.

    Args:
        must_have: whether keys without such folders raise StoreError, and are not samples without labels.
    """
    folder_of_key = pc.replace_substring_regex(keys, _NAME, "").dictionary_encode()
    paths = [
        PurePosixPath(folder.decode(errors="backslashreplace")).parts
        for folder in folder_of_key.dictionary.to_pylist()
    ]
    depth = 0
    while (
        all(len(path) > depth + 1 for path in paths)
        and len({path[depth] for path in paths}) == 1
    ):
        depth += 1
    names = ["".join(path[depth : depth + 1]) for path in paths]
    classes = sorted(set(names))
    if len(classes) < 2 or "" in classes:
        if must_have:
            raise StoreError(
                f"{where} has keys such as {keys[0].as_py()[:64]!r}, not class/name.jpg of several classes: leave "
                "store.target_column out, or name a list of keys and labels, such as labels.txt"
            )
        return None
    if not must_have:
        refuse_splits(where, splits_in(classes))
    of_folder = _named(pa.array(names), classes)
    return of_folder.take(folder_of_key.indices)


def labels_of_list(where: str, address: str, keys: pa.LargeBinaryArray) -> pa.Array:
    """Return the labels that a list has for the keys: lines `KEY LABEL`, also with a tab or a comma between.

    Labels are integers, or names of classes. Lines of other keys are ignored.
    """
    try:
        text = read_text(address, _MAX_LIST_BYTES)
    except ConfigError as error:
        raise StoreError(str(error)) from error
    lines = text.removeprefix("\ufeff").splitlines()
    pairs = [_pair(line) for line in lines if line.strip()]
    label_of = dict(pairs)
    for key, label in pairs if len(label_of) < len(pairs) else ():
        if label != label_of[key]:
            raise StoreError(
                f"{address} has the labels {label!r:.100} and {label_of[key]!r:.100} for the key {key[:64]!r}: "
                "write one line for each key"
            )
    found = (label_of.get(key) or None for key in keys.to_pylist())
    labels = pa.array(found, pa.string())
    if labels.null_count:
        missing = keys.filter(labels.is_null())[0].as_py()
        raise StoreError(
            f"{address} has {len(pairs):,} lines, and none for the key {missing[:64]!r} of {where}: each key "
            "needs a line `KEY LABEL`. Set store.target_column to another list, to 'folder' for the folders in "
            "the keys, or to '' for images without labels"
        )
    with contextlib.suppress(pa.ArrowInvalid):
        return labels.cast(pa.int64())
    # Classes of the whole list: other files of the store may have other keys. A first line may be a heading.
    first = int(rows_of(keys, [pairs[0][0]])[0] < 0)
    return _named(labels, sorted({label for _, label in pairs[first:]}))


def _named(names: pa.StringArray, classes: Sequence[str]) -> pa.DictionaryArray:
    """Return names as those of classes."""
    every = pa.array(classes, pa.string())
    return pa.DictionaryArray.from_arrays(pc.index_in(names, every), every)


def _pair(line: str) -> tuple[bytes, str]:
    separator = next((mark for mark in "\t," if mark in line), None)
    key, _, label = (
        line.rpartition(separator) if separator else line.strip().rpartition(" ")
    )
    return key.strip().strip('"').encode(), label.strip().strip('"')
