"""A finished micro-batch as a file; see `raypipe.streaming.memory.made_folder`.

magic, checksum and length of the header | header, JSON | the arrays of its row, see `raypipe.streaming.row`
"""

from __future__ import annotations

import json
import mmap
import struct
import zlib
from collections.abc import Iterable
from dataclasses import asdict, replace

import numpy as np

from raypipe.plan.places import MicroBatchId
from raypipe.streaming.bad_samples import BadSample
from raypipe.streaming.row import batches_of, block_row
from raypipe.transform.fields import MicroBatch

Finished = tuple[MicroBatch, list[BadSample]]
"""A micro-batch, and its bad samples."""

_MAGIC = b"raypipe4"
_HEAD = struct.Struct("<8sQQ")
_ALIGNED = 64
_PAGE = 4096


def packed(finished: Finished, key: bytes) -> list[bytes | memoryview]:
    """Return a file's content, in pieces."""
    batch, bad = finished
    row = block_row([batch])
    header = {
        "key": key.hex(),
        "bad": [asdict(sample) for sample in bad],
        "arrays": [[name, array.dtype.str, array.shape] for name, array in row.items()],
        "checksum": _checksum(row.values()),
    }
    text = json.dumps(header).encode()
    text += b" " * (-(_HEAD.size + len(text)) % _ALIGNED)
    pieces: list[bytes | memoryview] = [
        _HEAD.pack(_MAGIC, zlib.crc32(text), len(text)),
        text,
    ]
    for array in row.values():
        pieces.append(_bytes_of(array).data)
        pieces.append(bytes(-array.nbytes % _ALIGNED))
    return pieces


def unpacked(content: mmap.mmap, key: bytes, position: MicroBatchId) -> Finished:
    """Return the micro-batch of a file at a place, and its bad samples there; its arrays are views of the file.

    Raises:
        ValueError, KeyError, TypeError, struct.error: the file is damaged, or of another key.
    """
    magic, checksum, length = _HEAD.unpack_from(content)
    start = _HEAD.size + length
    text = content[_HEAD.size : start]
    if magic != _MAGIC or zlib.crc32(text) != checksum:
        raise ValueError("its header's checksum is wrong")
    header = json.loads(text)
    if header["key"] != key.hex():
        raise ValueError("it has the content of another key")
    row = dict[str, np.ndarray]()
    for name, dtype, shape in header["arrays"]:
        count = int(np.prod(shape, dtype=np.int64))
        row[name] = np.frombuffer(content, dtype, count, start).reshape(shape)
        start += -(-row[name].nbytes // _ALIGNED) * _ALIGNED
    if _checksum(row.values()) != header["checksum"]:
        raise ValueError("the checksum of its arrays is wrong")
    (batch,) = batches_of(row)
    bad = [replace(BadSample(**sample), position=position) for sample in header["bad"]]
    return replace(batch, position=position, num_remembered=1), bad


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _checksum(arrays: Iterable[np.ndarray]) -> int:
    """Return the CRC of the sums of the arrays' pages, which costs a tenth of the CRC of all bytes."""
    checksum = 0
    for array in arrays:
        content = _bytes_of(array)
        end = len(content) // _PAGE * _PAGE
        words = content[:end].view(np.uint64).reshape(-1, _PAGE // 8)
        checksum = zlib.crc32(words.sum(axis=1).data, checksum)
        checksum = zlib.crc32(content[end:].data, checksum)
    return checksum
