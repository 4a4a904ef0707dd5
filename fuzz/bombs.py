"""Small files that declare, or unpack to, far more than they are."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def jpeg_of_scans(width: int, height: int, num_scans: int) -> bytes:
    """A gray progressive JPEG, lawful up to 882 scans: one bit of one coefficient each, none of which is set."""
    num_blocks = -(-width // 8) * -(-height // 8)
    # A code of one bit for each table's only symbol: no difference; and a run of up to 32,767 empty blocks.
    tables = _segment(0xC4, b"\0\1" + bytes(15) + b"\0") + _segment(
        0xC4, b"\x10\1" + bytes(15) + b"\xe0"
    )
    frame = _segment(0xC2, struct.pack(">BHHB", 8, height, width, 1) + b"\1\x11\0")
    runs = "011111111111111" * -(-num_blocks // 32767)
    runs += "1" * (-len(runs) % 8)
    empty = int(runs, 2).to_bytes(len(runs) // 8, "big").replace(b"\xff", b"\xff\0")
    scans = [_segment(0xDA, b"\1\1\0\0\0\0") + bytes(-(-num_blocks // 8))]
    steps = [(at, low) for at in range(1, 64) for low in range(13, -1, -1)]
    for number in range(num_scans - 1):
        at, low = steps[number % len(steps)]
        high = 0 if low == 13 else low + 1
        scans.append(_segment(0xDA, bytes([1, 1, 0, at, at, high << 4 | low])) + empty)
    quantization = _segment(0xDB, b"\0" + b"\1" * 64)
    return b"\xff\xd8" + quantization + frame + tables + b"".join(scans) + b"\xff\xd9"


def _segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def rare_jpeg(
    sampling: int = 0x14, width: int = 16, height: int = 32, color: str = "orange"
) -> bytes:
    """One color, chroma subsampled 4:4:1 where encoders write 4:2:0: as many blocks, in another arrangement."""
    out = io.BytesIO()
    Image.new("RGB", (width, height), color).save(out, "JPEG", subsampling=2)
    data = bytearray(out.getvalue())
    at = data.index(b"\xff\xc0") + 11
    assert data[at] == 0x22
    data[at] = sampling
    return bytes(data)


def animated_webp(width: int, height: int) -> bytes:
    """A canvas with one frame of one pixel."""
    out = io.BytesIO()
    Image.new("RGB", (1, 1)).save(out, "WEBP", lossless=True)
    canvas = (
        b"\x02\0\0\0"
        + (width - 1).to_bytes(3, "little")
        + (height - 1).to_bytes(3, "little")
    )
    frame = bytes(12) + b"\x64\0\0\0" + out.getvalue()[12:]
    chunks = [(b"VP8X", canvas), (b"ANIM", bytes(6)), (b"ANMF", frame)]
    body = b"".join(
        name + struct.pack("<I", len(content)) + content for name, content in chunks
    )
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def tiled_tiff(side: int, tile: int) -> bytes:
    """A square of deflated zeros, of `side` pixels, in one tile of `tile`."""
    squeeze, row, data = zlib.compressobj(1), bytes(3 * tile), bytearray()
    for _ in range(tile):
        data += squeeze.compress(row)
    data += squeeze.flush()
    tags = {
        256: side,
        257: side,
        258: 8,
        259: 8,
        262: 2,
        277: 3,
        322: tile,
        323: tile,
        324: 0,
        325: len(data),
    }
    start = 8 + 2 + 12 * len(tags) + 4
    packed = b"".join(
        struct.pack("<HHII", tag, 4, 1, start if tag == 324 else value)
        for tag, value in tags.items()
    )
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + packed + bytes(4) + bytes(data)


def parquet(path: Path, kind: str, size: int, num: int) -> None:
    """One row group of `num` batches: of an image of `size` zeros each, stored or in a dictionary, or of labels.

    Args:
        kind: "values", "dictionary" (a thousand times), "lists" (of the same), or "labels", `size` of them.
    """
    image = pa.array([bytes(size)], pa.binary())
    if kind == "values":
        batch = pa.record_batch({"image": image, "label": [0]})
    elif kind == "labels":
        rows = pa.array([b""] * size, pa.binary())
        batch = pa.record_batch({"image": rows, "label": zeros(size)})
    else:
        repeated = pa.DictionaryArray.from_arrays(zeros(1000, pa.int32()), image)
        if kind == "lists":
            lists = pa.ListArray.from_arrays(pa.array([0, 1000], pa.int32()), repeated)
            batch = pa.record_batch(
                {"image": pa.array([b"x"]), "label": [0], "names": lists}
            )
        else:
            batch = pa.record_batch({"image": repeated, "label": zeros(1000)})
    pq.write_table(
        pa.Table.from_batches([batch] * num),
        path,
        row_group_size=1 << 30,
        compression="zstd",
        use_dictionary=kind != "values",
        dictionary_pagesize_limit=1 << 30,
        write_statistics=False,
        store_schema=False,  # with it a dictionary stays one
    )


def zeros(num: int, kind: pa.DataType | None = None) -> pa.Array:
    kind = kind or pa.int64()
    return pa.Array.from_buffers(
        kind, num, [None, pa.py_buffer(bytes(num * kind.bit_width // 8))]
    )
