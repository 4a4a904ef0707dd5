"""The samples of opened tars, read by position: from local tars, or from those and parts in the node's cache."""

from __future__ import annotations

import itertools
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from raypipe.errors import StoreError
from raypipe.storage.byte_ranges import ByteRanges, ByteRangesReader
from raypipe.storage.files import RemoteFile
from raypipe.storage.local_cache import Unpacked, shared_cache
from raypipe.storage.local_file import OpenFile
from raypipe.storage.read_limit import GROWTH, read_limit
from raypipe.storage.retries import in_threads
from raypipe.stores.arrow_values import array_type
from raypipe.stores.base import (
    MAX_SAMPLE_BYTES,
    Columns,
    PartedStore,
    as_text,
    hash_of_facts,
)
from raypipe.stores.tar_index import Tar
from raypipe.stores.webdataset import TEXT_SUFFIXES, Indexed, as_names

GROUP_BYTES = 8 << 20
"""Bytes of a group's members, of which the order of a run in windows is a function."""
# Gaps up to this size are fetched too: a request takes as long as half a MiB or more.
_GAP_BYTES = 64 << 10
_NUM_WITH_HOLES = 64  # sparse members that a read may have, each of which is almost nothing in its tar


Reader = OpenFile | ByteRangesReader


class TarSamples(PartedStore):
    """The tars of a store, and the index of their samples."""

    def __init__(
        self,
        tars: Sequence[Tar],
        indexed: Indexed,
        in_groups: bool,
    ) -> None:
        self._tars = tars
        self._sparse = indexed.sparse
        # A name in a tar may be bytes that are no UTF-8, which Arrow's names are.
        self._index = {
            name.encode("utf-8", "backslashreplace").decode(): places
            for name, places in indexed.columns.items()
        }
        self.classes = indexed.classes and tuple(indexed.classes)
        self.schema = pa.schema(
            [(name, _type_of(name, values)) for name, values in self._index.items()]
        )
        self.fingerprint = indexed.fingerprint
        self.written = hash_of_facts([tar.written for tar in tars])
        bounds = np.cumsum([0, *indexed.nums])
        self._keys = indexed.keys
        self.groups = self._groups_of(bounds) if in_groups else None
        # Samples from self.offsets[i] on are read from one file or part, of tar self._numbers[i].
        self.offsets = bounds if self.groups is None else self.groups
        self._numbers = np.searchsorted(bounds, self.offsets[:-1], "right") - 1
        self._ranges: dict[tuple[int, tuple[str, ...]], ByteRanges] = {}

    def _groups_of(self, bounds: np.ndarray) -> np.ndarray:
        """Return the offsets of the groups, which depend only on sizes: about 8 MiB, or whole compressed tars."""
        sizes = np.zeros(bounds[-1], np.int64)
        for name, places in self._index.items():
            # texts that some samples lack are read with the rest, and move no group
            if name == "image" or (name != "label" and (places[:, 0] >= 0).all()):
                sizes += np.clip(places[:, 1], 0, MAX_SAMPLE_BYTES)
        starts = [np.empty(0, np.int64)]
        for tar, first, last in zip(self._tars, bounds[:-1], bounds[1:], strict=True):
            before = np.cumsum(sizes[first:last]) - sizes[first:last]
            if isinstance(tar, Unpacked):
                before[:] = 0
            of_group = before // GROUP_BYTES
            starts.append(first + np.flatnonzero(np.diff(of_group, prepend=-1)))
        return np.append(np.concatenate(starts), bounds[-1]).astype(np.int64)

    def read(self, indices: np.ndarray, columns: tuple[str, ...]) -> Columns:
        placed = _placed(columns)
        if placed and not self.is_at_hand(indices, columns):
            # several are fetched at a time
            numbers = [number for number, _ in self.by_part(indices)]
            in_threads(lambda number: self._reader(number, placed, True), numbers)
        return super().read(indices, columns)

    def _read(
        self, number: int, rows: np.ndarray, columns: tuple[str, ...]
    ) -> dict[str, Any]:
        placed = _placed(columns)
        shard = self._numbers[number]
        name = self._tars[shard].address
        sparse = self._sparse[shard]
        reader: Any = self._reader(number, placed, may_fetch=True) if placed else None
        found: dict[str, Any] = {}
        for column in columns:
            values: Any = self._index[column][rows + self.offsets[number]]
            if column != "label":
                values = [
                    _content(reader, name, sparse, *place) for place in values.tolist()
                ]
            if column in TEXT_SUFFIXES:
                values = map(as_text, values)
            if column not in ("label", "image"):
                values = pa.array(values, self.schema.field(column).type)
            found[column] = values
        return found

    def _reader(
        self, number: int, placed: tuple[str, ...], may_fetch: bool = False
    ) -> Reader | None:
        """Return the open file or part that a run of samples is in; None if it would have to be fetched."""
        tar = self._tars[self._numbers[number]]
        if isinstance(tar, OpenFile):
            return tar
        cache = shared_cache()
        find = cache.get if may_fetch else cache.find
        if self.groups is None or isinstance(tar, Unpacked):
            return find(tar, OpenFile)
        if (whole := cache.find(tar, OpenFile)) is not None:
            return whole
        part = self._ranges_of(number, placed, tar)
        return find(part, lambda path: ByteRangesReader(path, part))

    def _ranges_of(
        self, number: int, placed: tuple[str, ...], tar: RemoteFile
    ) -> ByteRanges:
        """Return the bytes of a group's members and their headers, joined across small gaps."""
        key = number, placed
        if key in self._ranges:
            return self._ranges[key]
        first, last = self.offsets[number : number + 2]
        places = [self._index[name][first:last].tolist() for name in placed]
        sparse = self._sparse[self._numbers[number]]
        ranges = list[tuple[int, int]]()
        for start, size in sorted(itertools.chain(*places)):
            stored = sum(length for _, length in sparse.get(str(start), [[0, size]]))
            begin = max(start - tarfile.BLOCKSIZE, 0)  # the header has the name
            end = min(start + stored, tar.num_bytes)
            if start < 0 or not 0 <= size <= MAX_SAMPLE_BYTES or begin >= end:
                continue
            if ranges and begin <= ranges[-1][1] + _GAP_BYTES:
                begin, last_end = ranges.pop()
                end = max(end, last_end)
            ranges.append((begin, end))
        self._ranges[key] = ByteRanges(tar, tuple(ranges))
        return self._ranges[key]

    def is_at_hand(self, indices: np.ndarray, columns: tuple[str, ...]) -> bool:
        """Return whether the files or parts of samples are in the node's cache, or on its disk."""
        placed = _placed(columns)
        parts = self.by_part(indices)
        return all(self._reader(number, placed) is not None for number, _ in parts)

    def names(self, indices: np.ndarray) -> list[str]:
        """Return the keys or paths of samples."""
        return as_names(self._keys.take(pa.array(indices)))

    def sample_name(self, index: int) -> str:
        tar = self._tars[self._numbers[self.part_of(index)[0]]]
        (key,) = as_names(self._keys[index : index + 1])
        return f"{tar.address}, {key}"


def _placed(columns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns that are members of a tar."""
    return tuple(name for name in columns if name != "label")


def _type_of(name: str, values: np.ndarray) -> pa.DataType:
    """Return the type of a column, from its values if they are labels."""
    if name == "label":
        return array_type(values.dtype, values.shape[1:])
    return pa.string() if name in TEXT_SUFFIXES else pa.binary()


def _content(
    file: Reader,
    name: str,
    sparse: Mapping[str, list[list[int]]],
    start: int,
    num_bytes: int,
) -> bytes | None:
    """Return the bytes of a member; None for no member, more than 512 MiB, or holes beyond the limit of a read."""
    parts = sparse.get(str(start)) if sparse else None
    stored_bytes = num_bytes
    if parts is not None:
        stored_bytes = sum(length for _, length in parts)
        limit = max(read_limit() // _NUM_WITH_HOLES, GROWTH * stored_bytes)
        if num_bytes > limit:
            return None
    if num_bytes < 0 or max(num_bytes, stored_bytes) > MAX_SAMPLE_BYTES:
        return None
    stored = file.pread(stored_bytes, start)
    if len(stored) < stored_bytes:
        raise StoreError(
            f"{name} has become shorter than {start + stored_bytes} bytes; copy it again"
        )
    if parts is None:
        return stored
    content = bytearray(num_bytes)
    taken = 0
    for offset, length in parts:  # stored one after the other
        content[offset : offset + length] = stored[taken : taken + length]
        taken += length
    return bytes(content)
