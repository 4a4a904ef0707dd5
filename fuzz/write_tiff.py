"""A TIFF of any layout, byte by byte."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import imagecodecs
import numpy as np


def tiff(
    array: np.ndarray,
    *,
    order: str = "<",
    is_big: bool = False,
    block: tuple[int, int] = (4, 0),
    tiled: bool = False,
    compression: int = 1,
    separate: bool = False,
    predictor: int = 1,
    fill_order: int = 1,
    tags: dict[int, int] | None = None,
) -> bytes:
    """A TIFF (H, W, C), written by its specification: strips of 4 rows, or tiles. bool becomes one bit a value."""
    height, width, channels = array.shape
    rows, columns = block[0], block[1] or width
    stored = []
    for part in np.split(array, channels, axis=2) if separate else [array]:
        for top in range(0, height, rows):
            for left in range(0, width, columns):
                values = part[top : top + rows, left : left + columns]
                if tiled:
                    ends = [
                        (0, full - side)
                        for full, side in zip(
                            (rows, columns), values.shape, strict=False
                        )
                    ]
                    values = np.pad(values, (*ends, (0, 0)))
                if predictor == 2:
                    values = values.view(f"u{array.itemsize}")
                    values = np.diff(
                        values, axis=1, prepend=np.zeros_like(values[:, :1])
                    )
                data = np.ascontiguousarray(
                    values, values.dtype.newbyteorder(order)
                ).tobytes()
                if array.dtype == bool:
                    data = np.packbits(
                        values.reshape(len(values), -1), axis=1
                    ).tobytes()
                if predictor == 3:
                    h, w, c = values.shape
                    planes = np.ascontiguousarray(
                        values, array.dtype.newbyteorder(">")
                    ).view(np.uint8)
                    planes = (
                        planes.reshape(h, w * c, -1)
                        .transpose(0, 2, 1)
                        .reshape(h, -1, c)
                    )
                    data = np.diff(
                        planes, axis=1, prepend=np.zeros_like(planes[:, :1])
                    ).tobytes()
                data = PACKED[compression](data)
                stored.append(data.translate(REVERSED) if fill_order == 2 else data)
    kind = {"b": 1, "u": 1, "i": 2, "f": 3}[array.dtype.kind]
    places, at = [], 16 if is_big else 8
    for data in stored:
        places.append(at)
        at += len(data)
    counts = list(map(len, stored))
    entries: dict[int, list[int]] = {
        256: [width],
        257: [height],
        258: [1 if array.dtype == bool else array.itemsize * 8] * channels,
        259: [compression],
        262: [1],
        266: [fill_order],
        277: [channels],
        284: [2 if separate else 1],
        317: [predictor],
        339: [kind] * channels,
    }
    entries |= {322: [columns], 323: [rows], 324: places, 325: counts} if tiled else {}
    entries |= {} if tiled else {273: places, 278: [rows], 279: counts}
    entries |= {tag: [value] for tag, value in (tags or {}).items()}
    word, length, type_, size = ("Q", "Q", 16, 8) if is_big else ("I", "H", 4, 4)
    more, directory = b"", b""
    start = at + struct.calcsize(length) + (4 + 2 * size) * len(entries) + size
    for tag, values in sorted(entries.items()):
        packed = struct.pack(f"{order}{len(values)}{word}", *values)
        place = packed
        if len(packed) > size:
            place = struct.pack(f"{order}{word}", start + len(more))
            more += packed
        directory += struct.pack(f"{order}HH{word}", tag, type_, len(values)) + place
    head = {"<": b"II", ">": b"MM"}[order] + struct.pack(
        f"{order}H", 43 if is_big else 42
    )
    return (
        head
        + (struct.pack(f"{order}HH", 8, 0) if is_big else b"")
        + struct.pack(f"{order}{word}", at)
        + b"".join(stored)
        + struct.pack(f"{order}{length}", len(entries))
        + directory
        + bytes(size)
        + more
    )


PACKED: dict[int, Callable[[bytes], bytes]] = {
    1: bytes,
    5: imagecodecs.lzw_encode,
    8: zlib.compress,
    32773: imagecodecs.packbits_encode,
    32946: zlib.compress,
    50000: imagecodecs.zstd_encode,
}

REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
