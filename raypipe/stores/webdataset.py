"""Samples of a tar of WebDataset: members whose names are equal up to the first dot.

    000123.jpg    the image: the first member with an image suffix
    000123.cls    the label, an integer in ASCII; without it, the field `label` of 000123.json, which may also be
                  a float, or a list of numbers; without both, 000123.label, an integer in ASCII
    000123.txt    a column `txt` of strings; the same for text, transcript, html, htm, json and jsn
    000123.npy    the image, as an array, if no sample of the tar has an image of another suffix
    000123.npy    a column `npy` of bytes; the same for any other suffix

A suffix is everything after the first dot, in lower case, as in WebDataset. A suffix that all samples have becomes
a column, one of text also if some lack it; others are left out and counted. A key that appears again, with a
suffix that its sample has already, starts a new sample.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from raypipe.errors import StoreError
from raypipe.section import shown
from raypipe.stores.addresses import is_left_out
from raypipe.stores.base import (
    ARRAY_SUFFIX,
    IMAGE_SUFFIXES,
    RENAMED,
    missing,
)
from raypipe.stores.class_folders import LeftOut
from raypipe.stores.numbers import exactly
from raypipe.stores.record import Fingerprint

TEXT_SUFFIXES = frozenset({"txt", "text", "transcript", "html", "htm", "json", "jsn"})
_IMAGE = ""  # stands for the suffix of a sample's image
_SIMPLE_IMAGES = frozenset(suffix[1:] for suffix in IMAGE_SUFFIXES)
_WEBDATASET_SKIPS = re.compile(r"__[^/]*__(/|$)")
_INTEGER = re.compile(rb"[+-]?[0-9]{1,19}")
_MAX_LABEL_BYTES = 64
_MAX_JSON_BYTES = 1 << 20  # a larger one is not searched for a label

Place = tuple[int, int, int]
"""Position of a member's data, num_bytes, and a hash of when it was modified."""

MISSING: Place = (-1, -1, 0)
"""The place of no member."""

Read = Callable[[int, int], bytes]
"""Function that returns bytes of a tar: their number, offset → bytes, fewer at the end."""


class Scan(NamedTuple):
    """The samples of a tar, or the members of one of class folders.

    Attributes:
        keys: the samples' keys or paths, see `as_texts`.
        places: suffix → the `Place` of each sample's member, int64 (n, 3), or `MISSING`; "" is the image.
        labels: numbers, or lists of them; None without labels.
        kinds: the kinds of the members of class folders, see `raypipe.stores.class_folders.Entry`.
        left_out: how many members are neither, by suffix.
        sparse: the parts of each sparse member, by its position.
        tar: size and version of the tar, in an index.
    """

    keys: pa.LargeBinaryArray
    places: dict[str, np.ndarray]
    labels: list[Any] | None = None
    kinds: pa.LargeBinaryArray | None = None
    left_out: Mapping[str, int] = {}
    sparse: Mapping[str, list[list[int]]] = {}
    tar: Sequence[int | str] = ()


class Indexed(NamedTuple):
    """The samples of several tars.

    Attributes:
        columns: image and label first. Labels are numbers, (N,) or (N, …); other columns are places, int64 (N, 2):
            position and num_bytes of each sample's member, -1 for no member.
        keys: the samples' keys or paths, see `as_texts`.
        nums: samples of each tar.
        left_out: members outside of the samples.
        fingerprint: see `Store`.
        sparse: the sparse members of each tar.
        classes: class names of class folders; None = they have none.
        told: what `check_classes` returns.
    """

    columns: dict[str, np.ndarray]
    keys: pa.LargeBinaryArray
    nums: list[int]
    left_out: Mapping[str, int]
    fingerprint: str
    sparse: list[Mapping[str, list[list[int]]]]
    classes: tuple[str, ...] | None = None
    told: Sequence[Any] = ("", [])


class _Sample(NamedTuple):
    """A sample of a tar: its key, and where the data of its members are, by suffix."""

    key: str
    members: dict[str, Place]


def _label(sample: _Sample, column: str, read: Read) -> Any:
    """Return a sample's label, a number or a list, or None; raise ValueError if it is anything else."""
    key, members = sample
    suffix = _label_suffix(column)
    content = {} if suffix in members else _json_of(members, read)
    if column in content:
        label = content[column]
    else:
        suffix = suffix if suffix in members else column.lower()
        if suffix not in members:
            return None
        position, num_bytes, _ = members[suffix]
        label = read(min(num_bytes, _MAX_LABEL_BYTES), position).strip()
        if _INTEGER.fullmatch(label) and num_bytes <= _MAX_LABEL_BYTES:
            label = int(label)
    numbers = label if isinstance(label, list) and label else [label]
    if not all(map(_is_number, numbers)):
        where = f"{column!r} of {key}.json" if column in content else f"{key}.{suffix}"
        raise ValueError(
            f"the label {where} must be an integer of 64 bits, or in JSON a number or a list of numbers of 64 "
            f"bits, got {label!r:.300}"
        )
    return label


def _json_of(members: Mapping[str, Place], read: Read) -> dict[str, Any]:
    """Return the fields of a sample's JSON; none if it is missing or damaged."""
    content: Any = None
    position, num_bytes, _ = members.get("json", (0, 0, 0))
    if num_bytes <= _MAX_JSON_BYTES:
        with contextlib.suppress(ValueError, RecursionError):
            content = json.loads(read(num_bytes, position))
    return content if isinstance(content, dict) else {}


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 63
    return type(value) is float and math.isfinite(value)


def _labels_of(names: Sequence[str], scans: Sequence[Scan]) -> np.ndarray | None:
    """Return the labels of all tars: integers as int64 (N,), floats as float64 (N,), lists as numbers (N, …)."""
    if all(scan.labels is None for scan in scans):
        return None
    labels: list[Any] = []
    for name, scan in zip(names, scans, strict=True):
        if scan.labels is None:
            (first,) = as_names(scan.keys[:1])
            raise StoreError(
                f"{name}: sample {shown(first)} has no label, but samples of other shards have one"
            )
        labels += scan.labels
    try:
        numbers = exactly(labels)
        if numbers.dtype.kind not in "biuf":
            raise ValueError(f"they hold {numbers.dtype}")
        return numbers
    except ValueError as error:
        raise StoreError(
            f"{names[0]}: its labels and those of the other shards do not form an array ({error}). If they are "
            "lists of different lengths, name the field in store.columns, with a length, not in "
            "store.target_column"
        ) from None


def _label_suffix(column: str) -> str:
    return "cls" if column == "label" else column.lower()


def find_samples(
    name: str,
    entries: Sequence[tuple[str, Place | str]],
    read: Read,
    image_column: str,
    target_column: str,
    needs_labels: bool = True,
) -> Scan | None:
    """Group a tar's members into samples; None if it is no WebDataset: no label, and not every image has text.

    Args:
        name: name of the tar, for errors.
        entries: its members in order: names, and places, or in words what has none.
        read: reads the tar.
        image_column: the suffix of the images; "image" = any image suffix.
        target_column: the suffix of the labels, or their field in the JSON; "label" = as above; empty = as
            "label", but wrong and missing labels are allowed.
        needs_labels: whether images need labels or texts to be a WebDataset.

    Raises:
        StoreError: samples lack labels or a requested column, or have a member twice.
    """
    counted, left_out = _counted(entries)
    samples, problem = _grouped(counted)
    if not samples:
        return None
    has_images = _name_images(samples, image_column)
    labels = _read_labels(name, samples, target_column, read)
    target_column = target_column or "label"
    for usual, column, is_there in (
        ("image", image_column, has_images),
        ("label", target_column, labels is not None),
    ):
        if column != usual and not is_there:
            members = samples[0].members
            present = [*filter(None, members), *_json_of(members, read)]
            raise StoreError(missing(name, column, present, RENAMED[usual]))
    if labels is None:
        if not has_images or (needs_labels and not _all_have_texts(samples)):
            return None
    elif None in labels and not problem:
        key = samples[labels.index(None)].key
        problem = f"sample {shown(key)} has no label, but others have one"
    if problem:
        raise _bad(name, problem, target_column)
    label_suffixes = (_label_suffix(target_column), target_column.lower())
    nums = Counter(suffix for _, members in samples for suffix in members)
    for suffix in dict.fromkeys(("image", "label", *label_suffixes)):
        num = nums.pop(suffix, 0)  # it is no column
        if num and (labels is None or suffix not in label_suffixes):
            left_out[f".{suffix}"] = num
    return Scan(
        keys=as_texts(sample.key for sample in samples),
        places={suffix: _places(samples, suffix) for suffix in (_IMAGE, *nums)},
        labels=labels,
        left_out=left_out,
    )


def _places(samples: Sequence[_Sample], suffix: str) -> np.ndarray:
    """Return the place of each sample's member of a suffix."""
    return np.array([members.get(suffix, MISSING) for _, members in samples], np.int64)


def as_texts(names: Iterable[str]) -> pa.LargeBinaryArray:
    """Return names as an Arrow array; those of a tar may be bytes that are no UTF-8."""
    encoded = [name.encode(errors="surrogateescape") for name in names]
    return pa.array(encoded, pa.large_binary())


def as_names(texts: pa.LargeBinaryArray) -> list[str]:
    """Return the names that `as_texts` was given."""
    return [text.decode(errors="surrogateescape") for text in texts.to_pylist()]


def _grouped(counted: Sequence[tuple[str, str, Place]]) -> tuple[list[_Sample], str]:
    """Return the samples of a tar's members, and which one has a suffix twice, in words; empty if none has."""
    samples: list[_Sample] = []
    by_key: dict[str, _Sample] = {}
    problem = ""
    for key, group in itertools.groupby(counted, key=lambda file: file[0]):
        members: dict[str, Place] = {}
        for _, suffix, location in group:
            if suffix in members:
                problem = problem or f"sample {shown(key)} has two members .{suffix}"
            members[suffix] = location
        before = by_key.get(key)
        if before is not None and before.members.keys().isdisjoint(members):
            before.members.update(members)  # the tar is not sorted by name
            continue
        by_key[key] = _Sample(key, members)
        samples.append(by_key[key])
    return samples, problem


def _name_images(samples: Sequence[_Sample], image_column: str) -> bool:
    """Give the images the suffix _IMAGE; arrays are images if nothing else is. Return whether there are any."""
    suffix = image_column.lower()
    images = [_image_of(members, suffix) for _, members in samples]
    if image_column == "image" and not any(images):
        images = [_image_of(members, ARRAY_SUFFIX[1:]) for _, members in samples]
    for (_, members), image in zip(samples, images, strict=True):
        if image:
            members[_IMAGE] = members.pop(image)
    return any(images)


def _read_labels(
    name: str, samples: Sequence[_Sample], target_column: str, read: Read
) -> list[Any] | None:
    """Return the label of each sample, None for a missing one; None instead of a list without labels.

    Without a target column, labels count only if all samples have one.
    """
    column = target_column or "label"
    try:
        labels = [_label(sample, column, read) for sample in samples]
    except ValueError as error:
        if target_column:
            raise _bad(name, str(error), column) from None
        return None
    num_missing = labels.count(None)
    if num_missing == len(labels) or (num_missing and not target_column):
        return None
    return labels


def _all_have_texts(samples: Sequence[_Sample]) -> bool:
    """Return whether each sample with an image has a text too."""
    return not any(
        _IMAGE in members and TEXT_SUFFIXES.isdisjoint(members)
        for _, members in samples
    )


def _counted(
    entries: Sequence[tuple[str, Place | str]],
) -> tuple[list[tuple[str, str, Place]], LeftOut]:
    """Return key, suffix and place of each member that counts, and how many others do not, by the reason."""
    counted: list[tuple[str, str, Place]] = []
    left_out = LeftOut()
    for name, location in entries:
        names = _key_and_suffix(name)
        if isinstance(location, str):
            left_out[location] += 1
        elif any(map(is_left_out, name.split("/"))):
            left_out["hidden or of the system"] += 1
        elif names is None:
            left_out["without a key and a suffix"] += 1
        else:
            counted.append((*names, location))
    return counted, left_out


def _key_and_suffix(name: str) -> tuple[str, str] | None:
    """Return a member's key and suffix; None if it belongs to no sample."""
    folder, slash, file = name.rpartition("/")
    stem, _, suffix = file.partition(".")
    if not stem or not suffix or _WEBDATASET_SKIPS.match(name):
        return None
    return folder + slash + stem, suffix.lower()


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
        f"{target_column!r} in its .json"
    )


def index_samples(
    names: Sequence[str], scans: Sequence[Scan], classes: tuple[str, ...] | None = None
) -> Indexed:
    """Return the samples of several tars, of which a suffix that all have is a column; names are for errors."""
    labels = _labels_of(names, scans)
    left_out = LeftOut()
    for scan in scans:
        left_out.update(scan.left_out)
    columns: dict[str, np.ndarray] = {}
    for suffix in dict.fromkeys(itertools.chain(*(scan.places for scan in scans))):
        places = np.concatenate(
            [
                scan.places.get(suffix, np.tile(MISSING, (len(scan.keys), 1)))
                for scan in scans
            ]
        )
        is_there = places[:, 0] >= 0
        if suffix in (_IMAGE, *TEXT_SUFFIXES) or is_there.all():
            columns[suffix or "image"] = places
        else:
            left_out[f".{suffix}"] += int(is_there.sum())
        if not suffix and labels is not None:
            columns["label"] = labels
    keys = pa.concat_arrays([scan.keys for scan in scans])
    fingerprint = _fingerprint_of(keys, columns, classes)
    for name in columns.keys() - {"label"}:
        columns[name] = columns[name][:, :2]
    return Indexed(
        columns,
        keys,
        [len(scan.keys) for scan in scans],
        left_out,
        fingerprint,
        [scan.sparse for scan in scans],
        classes,
    )


def _fingerprint_of(
    keys: pa.LargeBinaryArray,
    columns: Mapping[str, np.ndarray],
    classes: tuple[str, ...] | None,
) -> str:
    """Return the fingerprint of samples: sizes and times of their members, and not where they are."""
    types = {name: str(values.dtype) for name, values in columns.items()}
    fingerprint = Fingerprint(types, classes)
    fingerprint.add(b"\0".join(keys.to_pylist()))
    for name, values in columns.items():
        facts = values if name == "label" else values[:, 1:]
        fingerprint.add(facts.tobytes())
    return fingerprint.hexdigest()
