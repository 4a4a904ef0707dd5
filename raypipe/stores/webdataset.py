"""The samples of a tar in the WebDataset layout: members in a row whose names are equal up to the first dot.

    000123.jpg    the image: the first member whose suffix is that of an image
    000123.cls    the label, an integer in ASCII; without it, the field `label` of 000123.json
    000123.txt    a column `txt` of strings; so are text, transcript, html, htm, json and jsn
    000123.npy    a column `npy` of bytes: any other suffix

Suffixes are all that follows the first dot, in lower case, as WebDataset has them. A column is what all samples
have. A key that comes again, behind another one, is another sample.

A tar that raypipe wrote begins with a member `__raypipe__`, which WebDataset skips: JSON of version, count,
columns with their types, classes and fingerprint. Only there may a sample lack a column: it is None.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from raypipe.errors import StoreError
from raypipe.stores.archive import Index, Scan, is_visible, join_digests
from raypipe.stores.base import IMAGE_SUFFIXES, image_and_label_first
from raypipe.stores.record import DEFAULT_COLUMNS, NAME, Metadata

_LABEL_SUFFIX = "cls"
_TEXT_SUFFIXES = frozenset({"txt", "text", "transcript", "html", "htm", "json", "jsn"})
_SIMPLE_IMAGES = frozenset(suffix[1:] for suffix in IMAGE_SUFFIXES)
_WEBDATASET_SKIPS = re.compile(r"__[^/]*__(/|$)")
_INTEGER = re.compile(rb"[+-]?[0-9]{1,19}")
_MAX_LABEL_BYTES = 64
_MAX_JSON_BYTES = 1 << 20  # a label is not looked for in a larger one
_MAX_METADATA_BYTES = 64 << 20  # a million class names

# What an image's bytes start with → its suffix.
_MAGIC = {
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG": "png",
    b"RIFF": "webp",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II": "tif",
    b"MM": "tif",
}

Place = tuple[int, int, float]  # position of the data, num_bytes, mtime


class Grouper:
    """Makes samples of a tar's members, which it is given in their order.

    Whether the tar has the WebDataset layout shows in the end: what is wrong is kept until then.

    Args:
        name: of the tar, for errors.
        image_column: the suffix of the images; "image" = that of any image.
        label_column: the suffix of the labels, or their field in the JSON; "label" = as above.
        read: the num_bytes of the tar at a position.
    """

    def __init__(self, name: str, image_column: str, label_column: str, read: Callable[[int, int], bytes]) -> None:
        self._name, self._read = name, read
        self._image, self._label = image_column.lower(), label_column
        self._types: dict[str, str] | None = None
        self._classes: tuple[str, ...] | None = None
        self._count, self._num = 0, 0
        self._key, self._first_key = "", ""
        self._members: dict[str, Place] = {}
        self._places: dict[str, array[int]] = {}
        self._labels: array[int] = array("q")
        self._unlabelled = ""  # the first key without a label
        self._num_labelled = self._num_images = self._num_accompanied = 0
        self._problem = self._duplicate = ""
        self._hash = hashlib.blake2b(digest_size=16)

    def note(self, position: int, num_bytes: int) -> None:
        """Take the tar's first member for what raypipe's writer has noted.

        Raises:
            StoreError: it is damaged, or of another version.
        """
        if num_bytes > _MAX_METADATA_BYTES:
            raise StoreError(f"{self._name} has a {NAME} member of {num_bytes} bytes: ingest it again")
        found = Metadata.from_json(self._read(position, num_bytes), f"{self._name} has a bad {NAME} member")
        self._types, self._classes, self._count = found.types, found.classes, found.count
        self._hash.update(found.fingerprint.encode())
        extra = [name.lower() for name in self._types if name not in ("image", "label")]
        self._places = {suffix: array("q") for suffix in ("", *extra)}

    @property
    def is_certain(self) -> bool:
        """Whether the layout is WebDataset's for sure: raypipe wrote the tar, or there are labels."""
        return self._types is not None or self._num_labelled > 0 or bool(self._problem)

    def add(self, path: PurePosixPath, place: Place) -> None:
        """Take the next member, a regular file."""
        name = str(path)
        folder, slash, file = name.rpartition("/")
        stem, _, suffix = file.partition(".")
        if not stem or not suffix or _WEBDATASET_SKIPS.match(name) or not is_visible(path):
            return
        key, suffix = folder + slash + stem, suffix.lower()
        if key != self._key:
            self._finish()
            self._key = key
        elif suffix in self._members:
            self._members[suffix] = place  # in class folders the last of a name counts
            self._duplicate = f"sample {key!r} has two members .{suffix}"
            return
        self._members[suffix] = place

    def _finish(self) -> None:
        """Make a sample of the members of one key."""
        members, self._members = self._members, {}
        if not members:
            return
        if not self._num:
            self._first_key = self._key
        image = self._image_of(members)
        self._num_images += image is not None
        self._num_accompanied += image is not None and not _TEXT_SUFFIXES.isdisjoint(members)
        label = self._label_of(members)
        if not self._num and self._types is None:
            taken = {image, _LABEL_SUFFIX if self._label == "label" else self._label.lower()}
            names = [suffix for suffix in members if suffix not in taken | {"image", "label"}]
            self._places = {suffix: array("q") for suffix in ("", *names)}
        for suffix, places in list(self._places.items()):
            place = members.get(suffix or image or "")
            if place is None and suffix and self._types is None:
                del self._places[suffix]  # no column, as not all samples have it
                continue
            places.extend(place[:2] if place else (-1, -1))
        self._labels.append(label or 0)
        self._num += 1
        self._hash.update(f"{self._key}\0{label}".encode(errors="surrogateescape"))
        for suffix, (_, num_bytes, mtime) in members.items():
            self._hash.update(f"\0{suffix}\0{num_bytes}\0{mtime}".encode(errors="surrogateescape"))
        self._hash.update(b"\n")
        if label is None and not self._unlabelled:
            self._unlabelled = self._key
        self._num_labelled += label is not None

    def _image_of(self, members: dict[str, Place]) -> str | None:
        if self._image != "image":
            return self._image if self._image in members else None
        for suffix in members:  # `jpg` goes before `depth.png`
            if suffix in _SIMPLE_IMAGES:
                return suffix
        return next((suffix for suffix in members if suffix.rpartition(".")[2] in _SIMPLE_IMAGES), None)

    def _label_of(self, members: dict[str, Place]) -> int | None:
        if self._types is not None and "label" not in self._types and self._label == "label":
            return None
        suffix = _LABEL_SUFFIX if self._label == "label" else self._label.lower()
        if suffix in members:
            position, num_bytes, _ = members[suffix]
            text = self._read(position, min(num_bytes, _MAX_LABEL_BYTES)).strip()
            label = int(text) if _INTEGER.fullmatch(text) and num_bytes <= _MAX_LABEL_BYTES else None
            return self._checked(label, f"{self._key}.{suffix} is {text!r}")
        if "json" not in members or members["json"][1] > _MAX_JSON_BYTES:
            return None
        with contextlib.suppress(ValueError, RecursionError):
            content = json.loads(self._read(*members["json"][:2]))
            if isinstance(content, dict) and self._label in content:
                label = content[self._label]
                whole = isinstance(label, int) and not isinstance(label, bool)
                return self._checked(label if whole else None, f"{self._label!r} of {self._key}.json is {label!r}")
        return None

    def _checked(self, label: int | None, what: str) -> int | None:
        if label is not None and -(1 << 63) <= label < 1 << 63:
            return label
        self._problem = self._problem or f"the label {what:.300}, which is no integer of 64 bits"
        return None

    def result(self) -> Scan | None:
        """The samples of the tar, as JSON has them; None where its layout is not WebDataset's.

        Returns:
            num: how many samples.
            labels: of each; None where there are none.
            places: suffix → position and num_bytes of each sample's member, one behind the other, -1 where it has
                none; "" is the image.
            first_key: of the first sample, for errors; "" where there is none.
            types, classes: as raypipe's writer has noted them; None where it was another.
            digest: hash over the members' names, sizes and times of change, the labels, and what the writer noted.

        Raises:
            StoreError: some samples have a label, and others none or a bad one; a member is there twice; raypipe
                wrote another number of samples.
        """
        self._finish()
        accompanied = 0 < self._num_images == self._num_accompanied
        if not self.is_certain and not accompanied:
            return None
        if self._types is not None and self._num != self._count:
            raise StoreError(
                f"{self._name} holds {self._num} samples, but was written with {self._count}: ingest it again"
            )
        problem = self._problem or self._duplicate
        needed = self._num_labelled or (self._types is not None and "label" in self._types)
        if not problem and needed and self._unlabelled:
            problem = f"sample {self._unlabelled!r} has no label, and others have one"
        if problem:
            raise StoreError(
                f"{self._name}: {problem}. Each sample of a WebDataset tar has one .{_LABEL_SUFFIX} or one field "
                f"{self._label!r} in its .json, and its members stand one behind the other (tar --sort=name)"
            )
        return {
            "num": self._num,
            "labels": self._labels.tolist() if needed else None,
            "places": {suffix: places.tolist() for suffix, places in self._places.items()},
            "first_key": self._first_key,
            "types": self._types,
            "classes": self._classes and list(self._classes),
            "digest": self._hash.hexdigest(),
        }


def index_samples(names: Sequence[str], scans: Sequence[Scan]) -> Index:
    """The index of tars in the WebDataset layout: samples are in the order of the tars and of their members.

    Args:
        names: of the tars, for errors.
        scans: of each, {"samples": what `Grouper.result` returns}.

    Raises:
        StoreError: some have labels and others none, or they differ in what raypipe has noted of them.
    """
    shards = [scan["samples"] for scan in scans]
    written, classes = shards[0]["types"], shards[0]["classes"]
    for name, shard in zip(names, shards, strict=True):
        if (shard["types"], shard["classes"]) != (written, classes):
            raise StoreError(
                f"{name} and {names[0]} differ in columns or classes; all shards of one store have the same"
            )
    filled = [(name, shard) for name, shard in zip(names, shards, strict=True) if shard["num"]]
    labelled = [shard["labels"] is not None for _, shard in filled]
    if any(labelled) and not all(labelled):
        name, shard = filled[labelled.index(False)]
        raise StoreError(f"{name}: sample {shard['first_key']!r} has no label, and those of other shards have one")
    types = written or _types([shard for _, shard in filled], any(labelled))
    places = {}
    for column in types:
        if column != "label":
            suffix = "" if column == "image" else column.lower()
            parts = [np.array(shard["places"][suffix], np.int64) for _, shard in filled]
            places[column] = np.concatenate([np.empty(0, np.int64), *parts]).reshape(-1, 2)
    labels = [np.array(shard["labels"] or [], np.int64) for shard in shards]
    return Index(
        types={name: types[name] for name in image_and_label_first(types)},
        classes=None if classes is None else tuple(classes),
        labels=np.concatenate(labels) if "label" in types else None,
        places=places,
        bounds=np.cumsum([0] + [shard["num"] for shard in shards]),
        fingerprint=join_digests([shard["digest"] for shard in shards]),
    )


def _types(shards: Sequence[Scan], labelled: bool) -> dict[str, str]:
    """The columns that all shards have."""
    types = {"image": "binary", "label": "int64"} if labelled else {"image": "binary"}
    for suffix in shards[0]["places"]:
        if suffix and all(suffix in shard["places"] for shard in shards):
            types[suffix] = "string" if suffix in _TEXT_SUFFIXES else "binary"
    return types


def suffixes_of(types: Mapping[str, str]) -> dict[str, str]:
    """Column → suffix of its members, of all columns but the image.

    Raises:
        StoreError: a column's name can be no suffix.
    """
    taken = {_LABEL_SUFFIX, *_SIMPLE_IMAGES}
    suffixes = {"label": _LABEL_SUFFIX}
    for name in types:
        if name in DEFAULT_COLUMNS:
            continue
        suffix = name.lower()
        if not name.isprintable() or not name or "/" in name or suffix in taken:
            raise StoreError(
                f"column {name!r} cannot be written to a tar, where its name is the suffix of its members: it is "
                "another's, that of images or labels, or has characters that no suffix has. Rename it"
            )
        taken.add(suffix)
        suffixes[name] = suffix
    return suffixes


def encode_sample(
    sample: Mapping[str, Any], types: Mapping[str, str], suffixes: Mapping[str, str]
) -> dict[str, bytes]:
    """The members of a sample: suffix → content, of each column that is not None.

    Numbers are written in ASCII, strings in UTF-8; bytes that are no image at all as they came, as `jpg`.
    """
    members = {}
    for name, value in sample.items():
        if value is None:
            continue
        if name == "image":
            suffix = next((suffix for magic, suffix in _MAGIC.items() if value.startswith(magic)), "jpg")
            members[suffix] = bytes(value)
        elif types[name] == "int64":
            members[suffixes[name]] = str(int(value)).encode()
        elif types[name] == "float64":
            members[suffixes[name]] = repr(float(value)).encode()
        else:
            members[suffixes[name]] = value.encode() if types[name] == "string" else bytes(value)
    return members
