"""Fields of a sample whose image the training device decodes, and the layout of their maps; see `encoded`.

encoded.data    bytes: the image as it is stored
encoded.map     int32 (n,): the pixels that are used, and where they are put
"""

from __future__ import annotations

import numpy as np

DATA = "encoded.data"
MAP = "encoded.map"

# Columns of a map: whether the image is transposed first, the color beyond its edges, its rows, its columns.
TURNED = 0
FILL = slice(1, 4)
AXES = 4
# An axis has the image's side, then the span that is used, which may go beyond the edges; then for each resize:
SIDE = 0
START = 1
LENGTH = 2
RESIZES = 3
# the filter, the pixels that the span becomes, and those of them that are kept: number `AT + STEP * i` is pixel i.
FILTER = 0
RESIZED = 1
AT = 2
STEP = 3
KEPT = 4
NUM_RESIZE = 5


def axis_columns(num_columns: int, axis: int) -> slice:
    """The columns of a map that have its rows (0) or its columns (1)."""
    length = (num_columns - AXES) // 2
    return slice(AXES + axis * length, AXES + (axis + 1) * length)


CropBox = tuple[int, int, int, int]
"""(top, left, bottom, right) of an image, pixels."""


def sides_of_map(of_map: np.ndarray) -> tuple[int, int]:
    """(height, width) of an image, before it is turned."""
    rows, columns = (
        int(of_map[axis_columns(len(of_map), axis)][SIDE]) for axis in (0, 1)
    )
    return (columns, rows) if of_map[TURNED] else (rows, columns)


def box_of_map(of_map: np.ndarray) -> CropBox:
    """The box of an image, before it is turned, that its map needs: at least a pixel."""
    ends = []
    for axis in (0, 1):
        of_axis = of_map[axis_columns(len(of_map), axis)].tolist()
        side, start, length, *_ = of_axis
        first = min(max(0, start), side - 1)
        ends.append((first, max(first + 1, min(side, start + length))))
    (top, bottom), (left, right) = reversed(ends) if of_map[TURNED] else ends
    return top, left, bottom, right
