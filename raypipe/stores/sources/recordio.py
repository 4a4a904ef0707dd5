"""MXNet's RecordIO, as im2rec writes it, without MXNet; with or without the .idx next to it.

    uint32 magic | 3 bits: whole, first, middle or last part, 29 bits: length | data, padded to 4 bytes

A record with the magic in it is cut there into parts. The data of an image are

    uint32 flag | float32 label | uint64 id, id2 | float32 labels (flag) | encoded image

With a flag of 0 `label` is a number, else the labels. Whole numbers are classes. Records without an image, as the
face data sets have them around their images, are passed over.
"""

from __future__ import annotations

import contextlib
import io
import logging
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from raypipe.errors import ConfigError, StoreError
from raypipe.storage.files import read_text
from raypipe.stores.base import MAX_SAMPLE_BYTES, ColumnValues
from raypipe.stores.sources.format_source import (
    Asked,
    Source,
    check_unasked,
    explained,
    opened,
    size_of,
)

logger = logging.getLogger(__name__)

_MAGIC = 0xCED7230A
_MAGIC_BYTES = struct.pack("<I", _MAGIC)
_HEAD = struct.Struct("<II")
_IMAGE_HEAD = struct.Struct("<IfQQ")
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)
_MAX_INDEX_BYTES = 1 << 30


def open_recordio(address: str, asked: Asked) -> Source:
    """Open one .rec. Several labels are an array; without a target they are a column `labels`, a list."""
    check_unasked("MXNet RecordIO", asked)
    num_records = None
    with contextlib.suppress(ConfigError):  # the file has no index
        text = read_text(f"{address.removesuffix('.rec')}.idx", _MAX_INDEX_BYTES)
        num_records = sum(1 for line in text.splitlines() if line.strip())
    samples = _samples(address, num_records, has_label=bool(asked.label))
    return Source(samples, num_samples=num_records)


def _samples(
    address: str, num_indexed: int | None, has_label: bool
) -> Iterator[ColumnValues]:
    num_records = 0
    num_empty = 0
    num_labels = -1
    for data in _records(address):
        where = f"{address}, record {num_records}"
        num_records += 1
        with explained(f"{where},"):
            flag, label, sample_id, _ = _IMAGE_HEAD.unpack_from(data)
            labels = np.frombuffer(data, "<f4", flag, _IMAGE_HEAD.size).copy()
        image = data[_IMAGE_HEAD.size + labels.nbytes :]
        if not image:
            num_empty += 1
            continue
        sample: dict[str, Any] = {"image": image, "id": sample_id}
        if not has_label:
            if flag:
                sample["labels"] = labels.tolist()
            yield sample
            continue
        if num_labels not in (-1, flag):
            raise StoreError(
                f"{where}, has {flag} labels and others {num_labels}, as in object detection: set "
                "store.target_column to '', and they become a column `labels`"
            )
        num_labels = flag
        sample["label"] = labels
        if flag < 2:
            number = labels[0].item() if flag else label
            sample["label"] = int(number) if number.is_integer() else number
        yield sample
    if num_empty:
        logger.warning(
            "%s: passed over %s records without an image", address, f"{num_empty:,}"
        )
    if num_indexed is not None and num_records < num_indexed:
        raise StoreError(
            f"{address} has {num_records} records, and its .idx names {num_indexed}; copy it again"
        )


def _records(address: str) -> Iterator[bytes]:
    with opened(address) as file:
        num_bytes = size_of(file)
        parts: list[bytes] = []
        while head := file.read(_HEAD.size):
            start = file.tell() - len(head)
            magic, word = _HEAD.unpack(head)
            kind = word >> 29
            length = word & (1 << 29) - 1
            if (
                magic != _MAGIC
                or kind > _LAST
                or (kind in (_WHOLE, _FIRST)) == bool(parts)
            ):
                raise StoreError(
                    f"{address} is damaged, or is not MXNet RecordIO, at byte {start}; copy it again"
                )
            if (
                length > num_bytes - file.tell()
                or sum(map(len, parts)) + length > MAX_SAMPLE_BYTES
            ):
                raise StoreError(
                    f"{address} is truncated, or has a record over 512 MiB, at byte {start}"
                )
            parts.append(file.read(length))
            file.seek(-length % 4, io.SEEK_CUR)
            if kind in (_WHOLE, _LAST):
                yield _MAGIC_BYTES.join(parts)
                parts = []
        if parts:
            raise StoreError(
                f"{address} is truncated in its last record; copy it again"
            )
