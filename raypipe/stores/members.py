"""Where the samples of archives are, and which are those of class folders: `class/image.jpg`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np

from raypipe.errors import StoreError
from raypipe.stores.base import IMAGE_SUFFIXES

Members = dict[str, tuple[float, ...]]
"""Name → (position, num_bytes, and what else tells its content from another's: time, checksum, …)."""


@dataclass(frozen=True)
class Index:
    """The samples of one archive or of several, one archive after the other.

    Attributes:
        types: all columns, name → one of `raypipe.stores.record.COLUMN_TYPES`, image and label first.
        classes: class names, position = label; None where they are not named.
        labels: int64 of shape (N,); None where there are none.
        places: of each column but the label: int64 of shape (N, k), a row per sample: position and num_bytes of
            its member, -1 where it has none, and what else its kind of archive has.
        bounds: int64 of shape (num_archives + 1,): the first sample of each archive, and N.
        fingerprint: 32 hex digits.
    """

    types: dict[str, str]
    classes: tuple[str, ...] | None
    labels: np.ndarray | None
    places: dict[str, np.ndarray]
    bounds: np.ndarray
    fingerprint: str


def is_visible(name: PurePosixPath) -> bool:
    """Whether a member counts: not if it is hidden, or its name is absolute or leads out of its folder."""
    return not name.is_absolute() and not any(part.startswith(".") or part == "__MACOSX" for part in name.parts)


def is_image(name: PurePosixPath) -> bool:
    """Whether a member may be a sample of class folders."""
    return name.suffix.lower() in IMAGE_SUFFIXES and is_visible(name)


def index_class_folders(address: str, shards: Sequence[Members], num: int, hint: str = "") -> Index:
    """The index of archives of class folders: samples are sorted by archive, by class, then by name.

    Args:
        address: of the store, for errors.
        shards: the images of each archive.
        num: how many of the numbers of each become a row of `Index.places`.
        hint: what else such archives may hold, for errors.

    Raises:
        StoreError: there are no class folders with images.
    """
    found = _by_class(address, shards, hint)
    classes = tuple(sorted({label for samples in found for label, _ in samples}))
    class_labels = {name: label for label, name in enumerate(classes)}
    labels = np.array([class_labels[label] for samples in found for label, _ in samples], dtype=np.int64)
    places = [shard[name][:num] for shard, samples in zip(shards, found, strict=True) for _, name in samples]
    digests = [_digest(shard, samples) for shard, samples in zip(shards, found, strict=True)]
    return Index(
        types={"image": "binary", "label": "int64"},
        classes=classes,
        labels=labels,
        places={"image": np.array(places, dtype=np.int64)},
        bounds=np.cumsum([0] + [len(samples) for samples in found]),
        fingerprint=join_digests(digests),
    )


def _by_class(address: str, shards: Iterable[Members], hint: str) -> list[list[tuple[str, str]]]:
    """(class, name) of all samples of each archive, sorted."""
    shards = list(shards)
    depth, shared = 0, [name.split("/") for members in shards for name in members if "/" in name]
    if not shared:
        where = "only images at its top, so their labels are unknown" if any(shards) else "no images"
        raise StoreError(f"{address} has {where}: the layout is class/image.jpg, maybe below common folders{hint}")
    # A folder that all share is a wrapper such as `train/`, as long as a class folder is left below it.
    while len({names[depth] for names in shared}) == 1 and min(map(len, shared)) > depth + 2:
        depth += 1
    return [sorted((name.split("/")[depth], name) for name in members if "/" in name) for members in shards]


def _digest(members: Members, samples: list[tuple[str, str]]) -> str:
    lines = ("\0".join(map(str, (name, *members[name][1:]))) for _, name in samples)
    return hash_of("".join(f"{line}\n" for line in lines).encode(errors="surrogateescape"))


def join_digests(digests: Sequence[str]) -> str:
    """The fingerprint of a store whose archives have these."""
    return digests[0] if len(digests) == 1 else hash_of("".join(digests).encode())


def hash_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
