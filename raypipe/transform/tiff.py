"""The first directory of a TIFF, held against its file before a library reads it.

Pillow, libtiff and tifffile read all tags of a directory, and each strip by its tags. Tags that overlap take
memory for the file's bytes many times over, strips that overlap take time. `tiff_header` walks the directory with
numpy, checks it, and keeps in a copy of the file only the tags that say how pixels are stored. Libraries get that
copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raypipe.errors import SampleError
from raypipe.transform.limits import check_size

NONE, LZW, JPEG, PACKBITS = 1, 5, 7, 32773
LOSSLESS = frozenset({NONE, LZW, 8, 32946, PACKBITS, 34926, 50000})
"""Compressions of bytes, whose output has a known size: none, LZW, Deflate, PackBits, Zstandard."""
PREDICTED = LOSSLESS - {NONE, PACKBITS}
"""Compressions that libtiff applies a predictor to; with others it ignores the tag."""

_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _ORIENTATION, _CHANNELS = 256, 257, 258, 259, 262, 274, 277
_FILL_ORDER, _OFFSETS, _ROWS, _COUNTS, _PLANAR, _PREDICTOR, _FORMAT = 266, 273, 278, 279, 284, 317, 339
_TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_COUNTS, _COLORS = 322, 323, 324, 325, 320
# Options of faxes, inks, extra samples, tables of JPEG, YCbCr.
_OTHERS = {292, 293, 332, 338, 347, 512, 513, 514, 515, 519, 520, 521, 529, 530, 531, 532}
_STRIPS = {_OFFSETS, _ROWS, _COUNTS}
_TILES = {_TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_COUNTS}
_TAGS = sorted(
    {_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _ORIENTATION, _CHANNELS, _PLANAR, _PREDICTOR, _FORMAT}
    | {_COLORS, _FILL_ORDER, *_STRIPS, *_TILES, *_OTHERS}
)
_TYPES = {1: "u1", 3: "u2", 4: "u4", 16: "u8"}  # whole numbers without a sign
_MAX_BLOCKS = 1 << 18  # strips or tiles, for which tifffile takes 1.1 s
_MAX_VALUES = 1 << 16  # not its own tag: one for each channel
_MOST = {_COLORS: 3 << 16} | dict.fromkeys((_OFFSETS, _COUNTS, _TILE_OFFSETS, _TILE_COUNTS), _MAX_BLOCKS)


@dataclass(frozen=True)
class TiffHeader:
    """First directory of a TIFF.

    Attributes:
        file: the TIFF, whose directory has no other tags than those of pixels.
        height, width, channels: shape of the stored image.
        bits, format: bits and TIFF's sample format of a channel.
        compression, predictor, photometric, orientation: TIFF's numbers.
        block_pixels: pixels of a strip or tile, which may be larger than the image.
    """

    file: bytes
    height: int
    width: int
    channels: int
    bits: int
    format: int
    compression: int
    predictor: int
    photometric: int
    orientation: int
    block_pixels: int


def tiff_header(data: bytes) -> TiffHeader:
    """Check a TIFF's first directory; takes memory for a copy of the file.

    Raises:
        SampleError: it is over a limit, or cut short, or its strips or tiles overlap.
        ValueError: another damage, or whatever else numpy raises.
    """
    order, is_big = "<" if data[:1] == b"I" else ">", 43 in data[2:4]
    word, length = np.dtype(f"{order}u{8 if is_big else 4}"), np.dtype(f"{order}u{8 if is_big else 2}")
    entry = np.dtype([("tag", f"{order}u2"), ("type", f"{order}u2"), ("count", word), ("value", word)])
    (start,) = np.frombuffer(data, word, 1, 8 if is_big else 4).tolist()
    (num,) = np.frombuffer(data, length, 1, start).tolist()
    first = start + length.itemsize
    if first + num * entry.itemsize > len(data):
        raise SampleError(f"truncated TIFF ({len(data)} bytes)")
    entries = np.frombuffer(data, entry, num, first)
    places = np.flatnonzero(np.isin(entries["tag"], _TAGS))
    if len(np.unique(entries["tag"][places])) < len(places):
        raise ValueError("a tag occurs twice")  # libraries differ in which of two sizes they read
    tags: dict[int, np.ndarray] = {}
    for place in places.tolist():
        tag, kind, count, value = entries[place].tolist()
        if count > _MOST.get(tag, _MAX_VALUES):
            raise SampleError(f"a TIFF with {count} values in tag {tag}, limit is {_MOST.get(tag, _MAX_VALUES)}")
        tags[tag] = np.empty(0)
        if kind in _TYPES:
            dtype = np.dtype(order + _TYPES[kind])
            if count * dtype.itemsize <= word.itemsize:
                value = first + (place + 1) * entry.itemsize - word.itemsize
            tags[tag] = np.frombuffer(data, dtype, count, value)

    def one(tag: int, default: int | None = None) -> int:
        values = tags.get(tag, np.array([] if default is None else [default]))
        if not len(values) or (len(values) > 1 and tag not in (_BITS, _FORMAT)):
            raise ValueError(f"it has {len(values)} values in tag {tag}, not one")
        if (values != values[0]).any():
            raise SampleError(
                f"a TIFF whose channels differ in tag {tag}, {values[:8].tolist()}: store them alike"
            )
        return int(values[0])

    width, height, channels, bits = one(_WIDTH), one(_HEIGHT), one(_CHANNELS, 1), one(_BITS, 1)
    compression, is_tiled = one(_COMPRESSION, NONE), _TILE_OFFSETS in tags
    rows, columns = (one(_TILE_HEIGHT), one(_TILE_WIDTH)) if is_tiled else (min(height, one(_ROWS, height)), width)
    if min(width, height, channels, bits, rows, columns) < 1:
        raise ValueError(f"it has {width}x{height} pixels of {channels} channels, in blocks of {columns}x{rows}")
    planar, fill_order = one(_PLANAR, 1), one(_FILL_ORDER, 1)
    if not {planar, fill_order} <= {1, 2}:
        raise ValueError(f"it has planes by {planar} and bits by {fill_order}, which TIFF does not define")
    parts = channels if planar == 2 else 1
    num_blocks = parts * -(-height // rows) * -(-width // columns)
    row_bytes = -(-columns * bits * channels // parts // 8)
    check_size(width, height, num_blocks * rows * row_bytes)  # tiles may be far larger than the image
    offsets, counts = (
        tags.get(tag, np.empty(0)).astype(np.int64)
        for tag in ((_TILE_OFFSETS, _TILE_COUNTS) if is_tiled else (_OFFSETS, _COUNTS))
    )
    if len(offsets) == 1 and compression == NONE:  # old writers leave the count out, or have it wrong
        counts = np.array([rows * row_bytes])
    if not len(offsets) == len(counts) == num_blocks:
        raise ValueError(f"{len(offsets)} blocks of {len(counts)} lengths, where the image has {num_blocks}")
    if compression == NONE and counts.sum() < row_bytes * (num_blocks * rows if is_tiled else parts * height):
        raise SampleError(f"truncated TIFF: {counts.sum()} bytes of pixels")
    if ((offsets < 8) | (counts < 1) | (offsets > len(data)) | (counts > len(data) - offsets)).any():
        raise SampleError(f"truncated TIFF: a strip or tile is not in the file ({len(data)} bytes)")

    # Left out: tags of which libraries read one or the other, and a predictor where libtiff ignores it.
    ignored = (_STRIPS if is_tiled else _TILES) | ({_PREDICTOR} if compression == NONE else set())
    kept = entries[places][~np.isin(entries["tag"][places], sorted(ignored))]
    directory = np.array([len(kept)], length).tobytes() + kept.tobytes() + bytes(word.itemsize)
    begins, ends = np.append(offsets, start), np.append(offsets + counts, start + len(directory))
    in_order = np.argsort(begins)
    if (begins[in_order][1:] < ends[in_order][:-1]).any():
        raise SampleError("a TIFF whose strips or tiles overlap: store it again")
    return TiffHeader(
        file=b"".join((data[:start], directory, data[start + len(directory) :])),
        height=height,
        width=width,
        channels=channels,
        bits=bits,
        format=one(_FORMAT, 1),
        compression=compression,
        predictor=1 if _PREDICTOR in ignored else one(_PREDICTOR, 1),
        photometric=one(_PHOTOMETRIC, 0),
        orientation=one(_ORIENTATION, 1),
        block_pixels=rows * columns,
    )
