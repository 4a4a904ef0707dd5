"""Small stores of every kind, and what their files can be made to say."""

from __future__ import annotations

import io
import os
import struct
import sys
import tarfile
import tempfile
from pathlib import Path

import bombs
import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from mutate import EDGES, Mutation, flip, flip_within, number, page, truncate

from raypipe.stores import open_writer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import foreign_lmdbs

NUM_SAMPLES = 24
CLASSES = ("a", "b", "c")
PAGE = 4096


def make(folder: Path, images: list[bytes]) -> dict[str, list[Path]]:
    """Write the templates. Kind → the files of which one is to be mutated."""
    made: dict[str, list[Path]] = {}
    images = (images * NUM_SAMPLES)[:NUM_SAMPLES]
    for suffix in ("lmdb", "parquet"):
        path = folder / f"own.{suffix}"
        options = {} if suffix == "lmdb" else {"row_group_size": 10}
        columns = {
            "image": "binary",
            "label": "int64",
            "name": "string",
            "weight": "float64",
        }
        with open_writer(path, columns, CLASSES, **options) as writer:
            for i, image in enumerate(images):
                writer.append(
                    {
                        "image": image,
                        "label": i % 3,
                        "name": f"sample {i}",
                        "weight": i / 3,
                    }
                )
        made[suffix] = [path]
    # pages freed and reused, and values that are longer and shorter
    rewritten = folder / "rewritten.lmdb"
    rewritten.write_bytes(made["lmdb"][0].read_bytes())
    with lmdb.open(str(rewritten), subdir=False, lock=False, map_size=1 << 30) as env:
        for turn in range(3):
            with env.begin(write=True) as txn:
                for i in range(turn, NUM_SAMPLES, 3):
                    key = struct.pack(">Q", i)
                    value = txn.get(key)
                    txn.delete(key)
                    txn.put(key, value + bytes(3000 * turn))
    labels = [i % 3 for i in range(NUM_SAMPLES)]
    others = foreign_lmdbs.write_values(
        folder / "values", images, labels, foreign_lmdbs.DUMPS["msgpack"]
    )
    made["lmdb"] += [
        rewritten,
        foreign_lmdbs.write_folders(folder / "folders.lmdb", images, labels, CLASSES),
        (others / "data.mdb").rename(folder / "values.lmdb"),
    ]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [{"bytes": image, "path": f"{i}.jpg"} for i, image in enumerate(images)]
    table = {
        "image": pa.array(rows, kind),
        "label": [i % 3 for i in range(NUM_SAMPLES)],
    }
    for name, options in {
        "snappy": {"compression": "snappy", "row_group_size": 7},
        "zstd": {
            "compression": "zstd",
            "data_page_version": "2.0",
            "data_page_size": 2000,
        },
        "delta": {
            "compression": "gzip",
            "use_dictionary": False,
            "column_encoding": {"label": "DELTA_BINARY_PACKED"},
        },
        "checksums": {"compression": "none", "write_page_checksum": True},
    }.items():
        made["parquet"].append(folder / f"{name}.parquet")
        pq.write_table(pa.table(table), made["parquet"][-1], **options)
    made["tar"] = [
        _tar(folder / "gnu.tar", images, tarfile.GNU_FORMAT),
        _tar(folder / "pax.tar", images, tarfile.PAX_FORMAT),
    ]
    made["webdataset"] = [folder / "other.tar"]
    with tarfile.open(made["webdataset"][0], "w") as tar:
        for i, image in enumerate(images):
            for suffix, content in (
                ("jpg", image),
                ("json", b'{"label": %d}' % (i % 3)),
                ("txt", b"text"),
            ):
                member = tarfile.TarInfo(f"{i:06d}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    root = folder / "folder"
    made["folder"] = [
        root / CLASSES[i % 3] / f"{i:02d}.jpg" for i in range(NUM_SAMPLES)
    ]
    for path, image in zip(made["folder"], images, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
    return made


def _tar(path: Path, images: list[bytes], layout: int) -> Path:
    with tarfile.open(path, "w", format=layout) as tar:
        for i, image in enumerate(images):
            long = "long" * 30 + "/" if i % 4 == 0 else ""
            for suffix, content in (("jpg", image), ("cls", b"%d" % (i % 3))):
                member = tarfile.TarInfo(f"train/{long}{i:02d}.{suffix}")
                member.size, member.mtime = len(content), 1_000_000_000.5 + i
                tar.addfile(member, io.BytesIO(content))
    return path


# LMDB


def lmdb_meta(data: bytes, rng: np.random.Generator) -> bytes:
    """One of the two meta pages: bits, numbers, the other one in its place, none."""
    at = PAGE * int(rng.integers(2))
    meta = data[at : at + 152]
    kind = rng.integers(4)
    if kind == 0:
        meta = flip(meta, rng)
    elif kind == 1:
        meta = number(meta, rng, 16)
    elif kind == 2:
        meta = data[PAGE - at : PAGE - at + 152]
    else:
        meta = bytes(152)
    return data[:at] + meta + data[at + 152 :]


def lmdb_tree(data: bytes, rng: np.random.Generator) -> bytes:
    """The header, the pointers or the nodes of a branch or leaf page."""
    starts = range(2 * PAGE, len(data), PAGE)
    pages = [
        at
        for at in starts
        if struct.unpack_from("<QHH", data, at)[::2]
        in ((at // PAGE, 1), (at // PAGE, 2))
    ]
    at = int(rng.choice(pages))
    lower, upper = struct.unpack_from("<HH", data, at + 12)
    if rng.integers(2):
        change = flip_within if rng.integers(2) else number
        start, end = [(0, 16), (16, lower), (upper, upper + 200)][int(rng.integers(3))]
        return change(data, rng, at + start, at + max(end, start + 9))
    pointer = at + 16 + 2 * int(rng.integers(max(1, (lower - 16) // 2)))
    node = at + struct.unpack_from("<H", data, pointer)[0] % (PAGE - 8)
    edge = int(
        rng.choice(
            [
                0,
                1,
                8,
                15,
                16,
                4080,
                4088,
                4095,
                4096,
                65535,
                int(rng.integers(len(data) // PAGE)),
            ]
        )
    )
    place = [pointer, node, node + 2, node + 4, node + 6][int(rng.integers(5))]
    return data[:place] + struct.pack("<H", edge) + data[place + 2 :]


# Parquet


def parquet_footer(data: bytes, rng: np.random.Generator) -> bytes:
    """Anything in the footer, its length and the magic kept."""
    length = int.from_bytes(data[-8:-4], "little")
    start = len(data) - 8 - length
    change = (flip_within, number)[int(rng.integers(2))]
    return change(data, rng, start, len(data) - 8)


def parquet_varint(data: bytes, rng: np.random.Generator) -> bytes:
    """A number of the footer in place of another: they vary in length, so the footer's own is set right."""
    length = int.from_bytes(data[-8:-4], "little")
    start = len(data) - 8 - length
    at = start + int(rng.integers(length - 1))
    value, coded = int(rng.choice(EDGES, 1)[0]) & ((1 << 64) - 1), bytearray()
    while value > 127:
        coded.append(value & 127 | 128)
        value >>= 7
    coded.append(value)
    end = at
    while data[end] > 127 and end < len(data) - 9:
        end += 1
    footer = data[start:at] + coded + data[end + 1 : -8]
    return data[:start] + footer + struct.pack("<I", len(footer)) + b"PAR1"


def parquet_end(data: bytes, rng: np.random.Generator) -> bytes:
    """The footer's length."""
    length = int(
        rng.choice(
            [
                0,
                1,
                8,
                len(data) - 8,
                len(data) - 12,
                len(data),
                (1 << 31) - 1,
                1 << 31,
                (1 << 32) - 1,
            ]
        )
    )
    return data[:-8] + struct.pack("<I", length) + data[-4:]


def parquet_page_header(data: bytes, rng: np.random.Generator) -> bytes:
    """The first bytes of a column's data: type, sizes and number of values of its first page."""
    column = pq.read_metadata(pa.BufferReader(data)).row_group(0)
    chosen = column.column(int(rng.integers(column.num_columns)))
    offsets = [chosen.data_page_offset]
    if chosen.dictionary_page_offset is not None:
        offsets.append(chosen.dictionary_page_offset)
    at = int(rng.choice(offsets))
    return (flip_within, number)[int(rng.integers(2))](data, rng, at, at + 40)


def parquet_bomb(data: bytes, rng: np.random.Generator) -> bytes:
    """A row group of zeros, or of one value many times, from a few MB to a hundred GB; and any damage to it."""
    kind = ["values", "dictionary", "lists", "labels"][int(rng.integers(4))]
    size, num = (
        int(rng.choice([1 << 16, 1 << 20, 1 << 22])),
        int(rng.choice([1, 10, 60])),
    )
    path = Path(tempfile.gettempdir()) / f"bomb-{os.getpid()}.parquet"
    try:
        bombs.parquet(path, kind, min(size, 1 << 20) if kind == "labels" else size, num)
        made = path.read_bytes()
    finally:
        path.unlink(missing_ok=True)
    return made if rng.integers(2) else parquet_footer(made, rng)


# tar


def tar_header(data: bytes, rng: np.random.Generator) -> bytes:
    """A field of a header, whose checksum is then made right: sizes without end or below zero, other types."""
    at = _header(data, rng)
    out = bytearray(data)
    kind = rng.integers(4)
    if kind == 0:
        huge = [
            b"77777777777\0",
            b"\x80" + (1 << 62).to_bytes(11, "big"),
            b"\xff" * 11 + b"\0",
            b"\xff" * 10 + b"\xfe\0",
        ]
        small = [
            b"%011o\0" % int(rng.integers(1 << 20)),
            b"-0000001000\0",
            bytes(12),
            rng.bytes(12),
        ]
        out[at + 124 : at + 136] = (huge + small)[int(rng.integers(8))]
    elif kind == 1:
        out[at + 156] = int(rng.choice(list(b"0123456789LKxgXSVDAMN\0\xff")))
    elif kind == 2:
        out[at : at + 100] = flip(bytes(out[at : at + 100]), rng)
    else:
        out[at : at + 500] = flip(bytes(out[at : at + 500]), rng)
    return _checked(out, at)


def tar_pax(data: bytes, rng: np.random.Generator) -> bytes:
    """A header in front that says something of the next, or of all: of random records."""
    records = [
        *(b"size=%d" % size for size in (0, -1, -512, -100_000, 1 << 40, 1 << 70)),
        *(
            b"path=" + path
            for path in (
                b"../../x.jpg",
                b"/etc/x.jpg",
                b"a/b.jpg",
                b"\xff\xfe/a.jpg",
                b"a" * 5000,
            )
        ),
        *(b"mtime=" + time for time in (b"nan", b"inf", b"1e999", b"x")),
        *(
            b"GNU.sparse.major=1",
            b"GNU.sparse.minor=0",
            b"GNU.sparse.realsize=99999999999",
            b"GNU.sparse.name=a/b.jpg",
        ),
        *(
            b"GNU.sparse.map=0,1,2",
            b"GNU.sparse.map=x",
            b"GNU.sparse.size=5",
            b"hdrcharset=BINARY",
            b"hdrcharset=\xff",
        ),
        *(b"size=" + b"9" * 5000, b"1" * 5000),
    ]
    body = b""
    for _ in range(int(rng.integers(1, 5))):
        record = records[int(rng.integers(len(records)))]
        length = (
            len(record) + 4
            if rng.integers(4)
            else int(rng.choice([0, 1, 1 << 31, 999]))
        )
        body += b"%d %s\n" % (length, record)
    header = tarfile.TarInfo("x")
    header.size, header.type = len(body), bytes([int(rng.choice(list(b"xgXLKS")))])
    block = header.tobuf(tarfile.USTAR_FORMAT) + body + bytes(-len(body) % 512)
    at = _header(data, rng)
    repeat = int(rng.choice([1, 1, 1, 3, 400]))
    return data[:at] + block * repeat + data[at:]


def _header(data: bytes, rng: np.random.Generator) -> int:
    return int(
        rng.choice(
            [
                at
                for at in range(0, len(data), 512)
                if data[at + 257 : at + 262] == b"ustar"
            ]
        )
    )


def _checked(out: bytearray, at: int) -> bytes:
    out[at + 148 : at + 156] = b" " * 8
    out[at + 148 : at + 156] = b"%06o\0 " % sum(out[at : at + 512])
    return bytes(out)


def tar_block(data: bytes, rng: np.random.Generator) -> bytes:
    return page(data, rng, 512)


def webdataset_text(data: bytes, rng: np.random.Generator) -> bytes:
    """What raypipe has noted, a label, a number or JSON: any byte of it."""
    starts = [
        at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"
    ]
    sizes = {at + 512: int(data[at + 124 : at + 135], 8) for at in starts}
    small = [at for at, size in sizes.items() if 0 < size < 700 and data[at] < 128]
    at = int(rng.choice(small[:1] if rng.integers(3) else small))
    return flip_within(data, rng, at, at + sizes[at])


# A folder: what may be there in a file's place


def no_file(path: Path, rng: np.random.Generator) -> str:
    """Put something else in a file's place, and name it."""
    path.unlink()
    kind = str(
        rng.choice(
            [
                "nothing",
                "empty",
                "folder",
                "link to nothing",
                "link to itself",
                "pipe",
                "40 GB",
            ]
        )
    )
    if kind == "empty":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "40 GB":  # of holes
        path.touch()
        os.truncate(path, 40 << 30)
    elif kind != "nothing":
        path.symlink_to(
            path if kind == "link to itself" else path.parent / "absent.jpg"
        )
    return kind


OF_KIND: dict[str, dict[str, Mutation]] = {
    "lmdb": {
        "page": page,
        "meta": lmdb_meta,
        "tree": lmdb_tree,
        "tree, again": lmdb_tree,
    },
    "parquet": {
        "page": page,
        "footer": parquet_footer,
        "footer number": parquet_varint,
        "footer length": parquet_end,
        "page header": parquet_page_header,
        "bomb": parquet_bomb,
    },
    "tar": {
        "block": tar_block,
        "header": tar_header,
        "extended header": tar_pax,
        "end": truncate,
    },
    "webdataset": {
        "header": tar_header,
        "extended header": tar_pax,
        "text": webdataset_text,
        "text, again": webdataset_text,
    },
    "folder": {},
}
