"""Draws tiles into one picture, with Pillow."""

from __future__ import annotations

import colorsys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raypipe.printing import printable

_TILE = 160
_ROW = 212
_GUTTER = 8
_MARGIN = 24  # pixels
_LETTER = 6
_LINE = 13  # pixels, in the font of Pillow that has equally wide letters, of Latin-1
# RGBA of labels. Neighbors are far apart in hue: each label is a golden angle from the one before.
_COLORS = np.array(
    [(*colorsys.hsv_to_rgb(label * 0.618 % 1, 0.9, 1), 0.43) for label in range(256)]
)
_COLORS[0] = (0, 0, 0, 0)
_COLORS[255] = (0, 0, 0, 0.43)  # the background, and ignored pixels
_COLORS = (_COLORS * 255).astype(np.uint8)


@dataclass(frozen=True)
class Tile:
    """An image of the picture.

    Attributes:
        image: uint8 (H, W, 3); None = gray.
        lines: the caption, three lines at most.
        reason: why the image is missing.
        targets: drawn over the image, by name: mask, uint8 (H, W), classes (0 as it is, 255 dark, others tinted);
            boxes, float (K, 5), `[x0, y0, x1, y1, label]`; and keypoints, float (K, 3), `[x, y, label]`. Boxes and
            keypoints with negative labels are not drawn.
    """

    image: np.ndarray | None
    lines: Sequence[str] = ()
    reason: str = ""
    targets: Mapping[str, np.ndarray] = field(default_factory=dict)


class _Canvas:
    """A white picture with a grid of columns and a pen.

    Args:
        num_columns: columns of tiles.
        above: pixels over the first row.
        num_rows: rows of tiles.
    """

    def __init__(self, num_columns: int, above: int, num_rows: int) -> None:
        from PIL import Image, ImageDraw, ImageFont

        self._font = ImageFont.load_default_imagefont()
        size = (_width(num_columns) + 2 * _MARGIN, above + num_rows * _ROW)
        self.image = Image.new("RGB", size, "white")
        self._pen = ImageDraw.Draw(self.image)

    def write(self, column: int, y: int, lines: list[str]) -> None:
        """Write lines at the left of a column."""
        for number, line in enumerate(lines):
            start = (_left(column), y + number * _LINE)
            self._pen.text(start, line, "black", self._font)

    def put(self, column: int, y: int, tile: Tile) -> None:
        """Draw a tile, in the middle of its square, with its caption below."""
        x = _left(column)
        self._pen.rectangle((x, y, x + _TILE - 1, y + _TILE - 1), "#dcdcdc")
        if tile.image is not None:
            image = _drawn(tile.image, tile.targets)
            corner = (x + (_TILE - image.width) // 2, y + (_TILE - image.height) // 2)
            self.image.paste(image, corner)
        self.write(column, y + 8, wrapped(tile.reason, _TILE, 8))
        caption = [line for text in tile.lines for line in wrapped(text, _TILE, 1)]
        self.write(column, y + _TILE + 4, caption[:3])


def draw_grid(
    rows: list[list[Tile]], title: str, headers: list[str], names: list[str]
) -> Any:
    """Draw rows of 1 + n·E tiles into a PIL.Image, under a title and E headers of n names."""
    num_columns = 1 + len(names) * len(headers)
    heading = wrapped(title, _width(num_columns), 8)
    above = _MARGIN + _LINE * len(heading) + 44
    canvas = _Canvas(num_columns, above, len(rows))
    canvas.write(0, _MARGIN, heading)
    header_width = max(2, len(names)) * _TILE
    for number, header in enumerate(headers):
        column = 1 + number * len(names)
        canvas.write(column, above - 36, wrapped(header, header_width, 1))
    for column, name in enumerate(["decoded", *names * len(headers)]):
        canvas.write(column, above - 18, wrapped(name, _TILE, 1))
    for number, row in enumerate(rows):
        for column, tile in enumerate(row):
            canvas.put(column, above + number * _ROW, tile)
    return canvas.image


def draw_sheet(
    groups: list[list[Tile]], title: str, names: list[str], per_line: int
) -> Any:
    """Draw groups of equally many tiles side by side into a PIL.Image, under a title and the tiles' names."""
    per_line = max(1, min(per_line, len(groups)))
    num_columns = per_line * len(names)
    heading = wrapped(title, _width(num_columns), 8)
    above = _MARGIN + _LINE * len(heading) + 26
    canvas = _Canvas(num_columns, above, -(-len(groups) // per_line))
    canvas.write(0, _MARGIN, heading)
    for column in range(num_columns):
        name = names[column % len(names)]
        canvas.write(column, above - 18, wrapped(name, _TILE, 1))
    for number, group in enumerate(groups):
        line, place = divmod(number, per_line)
        for column, tile in enumerate(group):
            canvas.put(place * len(names) + column, above + line * _ROW, tile)
    return canvas.image


def _left(column: int) -> int:
    """Return where a column begins, in pixels."""
    return _MARGIN + column * (_TILE + _GUTTER)


def _width(num_columns: int) -> int:
    """Return the width of the columns, in pixels, without margins."""
    return num_columns * (_TILE + _GUTTER) - _GUTTER


def _drawn(pixels: np.ndarray, targets: Mapping[str, np.ndarray]) -> Any:
    """An image of a tile's size, with its targets."""
    from PIL import Image, ImageDraw

    scale = _TILE / max(pixels.shape[:2])
    size = (
        max(1, round(pixels.shape[1] * scale)),
        max(1, round(pixels.shape[0] * scale)),
    )
    # Enlarged pixels stay pixels.
    image = Image.fromarray(pixels).resize(
        size, Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BOX
    )
    if "mask" in targets:
        tint = Image.fromarray(_COLORS[targets["mask"]]).resize(
            size, Image.Resampling.NEAREST
        )
        image.paste(tint, mask=tint)
    pen = ImageDraw.Draw(image)
    for *corners, label in targets.get("boxes", ()):
        if label >= 0:
            pen.rectangle(
                [value * scale for value in corners], outline=_color(label), width=2
            )
    for x, y, label in targets.get("keypoints", ()):
        if label >= 0:
            pen.circle(
                ((x + 0.5) * scale, (y + 0.5) * scale), 3, _color(label), "white"
            )
    return image


def _color(label: float) -> tuple[int, ...]:
    return tuple(_COLORS[1 + int(label) % 254, :3].tolist())


def wrapped(text: str, width: int, max_lines: int) -> list[str]:
    """Wrap text to `width` pixels, in letters that the font has; "..." marks a cut."""
    written = printable(text).encode("latin-1", "backslashreplace").decode("latin-1")
    return textwrap.wrap(
        written, width // _LETTER, max_lines=max_lines, placeholder="..."
    )
