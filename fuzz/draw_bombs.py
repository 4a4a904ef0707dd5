"""A small file of each kind of store and source that declares far more than it has."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import bombs
import h5py
import lmdb
import numpy as np
import pyarrow as pa

from raypipe.stores.sources.tfrecord import _checksum, _example

LIMIT = 32 << 20

MOST_MIB = (
    130  # that a read may add: the limit, copies, libraries that are imported late
)

SIZE = 256 << 20  # of each bomb, in memory

REFUSED = (
    r" would unpack to [0-9,]+ bytes; the limit is [0-9,]+: .*raise RAYPIPE_READ_BYTES"
)

OWN_CODE = {"samples of a function"}  # has no file

READ = """
import json, os, resource, sys
import numpy as np, pyarrow.parquet, h5py, msgpack, google_crc32c, google.protobuf.text_format
from raypipe.errors import StoreError
from raypipe.stores import open_store
from raypipe.stores.sources import open_source
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
for path in sys.argv[1:]:
    if child := os.fork():  # which has all modules, and a peak of its own
        os.waitpid(child, 0)
        continue
    if path.endswith(".pt"): import torch
    base = peak()
    try:
        source = open_source(path)
        if source is not None:
            found = sum(sample["image"] is not None for sample in source.samples)
        else:
            store = open_store(path, trust_pickles=True)
            images = store.read(np.arange(len(store)), ("image",))["image"]
            found = sum(image is not None for image in images)
    except StoreError as error:
        found = str(error)
    print(json.dumps([path, found, peak() - base]), flush=True)
    os._exit(0)
"""


def folder_bomb(path: Path) -> Path:
    (path / "cat").mkdir()
    with (path / "cat" / "a.jpg").open("wb") as file:
        file.truncate(600 << 20)
    return path


def lmdb_bomb(path: Path) -> Path:
    """Values of msgpack with many lists, each of which is one byte."""
    num = SIZE // 64
    return foreign(path, b"\xdd" + struct.pack(">I", num) + b"\x90" * num)


def parquet_bomb(path: Path) -> Path:
    bombs.parquet(path / "a.parquet", "values", SIZE // 4, 4)
    return path / "a.parquet"


def table_bomb(path: Path) -> Path:
    with (path / "a.csv").open("wb") as file:
        file.truncate(600 << 20)
    return path / "a.csv"


def tar_bomb(path: Path) -> Path:
    """Members of holes, by GNU's old headers."""
    with (path / "a.tar").open("wb") as file:
        for number in range(16):
            member = tarfile.TarInfo(f"cat/{number}.jpg")
            member.type = tarfile.GNUTYPE_SPARSE
            header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
            header[386:410] = b"00000000000\0" * 2  # no part
            header[483:495] = b"%011o\0" % (SIZE // 16)
            header[148:156] = b" " * 8
            header[148:156] = b"%06o\0 " % sum(header)
            file.write(header)
        file.write(bytes(1024))
    return path / "a.tar"


def tfrecord_bomb(path: Path) -> Path:
    message = _example()()
    for name, value in (("image", bytes(SIZE // 8)), ("label", 1)):
        entry = message.features.feature.add(key=name)
        kind = "bytes" if isinstance(value, bytes) else "int64"
        getattr(entry.value, kind).value.append(value)
    data = message.SerializeToString()
    length = struct.pack("<Q", len(data))
    record = length + _checksum(length) + data + _checksum(data)
    with gzip.open(path / "a.tfrecord.gz", "wb", 1) as file:
        for _ in range(8):
            file.write(record)
    return path / "a.tfrecord.gz"


def hdf5_bomb(path: Path) -> Path:
    with h5py.File(path / "a.h5", "w") as file:
        shape = (64, SIZE // 64 // 1024, 1024)
        images = file.create_dataset(
            "images", shape, "u1", chunks=shape, compression="gzip", compression_opts=1
        )
        images[0, 0, 0] = 1
    return path / "a.h5"


def recordio_bomb(path: Path) -> Path:
    """Records of holes."""
    num_bytes = SIZE // 32
    with (path / "a.rec").open("wb") as file:
        for number in range(32):
            file.seek(number * (num_bytes + 8))
            file.write(struct.pack("<IIIfQQ", 0xCED7230A, num_bytes, 0, 1.0, number, 0))
        file.truncate(32 * (num_bytes + 8))
    return path / "a.rec"


def zip_bomb(path: Path) -> Path:
    with zipfile.ZipFile(
        path / "a.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=1
    ) as file:
        file.writestr("cat/a.jpg", bytes(SIZE))
    return path / "a.zip"


def arrow_bomb(path: Path) -> Path:
    images = pa.array([bytes(SIZE // 4)] * 4, pa.large_binary())
    batch = pa.record_batch({"image": images, "label": [0, 1, 2, 3]})
    (path / "data-00000-of-00001.arrow").write_bytes(stream(batch))
    return path


def mds_bomb(path: Path) -> Path:
    content = struct.pack("<3I", 1, 12, SIZE) + bytes(SIZE - 12)
    (path / "shard.00000.mds.zstd").write_bytes(
        pa.compress(content, "zstd", asbytes=True)
    )
    raw = {"basename": "shard.00000.mds", "bytes": SIZE, "hashes": {}}
    shard = {
        "format": "mds",
        "samples": 1,
        "compression": "zstd",
        "column_names": ["image"],
        "column_encodings": ["bytes"],
        "column_sizes": [None],
        "raw_data": raw,
        "zip_data": {**raw, "basename": "shard.00000.mds.zstd"},
    }
    (path / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    return path


def litdata_bomb(path: Path) -> Path:
    content = struct.pack("<3I", 1, 12, SIZE) + bytes(SIZE - 12)
    (path / "chunk-0-0.zstd.bin").write_bytes(
        pa.compress(content, "zstd", asbytes=True)
    )
    leaf = {"type": None, "context": None, "children_spec": []}
    index = {
        "chunks": [{"filename": "chunk-0-0.zstd.bin", "chunk_size": 1}],
        "config": {
            "data_format": ["bytes"],
            "data_spec": json.dumps([1, leaf]),
            "compression": "zstd",
        },
    }
    (path / "index.json").write_text(json.dumps(index))
    return path


def tensors_bomb(path: Path) -> Path:
    """Tensors in a compressed zip, where torch stores them as they are."""
    import torch

    stored = io.BytesIO()
    torch.save(
        {"images": torch.zeros((4, SIZE // 4096, 1024), dtype=torch.uint8)}, stored
    )
    with (
        zipfile.ZipFile(stored) as source,
        zipfile.ZipFile(
            path / "a.pt", "w", zipfile.ZIP_DEFLATED, compresslevel=1
        ) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    return path / "a.pt"


def npz_bomb(path: Path) -> Path:
    np.savez_compressed(
        path / "a.npz", images=np.zeros((2, SIZE // 2048, 1024), np.uint8)
    )
    return path / "a.npz"


BOMBS: dict[str, Callable[[Path], Path]] = {
    "folder": folder_bomb,
    "lmdb": lmdb_bomb,
    "parquet": parquet_bomb,
    "table": table_bomb,
    "tar": tar_bomb,
    "TFRecord": tfrecord_bomb,
    "HDF5": hdf5_bomb,
    "MXNet RecordIO": recordio_bomb,
    "zip": zip_bomb,
    "Arrow of the datasets library": arrow_bomb,
    "MosaicML's MDS": mds_bomb,
    "LitData": litdata_bomb,
    "tensors": tensors_bomb,
    "npz": npz_bomb,
}

# A file of holes is as large as it says. Its samples are left out, or read one after the other.
FOUND = {"folder": 0, "tar": 0, "MXNet RecordIO": 32}


def stream(batch: pa.RecordBatch) -> bytes:
    out = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(out, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return out.getvalue()


def foreign(path: Path, value: bytes) -> Path:
    with (
        lmdb.open(str(path / "a.lmdb"), subdir=False, map_size=1 << 28) as file,
        file.begin(write=True) as transaction,
    ):
        for number in range(4):
            transaction.put(b"%08d" % number, value)
    return path / "a.lmdb"


VALUES = {
    # LONG_BINPUT: the memory of a pickle grows to any place
    "memo": ("pickle", b"\x80\x02K\x01r" + struct.pack("<I", 400_000_000) + b"."),
    "lists": ("pickle", b"\x80\x02(" + b"]" * (1 << 20) + b"t."),
    "arrays": ("msgpack", b"\xdd" + struct.pack(">I", 1 << 20) + b"\x90" * (1 << 20)),
}
