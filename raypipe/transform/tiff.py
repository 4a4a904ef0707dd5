"""TIFF of any number of channels and bits, as it is stored: uncompressed or deflated, by numpy.

libtiff, in the libraries at hand, gives 8 bits, or up to four channels. Other compressions are left to it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from raypipe.errors import SampleError
from raypipe.transform.image_header import check_size
from raypipe.transform.jpeg import upright

_NONE, _DEFLATE = 1, (8, 32946)
_PALETTE, _YCBCR = 3, 6
_KINDS = {1: "u", 2: "i", 3: "f", 4: "u"}
_TYPES = {1: "u1", 3: "u2", 4: "u4", 16: "u8"}  # of tags' values, those that are whole numbers
_COPIES = 3  # of the pixels at a time, where cv2 decodes


@dataclass(frozen=True)
class TiffLayout:
    """What the first directory of a TIFF says.

    Attributes:
        height, width, channels: of the image as it is stored.
        dtype: of its values, in the file's byte order; None where they are fewer than 8 bits.
        is_coded: values are no channels: a palette's, or YCbCr.
        tiled: blocks are tiles, which are whole at the edges, and no strips.
        block: height and width of one, pixels.
        separate: each channel has blocks of its own.
        offsets, counts: bytes of each block.
        compression, predictor, orientation: TIFF's numbers.
    """

    height: int
    width: int
    channels: int
    dtype: np.dtype[Any] | None
    is_coded: bool
    tiled: bool
    block: tuple[int, int]
    separate: bool
    offsets: list[int]
    counts: list[int]
    compression: int
    predictor: int
    orientation: int

    @property
    def is_plain(self) -> bool:
        """Whether `read_tiff` reads it."""
        return self.compression in (_NONE, *_DEFLATE)


def tiff_layout(data: bytes) -> TiffLayout:
    """The layout of a TIFF within the limits.

    Raises:
        SampleError: it is over a limit, or of a kind that is not read.
        Exception: whatever numpy raises on damaged bytes.
    """
    tags = _tags(data)

    def one(tag: int, default: int | None = None) -> int:
        values = tags.get(tag) or ([] if default is None else [default])
        if not values:
            raise ValueError(f"it has no tag {tag}")
        if any(value != values[0] for value in values):
            raise SampleError(
                f"a TIFF whose channels differ in tag {tag}, {values[:8]}: store them alike, or as .npy"
            )
        return int(values[0])

    width, height, channels = one(256), one(257), one(277, 1)
    bits, kind = one(258, 1), _KINDS.get(one(339, 1))
    if kind is None or (bits >= 8 and (bits not in (8, 16, 32, 64) or (kind == "f" and bits == 8))):
        raise SampleError(f"a TIFF of {bits} bits a channel, of format {one(339, 1)}: store 8, 16, 32 or 64 bits")
    dtype = np.dtype(f"{_order(data)}{kind}{bits // 8}") if bits >= 8 else None
    tiled = 324 in tags
    block = (one(323), one(322)) if tiled else (min(height, one(278, height)), width)
    if min(width, height, channels, *block) < 1:
        raise ValueError(f"it has {width}x{height} pixels of {channels} channels, in blocks of {block}")
    pixel_bytes = channels * (dtype.itemsize if dtype else 1)
    check_size(width, height, width * height * pixel_bytes * _COPIES)
    check_size(block[1], block[0], (width * height + 2 * block[0] * block[1]) * pixel_bytes)
    offsets, counts = tags[324 if tiled else 273], tags.get(325 if tiled else 279, [])
    if len(offsets) == 1 and not counts and one(259, 1) == _NONE:  # old writers leave it out
        counts = [len(data) - offsets[0]]
    if len(offsets) != len(counts) or any(at + num > len(data) for at, num in zip(offsets, counts, strict=True)):
        raise SampleError(f"truncated TIFF ({len(data)} bytes)")
    separate, coded = one(284, 1) == 2, one(262, 1) in (_PALETTE, _YCBCR)
    numbers = (one(259, 1), one(317, 1), one(274, 1))
    of_blocks = (tiled, block, separate, offsets, counts)
    return TiffLayout(height, width, channels, dtype, coded, *of_blocks, *numbers)


def _order(data: bytes) -> str:
    return "<" if data[:1] == b"I" else ">"


def _tags(data: bytes) -> dict[int, list[int]]:
    """The whole numbers of the first directory, by tag; of the classic form, or BigTIFF."""
    order, big = _order(data), data[2:4] in (b"\x2b\0", b"\0\x2b")
    word, entry_bytes = ("u8", 20) if big else ("u4", 12)

    def numbers(kind: str, at: int, count: int = 1) -> list[int]:
        return np.frombuffer(data, f"{order}{kind}", count, at).tolist()

    (at,) = numbers(word, 8 if big else 4)
    (num,) = numbers("u8" if big else "u2", at)
    first = at + (8 if big else 2)
    if first + num * entry_bytes > len(data):
        raise SampleError(f"truncated TIFF ({len(data)} bytes)")
    found: dict[int, list[int]] = {}
    for entry in range(first, first + num * entry_bytes, entry_bytes):
        tag, kind = numbers("u2", entry, 2)
        (count,) = numbers(word, entry + 4)
        place = entry + (12 if big else 8)
        if tag in found:
            raise ValueError("a tag stands there twice")  # of two sizes libraries read one or the other
        found[tag] = []
        if kind in _TYPES and count:
            if count * int(_TYPES[kind][1]) > (8 if big else 4):
                (place,) = numbers(word, place)
            found[tag] = numbers(_TYPES[kind], place, count)
    return found


def read_tiff(data: bytes, layout: TiffLayout) -> np.ndarray:
    """The image (H, W, C), upright, of its dtype in native order; `layout.is_plain` and has a dtype.

    Raises:
        SampleError: a block is cut short.
        Exception: whatever zlib or numpy raise on damaged bytes.
    """
    assert layout.dtype is not None
    image = np.empty((layout.height, layout.width, layout.channels), layout.dtype.newbyteorder("="))
    rows, columns = layout.block
    parts = 1 if not layout.separate else layout.channels
    num = parts * -(-layout.height // rows) * -(-layout.width // columns)
    if num != len(layout.offsets):
        raise ValueError(f"{len(layout.offsets)} blocks, where the image has {num}")
    for number, (part, top, left) in enumerate(_places(layout, parts)):
        place = image[top : top + rows, left : left + columns]
        if layout.separate:
            place = place[..., part : part + 1]
        # The last strip has the rows that are left.
        shape = (rows if layout.tiled else place.shape[0], columns, place.shape[2])
        begin = layout.offsets[number]
        values = _block(data[begin : begin + layout.counts[number]], layout, shape)
        place[...] = values[: place.shape[0], : place.shape[1]]
    return upright(image, layout.orientation)


def _places(layout: TiffLayout, parts: int) -> Iterator[tuple[int, int, int]]:
    """Part, top and left of each block, in the order of the file."""
    rows, columns = layout.block
    for part in range(parts):
        for top in range(0, layout.height, rows):
            for left in range(0, layout.width, columns):
                yield part, top, left


def _block(stored: bytes, layout: TiffLayout, shape: tuple[int, int, int]) -> np.ndarray:
    """The values of a strip or tile (h, w, c)."""
    assert layout.dtype is not None
    rows, columns, channels = shape
    num_bytes = rows * columns * channels * layout.dtype.itemsize
    if layout.compression != _NONE:
        stored = zlib.decompressobj().decompress(stored, num_bytes)  # a bomb inflates no further
    if len(stored) < num_bytes:
        raise SampleError(f"truncated TIFF: a block of {len(stored)} bytes, not {num_bytes}")
    values = np.frombuffer(stored, layout.dtype, rows * columns * channels).reshape(shape)
    if layout.predictor == 1:
        return values
    if layout.predictor == 2 and layout.dtype.kind in "ui":
        native = values.astype(layout.dtype.newbyteorder("="))
        return np.cumsum(native, axis=1, dtype=native.dtype)  # which wraps, as it must
    if layout.predictor == 3 and layout.dtype.kind == "f":  # Adobe's: differences of the bytes, the highest first
        flat = np.frombuffer(stored, np.uint8, num_bytes).reshape(rows, -1, channels)
        summed = np.cumsum(flat, axis=1, dtype=np.uint8).reshape(rows, layout.dtype.itemsize, columns * channels)
        ordered = np.ascontiguousarray(summed.transpose(0, 2, 1))
        return ordered.view(layout.dtype.newbyteorder(">")).reshape(shape)
    raise SampleError(f"a TIFF of {layout.dtype} with predictor {layout.predictor}: store it without")
