"""The copy of one shard of a store: write a range of samples, and read it back to compare.

Both run as tasks and give up, between two chunks, as soon as the file `wanted` is gone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raypipe.commands.tasks import check_wanted
from raypipe.errors import ConfigError, SampleError, StoreError
from raypipe.stores import open_store, open_writer
from raypipe.stores.base import Store
from raypipe.transform.decode import decode, encode_jpeg, resize_short_side

# Samples per read: a few MB of JPEGs.
CHUNK = 64


@dataclass(frozen=True)
class Reencode:
    """Decode once and store smaller.

    Attributes:
        short_side: pixels of the shorter side; larger images are scaled down, smaller keep their size.
            0 = store the bytes as they are.
        quality: of the JPEG, 1 to 100.
    """

    short_side: int = 0
    quality: int = 90

    def __post_init__(self) -> None:
        if self.short_side < 0 or not 1 <= self.quality <= 100:
            raise ConfigError(
                f"short_side must be at least 0 and quality in [1, 100], got {self.short_side} and {self.quality}"
            )


def column_types(store: Store, reencode: Reencode | None = None) -> dict[str, str]:
    """The columns of a store with the types that writers know, found by its first samples.

    Raises:
        StoreError: there are no images, or a column holds something that writers do not know.
        ConfigError: images are to change their size, and lists, which may be boxes in their pixels, are not.
    """
    if "image" not in store.columns:
        raise StoreError(f"{store.address} has no column 'image'; its columns are: {', '.join(store.columns)}")
    first = store.read(np.arange(min(len(store), CHUNK)), store.columns)
    types: dict[str, str] = {}
    for name, values in first.items():
        value = next((value for value in values if value is not None), None)
        if name == "image":
            types[name] = "binary"
        elif isinstance(value, bool | int | np.integer | np.bool_):
            types[name] = "int64"
        elif isinstance(value, float | np.floating):
            types[name] = "float64"
        elif isinstance(value, bytes):
            types[name] = "binary"
        elif _is_json(value) and reencode and reencode.short_side:
            raise ConfigError(
                f"{store.address}: column {name!r} holds lists. If they are boxes, in pixels, they would no "
                "longer fit the images that --short-side makes smaller: leave it out"
            )
        elif isinstance(value, str) or _is_json(value):
            types[name] = "string"  # lists as JSON, which loses nothing: writers have no type for them
        else:
            raise StoreError(
                f"{store.address}: column {name!r} holds {type(value).__name__}; "
                "int, float, bytes and str columns, and lists of them but of bytes, can be copied"
            )
    return types


def write_shard(
    wanted: Path,
    store: Store,
    file: Path,
    start: int,
    stop: int,
    columns: dict[str, str],
    reencode: Reencode | None,
    on_bad_sample: str,
) -> Iterator[dict[str, Any]]:
    """Writes samples start … stop - 1; yields what each chunk wrote, and last the digest of all."""
    digest = Digest(columns)
    check_wanted(wanted)
    # Keys of WebDataset samples are then unique over all shards.
    options = {"first_key": start} if file.suffix == ".tar" else {}
    with open_writer(file, columns, store.classes, **options) as writer:
        for first in range(start, stop, CHUNK):
            check_wanted(wanted)
            indices = np.arange(first, min(stop, first + CHUNK))
            rows = store.read(indices, tuple(columns))
            done: dict[str, Any] = {"samples": 0, "bytes": 0, "skipped": [], "digest": "", "first": start}
            for row, index in enumerate(indices):
                sample = {name: rows[name][row] for name in columns}
                for name, value in sample.items():
                    if isinstance(value, bool | np.bool_):
                        sample[name] = int(value)  # as their column's type
                    elif isinstance(value, list | np.ndarray):
                        sample[name] = _as_json(value)
                try:
                    sample["image"] = _checked(sample["image"], reencode)
                except SampleError as error:
                    if on_bad_sample == "raise":
                        raise SampleError(
                            f"{store.address}: sample {index}: {error}. Leave such samples out with "
                            "--on-bad-sample skip"
                        ) from None
                    done["skipped"].append(f"sample {index}: {error}")
                    continue
                writer.append(sample)
                digest.add(sample)
                done["samples"] += 1
                done["bytes"] += len(sample["image"])
            yield done
    yield {"samples": 0, "bytes": 0, "skipped": [], "digest": digest.hex(), "first": start}


def _as_json(values: Any) -> str:
    return json.dumps(values, default=np.ndarray.tolist)


def _is_json(value: Any) -> bool:
    if not isinstance(value, list | np.ndarray):
        return False
    try:
        return bool(_as_json(value))
    except TypeError:  # bytes, dates and the like
        return False


def _checked(image: bytes | None, reencode: Reencode | None) -> bytes:
    if not image:
        raise SampleError("it has no bytes")
    if reencode is None or not reencode.short_side:
        return image
    pixels = decode(image, min_side=reencode.short_side)
    return encode_jpeg(resize_short_side(pixels, reencode.short_side), reencode.quality)


class Digest:
    """A hash over samples, in order: all columns, each as its type has it, and with its length.

    Args:
        columns: name → type, see `column_types`.
    """

    def __init__(self, columns: dict[str, str]) -> None:
        self._columns, self._hash = columns, hashlib.blake2b(digest_size=16)

    def add(self, sample: dict[str, Any]) -> None:
        for name, kind in self._columns.items():
            value = sample[name]
            if value is None:
                self._hash.update(b"\xff" * 8)  # a length that no value has
                continue
            if kind == "int64":
                data = str(int(value)).encode()
            elif kind == "float64":
                data = float(value).hex().encode()  # the source's may be a float32
            else:
                data = value if isinstance(value, bytes) else str(value).encode()
            self._hash.update(len(data).to_bytes(8, "little"))
            self._hash.update(data)

    def hex(self) -> str:
        return self._hash.hexdigest()


def digest_of(wanted: Path, file: Path, columns: dict[str, str]) -> str:
    """The digest of a shard as it reads back."""
    check_wanted(wanted)
    store, digest = open_store(file), Digest(columns)
    for first in range(0, len(store), CHUNK):
        check_wanted(wanted)
        rows = store.read(np.arange(first, min(len(store), first + CHUNK)), tuple(columns))
        for row in range(len(rows["image"])):
            digest.add({name: rows[name][row] for name in columns})
    store.close()
    return digest.hex()
