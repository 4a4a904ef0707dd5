"""LitData, as `litdata.optimize` writes it, without the litdata library.

    index.json   {"chunks": [{"filename": "chunk-0-0.bin", "chunk_size": n, "chunk_bytes": …}, …],
                 "config": {"data_format": ["jpeg", "int", …], "data_spec": "[1, {…}]",
                 "compression": null or "zstd", "compression_level": null, "chunk" or "batch", …}}

`data_format` has the encodings of a sample's values; `data_spec` is the tree that they are the leaves of, as JSON:
{"type": …, "context": names of a dict, as JSON again, "children_spec": […]}, where a leaf has the type null. The
columns are `boxes.left` where a dict is nested, or `0`, `1`, … in tuples and lists; a pair is image and label.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from raypipe.errors import StoreError
from raypipe.storage.filesystem import join_address
from raypipe.storage.read_limit import check_read
from raypipe.stores.sources.format_source import (
    INDEX,
    Asked,
    Source,
    explained,
    index_at,
)
from raypipe.stores.sources.shards import ShardFile, shards_source, unpacked

_FRAMES_MAGIC = b"LDFZ01\0\0"
_FRAMES_HEAD = struct.Struct("<8sHHIII")
_FRAME = np.dtype("<u8, <u8, <u4, <u4")


def open_litdata(address: str, asked: Asked) -> Source:
    """Open a folder of LitData by its index; the chunks may be in a bucket."""
    with explained(join_address(address, INDEX)):
        index = index_at(address)
        config = index["config"]
        if config.get("encryption"):
            raise StoreError(f"{address} is encrypted: write it without encryption")
        if (loader := config.get("item_loader") or "PyTreeLoader") != "PyTreeLoader":
            raise StoreError(
                f"{address} has items of {loader}; raypipe reads those of PyTreeLoader, the default"
            )
        names = list(_leaves(json.loads(config["data_spec"])[1]))
        if names == ["0", "1"]:
            names = ["image", "label"]
        encodings = dict(zip(names, map(str, config["data_format"]), strict=True))
        codec = str(config["compression"] or "")
        unpack: Callable[[str, bytes], bytes] = partial(unpacked, codec=codec)
        if codec and config.get("compression_level") == "batch":
            unpack = _of_frames
        chunks = [
            ShardFile(str(chunk["filename"]), int(chunk["chunk_size"]), unpack)
            for chunk in index["chunks"]
        ]
        return shards_source(address, encodings, [None] * len(encodings), chunks, asked)


def _leaves(spec: Any, above: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the names of a tree's leaves."""
    if spec["type"] is None:
        yield ".".join(above) or "image"
        return
    keys = json.loads(spec["context"]) if spec["context"] else None
    names = keys if isinstance(keys, list) else range(len(spec["children_spec"]))
    for name, child in zip(names, spec["children_spec"], strict=True):
        yield from _leaves(child, (*above, str(name)))


def _of_frames(where: str, packed: bytes) -> bytes:
    """Return a chunk that is compressed in batches as it would be without compression."""
    magic, version, _, num_samples, _, num_frames = _FRAMES_HEAD.unpack_from(packed)
    if (magic, version) != (_FRAMES_MAGIC, 1):
        raise ValueError(
            f"it begins with {magic!r}, version {version}, not {_FRAMES_MAGIC!r}, version 1"
        )
    offsets = np.frombuffer(packed, "<u4", num_samples + 1, _FRAMES_HEAD.size)
    first = _FRAMES_HEAD.size + offsets.nbytes
    frames = np.frombuffer(packed, _FRAME, num_frames, first)
    num_bytes = int(frames["f3"].sum(dtype=np.int64))
    check_read(where, num_bytes, len(packed), "write smaller chunks")
    begins = offsets.astype(np.int64) + 4 * (num_samples + 2)
    table = np.append(num_samples, begins).astype("<u4").tobytes()
    contents = [
        unpacked(where, packed[start : start + num_packed], "zstd", num_unpacked)
        for _, start, num_packed, num_unpacked in frames.tolist()
    ]
    return table + b"".join(contents)
