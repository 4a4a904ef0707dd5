"""Tiles with captions as one picture. Knows nothing of what they show."""

from __future__ import annotations

import colorsys
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from raypipe.logs import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 100
_FONT: Any = {"family": "monospace", "parse_math": False}
_TILE, _ROW, _GUTTER, _GAP, _MARGIN = 160, 208, 6, 28, 24  # pixels
# Of labels, RGBA. Neighbouring labels are far apart in hue: each is a golden angle from the one before.
_COLOURS = np.array([(*colorsys.hsv_to_rgb(label * 0.618 % 1, 0.9, 1), 0.43) for label in range(256)])
_COLOURS[0], _COLOURS[255] = (0, 0, 0, 0), (0, 0, 0, 0.43)  # the background, and what is ignored


@dataclass(frozen=True)
class Tile:
    """One image of the picture.

    Attributes:
        image: uint8 (H, W, 3); None where there is none.
        lines: the caption, two lines at most.
        reason: why there is no image.
        mask: uint8 (H, W), classes, drawn over it: 0 as it is, 255 dark, others tinted.
        boxes: float (K, 5), `[x0, y0, x1, y1, label]`, drawn over it; those of label -1 are left out.
    """

    image: np.ndarray | None
    lines: tuple[str, ...] = ()
    reason: str = ""
    mask: np.ndarray | None = None
    boxes: np.ndarray | None = None


def draw(rows: list[list[Tile]], *, title: str, note: str, headers: list[str]) -> Figure:
    """Rows of 1 + 3·E tiles as one picture, under a title, a note and E headers."""
    from matplotlib.figure import Figure

    names = ["decoded", *("transformed", "augmented", "mixed") * len(headers)]
    lefts = [_MARGIN + i * (_TILE + _GUTTER) + (i + 2) // 3 * _GAP for i in range(len(names))]
    inside = lefts[-1] + _TILE - _MARGIN
    above = _MARGIN + 84 + 20 * len(wrapped(note, 13, inside, 8))
    width, height = inside + 2 * _MARGIN, above + len(rows) * _ROW
    figure = Figure((width / _DPI, height / _DPI), dpi=_DPI)

    def write(
        x: int, y: int, text: str, size: int = 10, span: int = _TILE, most: int = 1, faint: bool = True
    ) -> None:
        colour, points = "#666666" if faint else "#1a1a1a", size * 72 / _DPI
        for i, line in enumerate(wrapped(text, size, span, most)):
            top = y + size + 1.5 * size * i
            figure.text(x / width, 1 - top / height, line, size=points, color=colour, **_FONT)

    write(_MARGIN, _MARGIN, title, 20, inside, faint=False)
    write(_MARGIN, _MARGIN + 34, note, 13, inside, 8)
    for left, header in zip([lefts[0], *lefts[1::3]], ["store", *headers], strict=True):
        write(left, above - 44, header, 13, _TILE if left == _MARGIN else 3 * _TILE, faint=False)
    for left, name in zip(lefts, names, strict=True):
        write(left, above - 18, name)
    for top, row in zip(range(above, height, _ROW), rows, strict=True):
        for left, tile in zip(lefts, row, strict=True):
            place = left / width, 1 - (top + _TILE) / height, _TILE / width, _TILE / height
            _draw_tile(figure.add_axes(place, xticks=[], yticks=[], facecolor="#dcdcdc"), tile)
            write(left + 8, top + 8, tile.reason, span=_TILE - 16, most=8, faint=False)
            for i, line in enumerate(tile.lines):
                write(left, top + _TILE + 4 + 17 * i, line, faint=i > 0)
    return figure


def _draw_tile(axes: Any, tile: Tile) -> None:
    from matplotlib.patches import Rectangle

    axes.spines[:].set_visible(False)
    if tile.image is None:
        return
    # Enlarged pixels stay pixels.
    axes.imshow(tile.image, interpolation="nearest" if max(tile.image.shape) <= _TILE else "auto")
    if tile.mask is not None:
        axes.imshow(_COLOURS[tile.mask], interpolation="nearest")
    for x0, y0, x1, y1, label in () if tile.boxes is None else tile.boxes:
        if label >= 0:
            colour = _COLOURS[1 + int(label) % 254, :3]
            # Coordinates of pixels are those of their centres here.
            axes.add_patch(
                Rectangle((x0 - 0.5, y0 - 0.5), x1 - x0, y1 - y0, fill=False, edgecolor=colour, linewidth=2)
            )


def wrapped(text: str, size: int, width: int, most: int) -> list[str]:
    """Text in lines no wider than `width` pixels, in letters that the font has; an ellipsis where it was cut."""
    written = printable(text).encode("latin-1", "backslashreplace").decode("latin-1")
    columns = width // round(0.602 * size)  # DejaVu Sans Mono is so wide, by whole pixels
    lines = textwrap.wrap(written, columns)
    if len(lines) > most:
        lines[most - 1 :] = [lines[most - 1][: columns - 1] + "…"]
    return lines
