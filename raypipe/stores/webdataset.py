"""Samples of a tar of WebDataset: consecutive members whose names are equal up to the first dot.

    000123.jpg    the image: the first member with an image suffix
    000123.cls    the label, an integer in ASCII; without it, the field `label` of 000123.json, which may also be
                  a float, or a list of numbers; without both, 000123.label, an integer in ASCII
    000123.txt    a column `txt` of strings; the same for text, transcript, html, htm, json and jsn
    000123.npy    the image, as an array, if no sample of the tar has an image of another suffix
    000123.npy    a column `npy` of bytes; the same for any other suffix

A suffix is everything after the first dot, in lower case, as in WebDataset. A suffix that all samples have becomes
a column; others are left out and counted. A key that appears again after a different key starts a new sample.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from raypipe.errors import StoreError
from raypipe.stores.addresses import is_left_out
from raypipe.stores.base import ARRAY_SUFFIX, IMAGE_SUFFIXES, RENAMED, missing
from raypipe.stores.class_folders import LeftOut
from raypipe.stores.numbers import exactly

TEXT_SUFFIXES = frozenset({"txt", "text", "transcript", "html", "htm", "json", "jsn"})
_SIMPLE_IMAGES = frozenset(suffix[1:] for suffix in IMAGE_SUFFIXES)
_WEBDATASET_SKIPS = re.compile(r"__[^/]*__(/|$)")
_INTEGER = re.compile(rb"[+-]?[0-9]{1,19}")
_MAX_LABEL_BYTES = 64
_MAX_JSON_BYTES = 1 << 20  # a larger one is not searched for a label

Place = tuple[int, int, float]
"""Position of a member's data, num_bytes, mtime."""

Read = Callable[[int, int], bytes]
"""Function that returns bytes of a tar: their number, offset → bytes, fewer at the end."""

Scan = dict[str, Any]
"""Return value of `find_samples` or of `class_tar.find_files`, which consists of JSON values."""


def _label(key: str, members: Mapping[str, Place], column: str, read: Read) -> Any:
    """Return a sample's label, a number or a list, or None; raise ValueError if it is anything else."""
    suffix = _label_suffix(column)
    label: Any = None
    content = {} if suffix in members else _json_of(members, read)
    if column not in content:
        suffix = suffix if suffix in members else column.lower()
        if suffix not in members:
            return None
        position, num_bytes, _ = members[suffix]
        text = read(min(num_bytes, _MAX_LABEL_BYTES), position).strip()
        if _INTEGER.fullmatch(text) and num_bytes <= _MAX_LABEL_BYTES:
            label = int(text)
        if not _is_number(label):
            raise ValueError(
                f"the label {key}.{suffix} must be an integer of 64 bits, got {text!r}"
            )
    else:
        label = content[column]
        if isinstance(label, list) and label and all(map(_is_number, label)):
            return label
        if not _is_number(label):
            raise ValueError(
                f"the label {column!r} of {key}.json must be a number of 64 bits, or a list of such numbers, "
                f"got {label!r:.300}"
            )
    return label


def _json_of(members: Mapping[str, Place], read: Read) -> dict[str, Any]:
    """Return the fields of a sample's JSON; none if it is missing or damaged."""
    content: Any = None
    position, num_bytes, _ = members.get("json", (0, 0, 0.0))
    if num_bytes <= _MAX_JSON_BYTES:
        with contextlib.suppress(ValueError, RecursionError):
            content = json.loads(read(num_bytes, position))
    return content if isinstance(content, dict) else {}


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 63
    return type(value) is float and math.isfinite(value)


def _labels_of(name: str, shards: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Return the labels of all shards: integers as int64 (N,), floats as float64 (N,), lists as numbers (N, …)."""
    labels = [label for shard in shards for label in shard["labels"]]
    try:
        numbers = exactly(labels)
        if numbers.dtype.kind not in "biuf":
            raise ValueError(f"they hold {numbers.dtype}")
        return numbers
    except ValueError as error:
        raise StoreError(
            f"{name}: its labels and those of the other shards do not form an array ({error}). If they are lists "
            "of different lengths, name the field in store.columns, with a length, not in store.target_column"
        ) from None


def _label_suffix(column: str) -> str:
    return "cls" if column == "label" else column.lower()


def find_samples(
    name: str,
    entries: Sequence[tuple[str, Place | None]],
    read: Read,
    image_column: str,
    target_column: str,
    needs_labels: bool = True,
) -> Scan | None:
    """Group a tar's members into samples; None if it is no WebDataset: no label, and not every image has text.

    Args:
        name: name of the tar, for errors.
        entries: its members in order: names, and the places of regular files.
        read: reads the tar.
        image_column: the suffix of the images; "image" = any image suffix.
        target_column: the suffix of the labels, or their field in the JSON; "label" = as above; empty = as
            "label", but wrong and missing labels are allowed.
        needs_labels: whether images need labels or texts to be a WebDataset.

    Returns:
        labels: the label of each sample; None without labels.
        places: suffix → position and num_bytes of each sample's member, as a flat list, -1 for no member; "" is
            the image.
        num, first_key: number of samples, and key of the first, for errors.
        left_out: how many members are neither, by suffix.
        digest: hash over the members' names, sizes and modification times, and the labels.

    Raises:
        StoreError: samples lack labels or a requested column, or have a member twice.
    """
    problem = ""
    is_needed = bool(target_column)
    target_column = target_column or "label"
    samples: list[tuple[str, dict[str, Place]]] = []
    for key, group in itertools.groupby(_parts(entries), key=lambda part: part[0]):
        members: dict[str, Place] = {}
        for _, suffix, place in group:
            if suffix in members:
                problem = problem or f"sample {key!r} has two members .{suffix}"
            members[suffix] = place
        samples.append((key, members))
    images = [_image_of(members, image_column.lower()) for _, members in samples]
    if not any(images) and image_column == "image":
        images = [_image_of(members, ARRAY_SUFFIX[1:]) for _, members in samples]
    try:
        labels = [_label(key, members, target_column, read) for key, members in samples]
    except ValueError as error:
        if is_needed:
            raise _bad(name, str(error), target_column) from None
        labels = [None] * len(samples)
    if not is_needed and None in labels:
        labels = [None] * len(samples)
    labelled = any(label is not None for label in labels)
    for column, usual, is_there in (
        (image_column, "image", any(images)),
        (target_column, "label", labelled),
    ):
        if samples and column != usual and not is_there:
            _, members = samples[0]
            raise StoreError(
                missing(
                    name, column, [*members, *_json_of(members, read)], RENAMED[usual]
                )
            )
    texts = {
        not TEXT_SUFFIXES.isdisjoint(members)
        for (_, members), i in zip(samples, images, strict=True)
        if i
    }
    if not labelled and texts != {True} and (needs_labels or not any(images)):
        return None
    if labelled and None in labels and not problem:
        problem = f"sample {samples[labels.index(None)][0]!r} has no label, but others have one"
    if problem:
        raise _bad(name, problem, target_column)
    others = set(samples[0][1]).intersection(*(members for _, members in samples))
    others -= {images[0] or "", _label_suffix(target_column), "image", "label"}
    suffixes = [suffix for suffix in samples[0][1] if suffix in others]
    digest = hashlib.blake2b(digest_size=16)
    places: dict[str, list[int]] = {suffix: [] for suffix in ("", *suffixes)}
    left_out: Counter[str] = Counter(_uncounted(entries))
    for (key, members), image, label in zip(samples, images, labels, strict=True):
        used = {
            image,
            *suffixes,
            *(_used_for_label(members, target_column) if labelled else ()),
        }
        left_out.update(f".{suffix}" for suffix in members if suffix not in used)
        for suffix, flat_places in places.items():
            flat_places += members.get(suffix or image or "", (-1, -1))[:2]
        parts = [
            f"\0{suffix}\0{num_bytes}\0{mtime}"
            for suffix, (_, num_bytes, mtime) in members.items()
        ]
        digest.update(
            f"{key}\0{label}{''.join(parts)}\n".encode(errors="surrogateescape")
        )
    return {
        "num": len(samples),
        "labels": labels if labelled else None,
        "places": places,
        "first_key": samples[0][0],
        "left_out": left_out,
        "digest": digest.hexdigest(),
    }


def _used_for_label(members: Mapping[str, Place], column: str) -> set[str]:
    suffixes = {_label_suffix(column), column.lower()} & members.keys()
    return suffixes or {"json"}


def _uncounted(entries: Sequence[tuple[str, Place | None]]) -> Iterator[str]:
    """Yield why a member belongs to no sample, for each that does not."""
    for name, place in entries:
        if not place:
            continue
        if not is_visible(PurePosixPath(name)):
            yield "hidden or of the system"
        elif not _part_of(name):
            yield "without a key and a suffix"


def _parts(
    entries: Sequence[tuple[str, Place | None]],
) -> Iterator[tuple[str, str, Place]]:
    """Yield key, suffix and place of each member that counts."""
    for name, place in entries:
        part = _part_of(name)
        if place and part and is_visible(PurePosixPath(name)):
            yield *part, place


def _part_of(name: str) -> tuple[str, str] | None:
    """Return a member's key and suffix; None if it belongs to no sample."""
    folder, slash, file = name.rpartition("/")
    stem, _, suffix = file.partition(".")
    if not stem or not suffix or _WEBDATASET_SKIPS.match(name):
        return None
    return folder + slash + stem, suffix.lower()


def is_visible(name: PurePosixPath) -> bool:
    """Return whether a member counts: hidden ones do not, nor those that systems add."""
    return not any(map(is_left_out, name.parts))


def _image_of(members: Mapping[str, Place], suffix: str) -> str | None:
    if suffix != "image":
        return suffix if suffix in members else None
    # `jpg` takes precedence over `depth.png`.
    images = [
        suffix for suffix in members if suffix.rpartition(".")[2] in _SIMPLE_IMAGES
    ]
    return min(images, key=lambda suffix: "." in suffix, default=None)


def _bad(name: str, problem: str, target_column: str) -> StoreError:
    return StoreError(
        f"{name}: {problem}. Each sample of a WebDataset tar has one .cls or one field "
        f"{target_column!r} in its .json, and its members must be consecutive (tar --sort=name)"
    )


def index_samples(
    names: Sequence[str], scans: Sequence[Scan]
) -> tuple[dict[str, np.ndarray], LeftOut]:
    """Return the columns of several tars, image and label first, and what only some of the tars have; names are
    for errors.

    Labels are numbers, (N,) or (N, …). Other columns are places, int64 of shape (N, 2): position and num_bytes of
    each sample's member, -1 for no member. A suffix that all tars have is a column.
    """
    labelled = [scan["labels"] is not None for scan in scans]
    if any(labelled) and not all(labelled):
        number = labelled.index(False)
        first = scans[number]["first_key"]
        raise StoreError(
            f"{names[number]}: sample {first!r} has no label, but samples of other shards have one"
        )
    columns = {
        suffix or "image": np.concatenate(
            [np.array(scan["places"][suffix], np.int64) for scan in scans]
        )
        for suffix in scans[0]["places"]
        if all(suffix in scan["places"] for scan in scans)
    }
    left_out = LeftOut()
    for scan in scans:
        left_out.update(
            {
                f".{suffix}": scan["num"]
                for suffix in scan["places"]
                if (suffix or "image") not in columns
            }
        )
    places = {name: flat.reshape(-1, 2) for name, flat in columns.items()}
    if not labelled[0]:
        return places, left_out
    return {
        "image": places.pop("image"),
        "label": _labels_of(names[0], scans),
        **places,
    }, left_out
