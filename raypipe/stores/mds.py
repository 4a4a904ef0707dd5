"""Stores of MosaicML's MDS: what `streaming.MDSWriter` writes, without the streaming library.

index.json   {"version": 2, "shards": [{"format": "mds", "samples": n, "compression": null or "zstd:7",
             "column_names": […], "column_encodings": […], "column_sizes": […],
             "raw_data": {"basename", "bytes", "hashes"}, "zip_data": null or the same, compressed}, …]}
"""

from __future__ import annotations

from typing import Any

from raypipe.errors import StoreError
from raypipe.stores.shard_files import Shard
from raypipe.stores.shards import Index, ShardStore


class MDSStore(ShardStore):
    """A store of MDS: a folder with index.json and *.mds, see `ShardStore`."""

    @staticmethod
    def parse(content: Any) -> Index:
        shards = content["shards"]
        if content["version"] != 2 or {shard["format"] for shard in shards} != {"mds"}:
            kinds = sorted({str(shard["format"]) for shard in shards})
            raise StoreError(
                f"is of version {content['version']} of {', '.join(kinds)}: only version 2 of mds is read"
            )
        first = shards[0]
        names, kinds, sizes = (first[f"column_{what}"] for what in ("names", "encodings", "sizes"))
        for number, shard in enumerate(shards):
            if [shard[f"column_{what}"] for what in ("names", "encodings", "sizes")] != [names, kinds, sizes]:
                raise ValueError(f"shards 0 and {number} differ in their columns")
        if any(size is not None and size < 0 for size in sizes) or len(set(names)) != len(names):
            raise ValueError(f"columns {names} of {sizes} bytes")
        return Index(
            encodings={str(name): str(kind) for name, kind in zip(names, kinds, strict=True)},
            sizes=tuple(int(size) if size else None for _, size in zip(names, sizes, strict=True)),
            shards=tuple(map(_shard, shards)),
            facts=tuple(repr(sorted(shard["raw_data"].items())) for shard in shards),
        )


def _shard(found: dict[str, Any]) -> Shard:
    raw, packed = found["raw_data"], found.get("zip_data")
    name, num_bytes, num_samples = str(raw["basename"]), int(raw["bytes"]), int(found["samples"])
    if packed is None:
        return Shard(name, num_samples, num_bytes)
    return Shard(
        str(packed["basename"]), num_samples, int(packed["bytes"]), str(found["compression"]), num_bytes, name
    )
