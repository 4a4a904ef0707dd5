"""Draws tiles into one picture, with Pillow."""

from __future__ import annotations

import colorsys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from raypipe.errors import ConfigError
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


def draw_tiles(
    rows: Sequence[Sequence[Tile]],
    title: str,
    names: Sequence[str],
    headers: Mapping[int, str] | None = None,
) -> Any:
    """Draw rows of tiles into a PIL.Image, under a title, headers by their columns, and the columns' names.

    A tile is in the middle of its square, with its caption below.
    """
    from PIL import Image, ImageDraw

    width = len(names) * (_TILE + _GUTTER) - _GUTTER
    headers = headers or {}
    heading = wrapped(title, width, 8)
    above = _MARGIN + _LINE * len(heading) + (44 if headers else 26)
    size = (width + 2 * _MARGIN, above + len(rows) * _ROW)
    picture = Image.new("RGB", size, "white")
    write = partial(_write, ImageDraw.Draw(picture))
    write(_MARGIN, _MARGIN, heading)
    for column, header in headers.items():
        columns = max(2, (len(names) - 1) // len(headers))
        write(_left(column), above - 36, wrapped(header, columns * _TILE, 1))
    for column, name in enumerate(names):
        write(_left(column), above - 18, wrapped(name, _TILE, 1))
    for number, row in enumerate(rows):
        for column, tile in enumerate(row):
            x = _left(column)
            y = above + number * _ROW
            picture.paste(_square(tile), (x, y))
            write(x, y + 8, wrapped(tile.reason, _TILE, 8))
            caption = [line for text in tile.lines for line in wrapped(text, _TILE, 1)]
            write(x, y + _TILE + 4, caption[:3])
    return picture


def _write(pen: Any, x: int, y: int, lines: list[str]) -> None:
    from PIL import ImageFont

    font = ImageFont.load_default_imagefont()
    for number, line in enumerate(lines):
        pen.text((x, y + number * _LINE), line, "black", font)


def _square(tile: Tile) -> Any:
    """Return the square of a tile, with its image in the middle."""
    from PIL import Image

    square = Image.new("RGB", (_TILE, _TILE), "#dcdcdc")
    if tile.image is not None:
        image = _drawn(tile.image, tile.targets)
        square.paste(image, ((_TILE - image.width) // 2, (_TILE - image.height) // 2))
    return square


def save_picture(picture: Any, output: str) -> None:
    """Write a picture; raise ConfigError if its file cannot be written."""
    try:
        picture.save(output, optimize=True)
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error}") from error


def _left(column: int) -> int:
    """Return where a column begins, in pixels."""
    return _MARGIN + column * (_TILE + _GUTTER)


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
