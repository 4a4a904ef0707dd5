"""MosaicML's MDS, as `streaming.MDSWriter` writes it, without the streaming library.

    index.json   {"version": 2, "shards": [{"format": "mds", "samples": n, "compression": null or "zstd:7",
                 "column_names": […], "column_encodings": […], "column_sizes": […],
                 "raw_data": {"basename", "bytes", "hashes"}, "zip_data": null or the same, compressed}, …]}

A sample in a shard is | uint32 size of each value without a fixed size | values |.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from raypipe.errors import StoreError
from raypipe.storage.filesystem import join_address
from raypipe.stores.sources.format_source import (
    INDEX,
    Asked,
    Source,
    explained,
    index_at,
)
from raypipe.stores.sources.shards import ShardFile, shards_source, unpacked


def open_mds(address: str, asked: Asked) -> Source:
    """Open a folder of MDS by its index; the shards may be in a bucket."""
    where = join_address(address, INDEX)
    with explained(where):
        index = index_at(address)
        shards = index["shards"]
        if index["version"] != 2 or {shard["format"] for shard in shards} != {"mds"}:
            raise StoreError(
                f"{where} has another version or format than 2 of mds, which is what raypipe reads"
            )
        first = _columns(shards[0])
        if any(_columns(shard) != first for shard in shards):
            raise StoreError(
                f"{where}: its shards have different columns: convert those of one kind at a time"
            )
        names, encodings, sizes = first
        return shards_source(
            address,
            dict(zip(names, encodings, strict=True)),
            [int(size) if size else None for size in sizes],
            list(map(_shard, shards)),
            asked,
        )


def _columns(shard: dict[str, Any]) -> list[Any]:
    return [shard[f"column_{field}"] for field in ("names", "encodings", "sizes")]


def _shard(shard: dict[str, Any]) -> ShardFile:
    raw = shard["raw_data"]
    packed = shard.get("zip_data")
    codec = str(shard["compression"]) if packed else ""
    return ShardFile(
        str((packed or raw)["basename"]),
        int(shard["samples"]),
        partial(unpacked, codec=codec, num_bytes=int(raw["bytes"])),
    )
