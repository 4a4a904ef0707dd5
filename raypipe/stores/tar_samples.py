"""The samples of opened tars, read by position: from local tars, or from those and parts in the node's cache."""

from __future__ import annotations

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
    as_text,
    by_part,
    gathered,
    hash_of_facts,
    part_of,
)
from raypipe.stores.tar_index import Tar
from raypipe.stores.webdataset import TEXT_SUFFIXES, Indexed, as_names

GROUP_BYTES = 8 << 20
"""Bytes of a group's members, of which the order of a run in windows is a function."""
# Gaps up to this size are fetched too: a request takes as long as half a MiB or more.
_GAP_BYTES = 64 << 10
_NUM_WITH_HOLES = 64  # sparse members that a read may have, each of which is almost nothing in its tar


Reader = OpenFile | ByteRangesReader


class TarSamples:
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
        self._starts = bounds
        self.groups = self._groups_of(bounds) if in_groups else None
        # Samples from self._bounds[i] on are read from one file or part, of tar self._numbers[i].
        self._bounds = bounds if self.groups is None else self.groups
        self._numbers = np.searchsorted(bounds, self._bounds[:-1], "right") - 1

    def __len__(self) -> int:
        return int(self._bounds[-1])

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
        numbers = [number for number, _ in by_part(indices, self._bounds) if placed]
        readers = dict(zip(numbers, self._readers(numbers, placed), strict=True))

        def read(
            number: int, rows: np.ndarray, columns: tuple[str, ...]
        ) -> dict[str, Any]:
            shard = int(self._numbers[number])
            name = self._tars[shard].address
            found: dict[str, Any] = {}
            for column in columns:
                values = self._index[column][rows + self._bounds[number]]
                if column == "label":
                    found[column] = values
                    continue
                contents = [
                    _content(readers[number], name, self._sparse[shard], *place)
                    for place in values.tolist()
                ]
                found[column] = contents
                if column != "image":
                    is_text = column in TEXT_SUFFIXES
                    values = map(as_text, contents) if is_text else contents
                    found[column] = pa.array(values, self.schema.field(column).type)
            return found

        return gathered(indices, self._bounds, self.schema, columns, read)

    def _readers(self, numbers: Sequence[int], placed: tuple[str, ...]) -> list[Reader]:
        """Return an open file or part for each run of samples; missing ones are fetched, several at a time."""
        entries = [self._entry_of(number, placed) for number in numbers]
        readers = list(map(_reader_of, entries))
        if None in readers:
            return in_threads(lambda entry: _reader_of(entry, may_fetch=True), entries)
        return readers

    def _entry_of(
        self, number: int, placed: tuple[str, ...]
    ) -> OpenFile | Unpacked | RemoteFile | ByteRanges:
        """Return the local file that samples are in, or the cache's entry: a part if they are read in groups."""
        file = self._tars[self._numbers[number]]
        if isinstance(file, RemoteFile) and self.groups is not None:
            return self._ranges_of(number, placed)
        return file

    def _ranges_of(self, number: int, placed: tuple[str, ...]) -> ByteRanges:
        """Return the bytes that columns of a group have in their tar, with small gaps."""
        shard = int(self._numbers[number])
        file = self._tars[shard]
        assert isinstance(file, RemoteFile), "others have no parts"
        first, last = self._bounds[number : number + 2]
        places = np.concatenate([self._index[name][first:last] for name in placed])
        return ByteRanges(
            file, _joined_ranges(places, self._sparse[shard], file.num_bytes)
        )

    def is_at_hand(self, indices: np.ndarray, columns: tuple[str, ...]) -> bool:
        """Return whether the files or parts of samples are in the node's cache, or on its disk."""
        placed = _placed(columns)
        return all(
            _reader_of(self._entry_of(number, placed)) is not None
            for number, _ in by_part(indices, self._bounds)
        )

    def names(self, indices: np.ndarray) -> list[str]:
        """Return the keys or paths of samples."""
        return as_names(self._keys.take(pa.array(indices)))

    def sample_name(self, index: int) -> str:
        number, _ = part_of(self._starts, index)
        (key,) = as_names(self._keys[index : index + 1])
        return f"{self._tars[number].address}, {key}"


def _placed(columns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns that are members of a tar."""
    return tuple(name for name in columns if name != "label")


def _reader_of(
    entry: OpenFile | Unpacked | RemoteFile | ByteRanges, may_fetch: bool = False
) -> Any:
    """Return the `Reader` of an entry that is on this node's disk, or is fetched; else None."""
    if isinstance(entry, OpenFile):
        return entry
    cache = shared_cache()
    find = cache.get if may_fetch else cache.find
    if not isinstance(entry, ByteRanges):
        return find(entry, OpenFile)
    whole = cache.find(entry.file, OpenFile)
    return whole or find(entry, lambda path: ByteRangesReader(path, entry))


def _type_of(name: str, values: np.ndarray) -> pa.DataType:
    """Return the type of a column, from its values if they are labels."""
    if name == "label":
        return array_type(values.dtype, values.shape[1:])
    return pa.string() if name in TEXT_SUFFIXES else pa.binary()


def _joined_ranges(
    places: np.ndarray, sparse: Mapping[str, list[list[int]]], num_bytes: int
) -> tuple[tuple[int, int], ...]:
    """Return begin and end of the ranges that members and their headers occupy, joined across small gaps.

    Args:
        places: position and size of each member, (N, 2); -1 = no member.
        sparse: see `_content`.
        num_bytes: size of the tar.
    """
    sizes = places[:, 1]
    are_read = (places[:, 0] >= 0) & (sizes >= 0) & (sizes <= MAX_SAMPLE_BYTES)
    ranges: list[list[int]] = []
    for start, size in sorted(places[are_read].tolist()):
        stored = sparse.get(str(start), [[0, size]])
        stored_bytes = sum(length for _, length in stored)
        begin = max(0, start - tarfile.BLOCKSIZE)  # the header has the name
        end = min(start + stored_bytes, num_bytes)
        if ranges and begin <= ranges[-1][1] + _GAP_BYTES:
            ranges[-1][1] = max(ranges[-1][1], end)
        elif begin < end:
            ranges.append([begin, end])
    return tuple((begin, end) for begin, end in ranges)


def _content(
    file: Reader,
    name: str,
    sparse: Mapping[str, list[list[int]]],
    start: int,
    num_bytes: int,
) -> bytes | None:
    """Return the bytes of a member; None for no member, more than 512 MiB, or holes beyond the limit of a read."""
    if not 0 <= num_bytes <= MAX_SAMPLE_BYTES:
        return None
    parts = sparse.get(str(start)) if sparse else None
    if parts is None:
        content = file.pread(num_bytes, start)
    elif num_bytes > max(
        read_limit() // _NUM_WITH_HOLES, GROWTH * sum(length for _, length in parts)
    ):
        return None
    else:
        content = _with_holes(file, start, num_bytes, parts)
    if len(content) < num_bytes:
        raise StoreError(
            f"{name} has become shorter than {start + num_bytes} bytes; copy it again"
        )
    return content


def _with_holes(
    file: Reader, start: int, num_bytes: int, parts: Sequence[Sequence[int]]
) -> bytes:
    """Return the bytes of a sparse member, whose parts are stored one after the other; fewer if one is cut off."""
    content = bytearray(num_bytes)
    for offset, length in parts:
        stored = file.pread(length, start)
        if len(stored) < length:
            return stored
        content[offset : offset + length] = stored
        start += length
    return bytes(content)
