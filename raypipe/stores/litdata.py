"""Stores of LitData: what `litdata.optimize` writes, without the litdata library.

    index.json   {"chunks": [{"filename": "chunk-0-0.bin", "chunk_size": n, "chunk_bytes": …}, …],
                 "config": {"data_format": ["jpeg", "int", …], "data_spec": "[1, {…}]",
                 "compression": null or "zstd", "compression_level": null, "chunk" or "batch", …}}

`data_format` has the encodings of a sample's values; `data_spec` is the tree that they are the leaves of, as JSON:
{"type": …, "context": names of a dict, as JSON again, "children_spec": […]}, where a leaf has the type null.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from raypipe.errors import StoreError
from raypipe.stores.shard_files import FRAMES, MAX_UNPACKED_BYTES, Shard
from raypipe.stores.shards import Index, ShardStore

# LitData's names of encodings that have another name, or another meaning, in MDS.
_RENAMED = {"text": "str", "image": "file", "json": "json of LitData"}


class LitDataStore(ShardStore):
    """A store of LitData: a folder with index.json and chunk-*.bin, see `ShardStore`.

    Columns are named by the keys of a sample, `boxes.left` where it is nested, or `0`, `1`, … in tuples and lists.
    """

    @staticmethod
    def parse(content: Any) -> Index:
        config = content["config"]
        level = config.get("compression_level") or "chunk"
        if config.get("encryption"):
            raise StoreError("is of encrypted shards, which are not read: write them anew, without encryption")
        if (loader := config.get("item_loader") or "PyTreeLoader") != "PyTreeLoader":
            raise StoreError(f"is of the item loader {loader}; only that of PyTreeLoader, the default, is read")
        if config["compression"] and level not in ("chunk", "batch"):
            raise StoreError(f"is of the compression_level {level!r}; only 'chunk' and 'batch' are read")
        formats = [str(name) for name in config["data_format"]]
        names = list(_leaves(json.loads(config["data_spec"])[1]))
        if len(set(names)) != len(names):
            raise ValueError(f"two values of one name among {names}")
        codec = FRAMES if level == "batch" else str(config["compression"])
        return Index(
            encodings={name: _renamed(kind) for name, kind in zip(names, formats, strict=True)},
            sizes=(None,) * len(formats),
            shards=tuple(_shard(chunk, codec if config["compression"] else "") for chunk in content["chunks"]),
            facts=tuple(str(int(chunk["chunk_bytes"])) for chunk in content["chunks"]),
        )


def _leaves(spec: Any, above: tuple[str, ...] = ()) -> Iterator[str]:
    """The names of a tree's leaves."""
    if spec["type"] is None:
        yield ".".join(above) or "0"
        return
    keys = json.loads(spec["context"]) if spec["context"] else None
    names = keys if isinstance(keys, list) else range(len(spec["children_spec"]))
    for name, child in zip(names, spec["children_spec"], strict=True):
        yield from _leaves(child, (*above, str(name)))


def _renamed(kind: str) -> str:
    name, colon, rest = kind.partition(":")
    return f"{_RENAMED.get(name, name)}{colon}{rest}"


def _shard(chunk: dict[str, Any], codec: str) -> Shard:
    num_samples = int(chunk["chunk_size"])
    # Older versions count the samples alone, newer ones the table before them too.
    num_bytes = int(chunk["chunk_bytes"]) + 4 * (num_samples + 2)
    return Shard(
        str(chunk["filename"]),
        num_samples,
        codec=codec,
        unpacked_bytes=MAX_UNPACKED_BYTES if codec == FRAMES else num_bytes,
    )
