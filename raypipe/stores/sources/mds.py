"""MosaicML's MDS, as `streaming.MDSWriter` writes it, without the streaming library.

    index.json   {"version": 2, "shards": [{"format": "mds", "samples": n, "compression": null or "zstd:7",
                 "column_names": […], "column_encodings": […], "column_sizes": […],
                 "raw_data": {"basename", "bytes", "hashes"}, "zip_data": null or the same, compressed}, …]}

A sample in a shard is | uint32 size of each value without a fixed size | values |.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from raypipe.stores.sources.shards import (
    Value,
    array_shape,
    read_shard,
    samples_of_shard,
    values_of,
)


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
        encodings = dict(
            zip(shards[0]["column_names"], shards[0]["column_encodings"], strict=True)
        )
        values = values_of(address, encodings, asked)
        names = list(encodings)
        arrays = [
            column
            for column, value in values.items()
            if array_shape(encodings[names[value.position]])
        ]
        num_samples = sum(int(shard["samples"]) for shard in shards)

    return Source(
        _samples(address, shards, values),
        num_samples=num_samples,
        arrays=[name for name in arrays if name != "image"],
    )


def _samples(
    address: str, shards: list[dict[str, Any]], values: Mapping[str, Value]
) -> Iterator[dict[str, Any]]:
    """Yield the samples of all shards of a folder."""
    for shard in shards:
        with explained(join_address(address, INDEX)):
            raw = shard["raw_data"]
            packed = shard.get("zip_data")
            name = str((packed or raw)["basename"])
            codec = str(shard["compression"]) if packed else ""
            num_samples = int(shard["samples"])
            sizes = [int(size) if size else None for size in shard["column_sizes"]]
            num_bytes = int(raw["bytes"])
            content = read_shard(address, name, codec, num_bytes)
            where = join_address(address, name)
            if len(content) != num_bytes:
                raise StoreError(
                    f"{where} has {len(content)} bytes of {num_bytes}; copy it again"
                )
        yield from samples_of_shard(where, num_samples, content, sizes, values)


def _columns(shard: dict[str, Any]) -> list[Any]:
    return [shard[f"column_{field}"] for field in ("names", "encodings", "sizes")]
