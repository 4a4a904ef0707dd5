"""Stores in MosaicML's MDS format, as `streaming.MDSWriter` writes it, read without the streaming library.

    index.json   {"version": 2, "shards": [{"format": "mds", "samples": n, "compression": null or "zstd:7",
                 "column_names": […], "column_encodings": […], "column_sizes": […],
                 "raw_data": {"basename", "bytes", "hashes"}, "zip_data": null or the same, compressed}, …]}

A sample in a shard is | uint32 size of each value without a fixed size | values |. Single samples are read from
uncompressed shards. Compressed shards are unpacked into memory as a whole, so they are groups of the store.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from raypipe.errors import ConfigError, StoreError
from raypipe.storage.files import RemoteFile, look_up, read_json
from raypipe.storage.filesystem import is_remote, join
from raypipe.storage.local_cache import shared_cache
from raypipe.storage.local_file import OpenFile
from raypipe.storage.patience import in_threads
from raypipe.stores.base import MAX_SAMPLE_BYTES, Columns, FileStore, by_part, hash_of_facts, part_of, stored_names
from raypipe.stores.encodings import DAMAGE, ENCODINGS, Encoding
from raypipe.stores.mds_shard import OpenShard, Shard, check_shard, open_file, unpacked
from raypipe.stores.numbers import labels_of

_INDEX = "index.json"
# Unpacked shards that a store keeps, besides the last used: 16 of the usual size of 64 MiB.
_MAX_UNPACKED_BYTES = 1 << 30

_MAX_OPEN = 256  # each takes a file descriptor


@dataclass(frozen=True)
class _IndexFile:
    """Contents of an index.

    Attributes:
        encodings: name of each value of a sample → its encoding, in the order of the values.
        sizes: fixed size of each value; None if samples differ in it.
        shards: the shards, in order.
        facts: further facts that identify the contents, such as checksums.
    """

    encodings: dict[str, str]
    sizes: tuple[int | None, ...]
    shards: tuple[Shard, ...]
    facts: tuple[str, ...]


class MDSStore(FileStore["_Opened"]):
    """A store in MDS format: a folder with index.json and *.mds, local or remote.

    Remote shards are read through the node's cache, see `storage.local_cache`. The fingerprint is a hash over the
    index: columns, numbers of samples, sizes and checksums. It does not cover the data. Columns of unknown
    encodings, such as pickles, are left out.

    Args:
        address: path or URI of the folder.
        image_column: the column that becomes `image`.
        target_column: the column of numbers that becomes `label`; integers are classes.
            The store has no labels if the shards lack `label`; a column of any other name must exist.
    """

    _has_lock = True

    def __init__(self, address: str | Path, image_column: str = "image", target_column: str = "label") -> None:
        super().__init__(address, image_column, target_column)

    def _open(self) -> _Opened:
        index, files = self._listing or self._find()
        if is_remote(self.address):
            self._listing = index, files
        return _Opened(self.address, index, files, *self._options)

    def _find(self) -> tuple[_IndexFile, list[RemoteFile]]:
        where = join(self.address, _INDEX)
        try:
            index = _parsed(read_json(where))
            for shard in index.shards:
                check_shard(shard)
        except ConfigError as error:
            raise StoreError(str(error)) from error
        except StoreError as error:
            raise StoreError(f"{where} {error}") from error
        except (*DAMAGE, AttributeError) as error:
            raise StoreError(
                f"{where} cannot be understood: {type(error).__name__}: {error!s:.300}; copy it again"
            ) from None
        files = [
            RemoteFile(join(self.address, *PurePosixPath(shard.name).parts), shard.num_bytes)
            for shard in index.shards
        ]
        if is_remote(self.address):
            files = in_threads(lambda file: file.checked(look_up(file.address)), files)
        return index, files


def _parsed(content: Any) -> _IndexFile:
    """Parse the JSON of an index; raise StoreError for unsupported formats, and one of `DAMAGE` for damage."""
    shards = content["shards"]
    if content["version"] != 2 or {shard["format"] for shard in shards} != {"mds"}:
        kinds = sorted({str(shard["format"]) for shard in shards})
        raise StoreError(
            f"has version {content['version']} of {', '.join(kinds)}: raypipe reads only version 2 of mds"
        )
    first = shards[0]
    names, kinds, sizes = (first[f"column_{what}"] for what in ("names", "encodings", "sizes"))
    for number, shard in enumerate(shards):
        if [shard[f"column_{what}"] for what in ("names", "encodings", "sizes")] != [names, kinds, sizes]:
            raise ValueError(f"shards 0 and {number} differ in their columns")
    if any(size is not None and size < 0 for size in sizes) or len(set(names)) != len(names):
        raise ValueError(f"columns {names} of {sizes} bytes")
    return _IndexFile(
        encodings={str(name): str(kind) for name, kind in zip(names, kinds, strict=True)},
        sizes=tuple(int(size) if size else None for _, size in zip(names, sizes, strict=True)),
        shards=tuple(map(_shard_of, shards)),
        facts=tuple(repr(sorted(shard["raw_data"].items())) for shard in shards),
    )


def _shard_of(entry: dict[str, Any]) -> Shard:
    raw, packed = entry["raw_data"], entry.get("zip_data")
    name, num_bytes, num_samples = str(raw["basename"]), int(raw["bytes"]), int(entry["samples"])
    if packed is None:
        return Shard(name, num_samples, num_bytes)
    return Shard(str(packed["basename"]), num_samples, int(packed["bytes"]), str(entry["compression"]), num_bytes)


class _Opened:
    """The shards of a store; the last used shards stay open."""

    classes = None

    def __init__(
        self,
        address: str,
        index: _IndexFile,
        files: Sequence[RemoteFile],
        image_column: str,
        target_column: str,
    ) -> None:
        self._shards, self._files = index.shards, files
        self._sizes, self._num_sizes = index.sizes, index.sizes.count(None)
        encodings = {name: ENCODINGS.get(kind.partition(":")[0]) for name, kind in index.encodings.items()}
        known = {name: encoding for name, encoding in encodings.items() if encoding is not None}
        renamed = {"image": image_column, "label": target_column}
        stored = _stored_names(address, index.encodings, known, renamed)
        places = list(index.encodings)
        self._fields = {name: (places.index(place), known[place]) for name, place in stored.items()}
        self.columns = tuple(self._fields)
        label = self._fields["label"][1].dtype if "label" in self._fields else None
        self.label_is_class = label is None or label.kind in "iu"
        counts = [shard.num_samples for shard in index.shards]
        self._bounds = np.cumsum([0, *counts], dtype=np.int64)
        # A compressed shard is unpacked as a whole, so its samples are read together.
        self.groups = np.unique(self._bounds) if any(shard.codec for shard in index.shards) else None
        facts = (index.encodings, index.sizes, counts, index.facts, stored)
        self.fingerprint = hash_of_facts(facts)
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def read(self, indices: np.ndarray, columns: tuple[str, ...]) -> Columns:
        rows: list[dict[str, Any]] = [{}] * len(indices)
        for number, positions in by_part(indices, self._bounds):
            shard = self._shard(number)
            within = (indices[positions] - self._bounds[number]).tolist()
            for position, sample in zip(positions.tolist(), within, strict=True):
                rows[position] = self._row(shard, sample, columns)
        return {name: self._column(name, [row.get(name) for row in rows]) for name in columns}

    def sample_name(self, index: int) -> str:
        number, within = part_of(self._bounds, index)
        return f"{self._files[number].address}, sample {within}"

    def _row(self, shard: OpenShard, sample: int, columns: tuple[str, ...]) -> dict[str, Any]:
        """Return a sample's values, without the damaged ones."""
        start, end = shard.offsets[sample : sample + 2].tolist()
        head = np.frombuffer(shard.part(start, 4 * self._num_sizes), np.uint8)
        if len(head) < 4 * self._num_sizes:
            return {}
        own_sizes = iter(head.view("<u4").tolist())
        sizes = [next(own_sizes) if size is None else size for size in self._sizes]
        begins = list(itertools.accumulate(sizes, initial=start + len(head)))
        row: dict[str, Any] = {}
        if begins[-1] != end:  # the sizes are damaged, so no value can be located
            return row
        for name in columns:
            place, encoding = self._fields[name]
            if sizes[place] <= MAX_SAMPLE_BYTES:
                try:
                    row[name] = encoding.decode(shard.part(begins[place], sizes[place]))
                except DAMAGE:
                    continue
        return row

    def _column(self, name: str, values: list[Any]) -> Any:
        encoding = self._fields[name][1]
        column: Any = values
        if encoding.dtype is not None and None not in values:
            column = np.array(values, encoding.dtype)
        return labels_of(column) if name == "label" and self.label_is_class else column

    def _shard(self, number: int) -> OpenShard:
        """Return an open shard, which becomes the last used."""
        shard, file = self._shards[number], self._files[number]
        name, remote = file.address, is_remote(file.address)
        if remote and not shard.codec:  # the node's cache closes it
            return shared_cache().get(file, lambda path: _open_shard(open_file(path, shard, name), shard, name))
        with self._lock:
            if number not in self._open:
                whole = shared_cache().get(file, OpenFile) if remote else open_file(name, shard, name)
                self._open[number] = _open_shard(whole, shard, name)
            self._open.move_to_end(number)
            num_bytes = sum(opened.num_bytes for opened in self._open.values())
            while len(self._open) > 1 and (len(self._open) > _MAX_OPEN or num_bytes > _MAX_UNPACKED_BYTES):
                num_bytes -= self._open.popitem(last=False)[1].num_bytes
            return self._open[number]


def _open_shard(file: OpenFile, shard: Shard, name: str) -> OpenShard:
    return OpenShard(name, shard.num_samples, unpacked(file, shard, name) if shard.codec else file)


def _stored_names(
    address: str, kinds: dict[str, str], encodings: dict[str, Encoding], renamed: dict[str, str]
) -> dict[str, str]:
    """Call `stored_names`, drop unreadable columns, and raise StoreError for wrong types of image and label."""
    stored = stored_names(address, kinds, renamed)
    for name in renamed.keys() & stored:
        place = stored[name]
        encoding = encodings.get(place)
        if encoding is None or not (encoding.is_image if name == "image" else encoding.dtype):
            needed = "jpeg, png or bytes" if name == "image" else "a number"
            raise StoreError(
                f"{address}: column {place!r} has the encoding {kinds[place]!r}; {name} must be {needed}: "
                f"set {name}_column"
            )
    return {name: place for name, place in stored.items() if place in encodings}
