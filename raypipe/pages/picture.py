"""Tiles with captions as one picture. Knows nothing of what they show."""

from __future__ import annotations

import colorsys
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from raypipe.logs import printable

_TILE, _GUTTER, _GAP, _MARGIN, _LINE = 160, 6, 28, 24, 17
_INK, _FAINT, _GREY, _PALE, _RULE = "#1a1a1a", "#666666", "#dcdcdc", "#f4f4f4", "#b5b5b5"
_GROUP = 3 * _TILE + 2 * _GUTTER
_ROW = _TILE + 2 * _LINE + 14
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


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


def draw(rows: list[list[Tile]], *, title: str, note: str, headers: list[str]) -> Image.Image:
    """Rows of 1 + 3·E tiles as one picture, under a title, a note and E headers."""
    large, medium, small = (ImageFont.load_default(size) for size in (22, 14.5, 12.5))
    width = 2 * _MARGIN + _TILE + len(headers) * (_GAP + _GROUP)
    notes = wrap(note, medium, width - 2 * _MARGIN, 8)
    top = _MARGIN + 34 + 20 * len(notes) + 14
    grid = top + 46
    picture = Image.new("RGB", (width, grid + len(rows) * _ROW + _MARGIN - 14), "white")
    pen = ImageDraw.Draw(picture)
    pen.text((_MARGIN, _MARGIN), wrap(title, large, width - 2 * _MARGIN, 1)[0], _INK, large)
    for i, line in enumerate(notes):
        pen.text((_MARGIN, _MARGIN + 34 + 20 * i), line, _FAINT, medium)
    groups = [_MARGIN + _TILE + _GAP + i * (_GROUP + _GAP) for i in range(len(headers))]
    columns = [(_MARGIN, _TILE, "store"), *((x, _GROUP, text) for x, text in zip(groups, headers, strict=True))]
    for left, span, header in columns:
        pen.text((left, top), wrap(header, medium, span, 1)[0], _INK, medium)
        pen.line((left, top + 21, left + span - 1, top + 21), _RULE)
    lefts = [_MARGIN, *(left + i * (_TILE + _GUTTER) for left in groups for i in range(3))]
    for left, name in zip(lefts, ["decoded", *("transformed", "augmented", "mixed") * len(headers)], strict=True):
        pen.text((left, top + 26), name, _FAINT, small)
    for number, row in enumerate(rows):
        for left, tile in zip(lefts, row, strict=True):
            _draw_tile(picture, left, grid + number * _ROW, tile, small)
    return picture


def _draw_tile(picture: Image.Image, left: int, top: int, tile: Tile, font: Font) -> None:
    pen = ImageDraw.Draw(picture)
    pen.rectangle((left, top, left + _TILE - 1, top + _TILE - 1), _GREY if tile.image is None else _PALE)
    if tile.image is None:
        for i, line in enumerate(wrap(tile.reason, font, _TILE - 16, 8)):
            pen.text((left + 8, top + 8 + i * _LINE), line, _INK, font)
    else:
        image = Image.fromarray(tile.image)
        scale = _TILE / max(image.size)
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        # Enlarged pixels stay pixels.
        image = image.resize(size, Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.NEAREST)
        if tile.mask is not None:
            colours = np.array([_colour(label) for label in range(256)], np.uint8)
            classes = Image.fromarray(tile.mask).resize(size, Image.Resampling.NEAREST)
            blend = np.where(np.asarray(classes) > 0, 110, 0).astype(np.uint8)
            image.paste(Image.fromarray(colours[np.asarray(classes)]), mask=Image.fromarray(blend))
        for *corners, label in () if tile.boxes is None else tile.boxes.tolist():
            if label >= 0:
                x0, y0, x1, y1 = (round(corner * scale) for corner in corners)
                ends = x0, y0, max(x0, x1 - 1), max(y0, y1 - 1)
                ImageDraw.Draw(image).rectangle(ends, outline=_colour(int(label) + 1), width=2)
        picture.paste(image, (left + (_TILE - size[0]) // 2, top + (_TILE - size[1]) // 2))
    for i, line in enumerate(tile.lines):
        pen.text((left, top + _TILE + 3 + i * _LINE), wrap(line, font, _TILE, 1)[0], _FAINT if i else _INK, font)


def _colour(label: int) -> tuple[int, int, int]:
    """Neighbouring labels are far apart in hue: each is a golden angle from the one before."""
    if label == 255:
        return (0, 0, 0)
    red, green, blue = colorsys.hsv_to_rgb(label * 0.618 % 1, 0.9, 1)
    return round(255 * red), round(255 * green), round(255 * blue)


def wrap(text: str, font: Font, width: float, max_lines: int) -> list[str]:
    """Text in lines no wider than `width` pixels; an ellipsis where it, or a word, was cut."""
    lines = [""]
    for word in printable(text).split():
        longer = f"{lines[-1]} {word}".lstrip()
        if font.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        elif len(lines) < max_lines:
            lines.append(word)
        else:
            lines[-1] = longer + " …"
            break
    return [_cut(line, font, width) for line in lines]


def _cut(line: str, font: Font, width: float) -> str:
    if font.getlength(line) <= width:
        return line
    while line and font.getlength(line + "…") > width:
        line = line[:-1]
    return line.rstrip() + "…"
