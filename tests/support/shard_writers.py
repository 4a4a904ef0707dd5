"""Shards of MDS, and LMDBs, written as their layout says, of bytes that a test chooses."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lmdb
import pyarrow as pa

Values = Sequence[bytes]
CODECS = {"zstd": "zstd", "gz": "gzip"}


def record(values: Values, sizes: Sequence[int | None]) -> bytes:
    """One sample: the sizes of the values that have no fixed one, and the values."""
    given = [len(value) for value, size in zip(values, sizes, strict=True) if size is None]
    return struct.pack(f"<{len(given)}I", *given) + b"".join(values)


def shard(records: Values) -> bytes:
    """The content of one file."""
    offsets = [4 * (len(records) + 2)]
    for one in records:
        offsets.append(offsets[-1] + len(one))
    return struct.pack(f"<{len(offsets) + 1}I", len(records), *offsets) + b"".join(records)


def packed(content: bytes, codec: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, CODECS[codec]) as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def write_mds(
    folder: Path,
    columns: dict[str, tuple[str, int | None]],
    shards: Sequence[Sequence[Values]],
    codec: str = "",
) -> None:
    """Write a folder of MDS: columns are name → encoding and fixed size, shards have samples of their values."""
    folder.mkdir(exist_ok=True)
    sizes = [size for _, size in columns.values()]
    entries: list[dict[str, Any]] = []
    for number, samples in enumerate(shards):
        content = shard([record(values, sizes) for values in samples])
        name = f"shard.{number:05d}.mds"
        files = {
            "raw_data": (name, content),
            "zip_data": (f"{name}.{codec}", packed(content, codec) if codec else b""),
        }
        written = files["zip_data" if codec else "raw_data"]
        (folder / written[0]).write_bytes(written[1])
        found = {what: {"basename": at, "bytes": len(data), "hashes": {}} for what, (at, data) in files.items()}
        entries.append(
            {
                "column_names": list(columns),
                "column_encodings": [encoding for encoding, _ in columns.values()],
                "column_sizes": sizes,
                "compression": f"{codec}:7" if codec else None,
                "format": "mds",
                "hashes": [],
                **found,
                "samples": len(samples),
                "size_limit": 1 << 26,
                "version": 2,
            }
        )
        if not codec:
            entries[-1]["zip_data"] = None
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))


def edit(folder: Path, change: Any) -> None:
    """Change the content of a folder's index in place."""
    path = folder / "index.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def write_lmdb(path: Path, entries: dict[bytes, bytes]) -> Path:
    with lmdb.open(str(path), subdir=False, lock=False) as env, env.begin(write=True) as txn:
        for key, value in entries.items():
            txn.put(key, value)
    return path
