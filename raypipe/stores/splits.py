"""The split that a file's name tells of.

Data sets come in files named by their split, `train-00000-of-00002.parquet`, which often lie in one folder. A
folder is one store, so it must hold one split, whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from raypipe.errors import StoreError

PART_OF = re.compile(r"(?P<split>.+)-(?P<number>\d{5,})-of-(?P<num>\d{5,})(?![^.\-])")
"""train-00000-of-00002.parquet, train-00000-of-00002-0123456789abcdef.parquet, train-00000-of-01024"""
_SPLIT = re.compile(r"(train|training|test|testing|val|valid|validation|eval|dev)(?![a-z])", re.IGNORECASE)


def check_one_split(address: str, names: Iterable[str]) -> None:
    """Raise StoreError unless a folder's files are of one split, as far as their names tell, and all of it."""
    splits: dict[str, list[str]] = {}
    for name in names:
        splits.setdefault(_split_of(name), []).append(name)
    named = {split: sorted(files) for split, files in splits.items() if split}
    if len(named) > 1:
        found = ", ".join(f"{split} ({len(files)})" for split, files in sorted(named.items()))
        example = sorted(named)[-1]
        raise StoreError(
            f"{address} holds files of several splits: {found}. A store is one of them: "
            f"{_one_of(address.rstrip('/'), example, named[example])}"
        )
    for split, files in named.items():
        parts = [match for name in files if (match := PART_OF.match(name))]
        if parts and len({match["number"] for match in parts}) < int(parts[0]["num"]):
            raise StoreError(
                f"{address} holds {len(parts)} of the {int(parts[0]['num'])} files of {split}: fetch the others, "
                "or say by a pattern, such as train-0*, that you mean those"
            )


def _split_of(name: str) -> str:
    part = PART_OF.match(name)
    if part:
        return part["split"]
    split = _SPLIT.match(name)
    return split[1].lower() if split else ""


def _one_of(folder: str, split: str, names: list[str]) -> str:
    """How to give one split of a folder."""
    suffix = PurePosixPath(names[0]).suffix
    if len(names) == 1:
        return f"give {folder}/{names[0]}"
    if suffix in (".lmdb", ".tar", ".zip"):  # no patterns
        return "put each into a folder of its own"
    return f"give {folder}/{split}*{suffix}, in quotes"
