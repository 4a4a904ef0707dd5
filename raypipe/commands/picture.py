"""Tiles as one picture, by matplotlib."""

from __future__ import annotations

import colorsys
import itertools
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raypipe.logs import printable

STAGES = ("transformed", "augmented", "mixed")
_DPI = 100
_FONT: Any = {"family": "monospace", "size": 7.2, "parse_math": False, "va": "top"}  # 10 pixels
_TILE, _ROW, _GUTTER, _MARGIN = 160, 212, 8, 24  # pixels
# Of labels, RGBA. Neighbouring labels are far apart in hue: each is a golden angle from the one before.
_COLOURS = np.array([(*colorsys.hsv_to_rgb(label * 0.618 % 1, 0.9, 1), 0.43) for label in range(256)])
_COLOURS[0], _COLOURS[255] = (0, 0, 0, 0), (0, 0, 0, 0.43)  # the background, and what is ignored


@dataclass(frozen=True)
class Tile:
    """One image of the picture.

    Attributes:
        image: uint8 (H, W, 3); None where there is none.
        lines: the caption, three lines at most.
        reason: why there is no image.
        targets: by name. Drawn over it are mask, uint8 (H, W), classes (0 as it is, 255 dark, others tinted);
            boxes, float (K, 5), `[x0, y0, x1, y1, label]`; and keypoints, float (K, 3), `[x, y, label]`. Boxes and
            keypoints of negative labels are left out.
    """

    image: np.ndarray | None
    lines: tuple[str, ...] = ()
    reason: str = ""
    targets: Mapping[str, np.ndarray] = field(default_factory=dict)


def draw(rows: list[list[Tile]], titles: list[str], headers: list[str], columns: tuple[str, ...] = STAGES) -> Any:
    """Rows of 1 + n·E tiles as one picture, a matplotlib Figure, under titles and E headers of n columns."""
    from matplotlib.figure import Figure

    names = ["decoded", *columns * len(headers)]
    inside = len(names) * (_TILE + _GUTTER) - _GUTTER
    title = [line for text in titles for line in wrapped(text, inside, 8)]
    above = _MARGIN + 15 * len(title) + 52
    width, height = inside + 2 * _MARGIN, above + len(rows) * _ROW
    figure = Figure((width / _DPI, height / _DPI), dpi=_DPI)
    figure.text(_MARGIN / width, 1 - _MARGIN / height, "\n".join(title), **_FONT)
    sides = {"left": _MARGIN / width, "right": 1 - _MARGIN / width, "top": 1 - above / height}
    sides |= {"bottom": (_ROW - _TILE) / height, "wspace": _GUTTER / _TILE, "hspace": _ROW / _TILE - 1}
    places = figure.subplots(len(rows), len(names), squeeze=False, gridspec_kw=sides)
    for axes, tile in zip(places.flat, itertools.chain(*rows), strict=True):
        _draw_tile(axes, tile)
    for axes, name in zip(places[0], names, strict=True):
        _write(axes, (0, 1), 18, wrapped(name, _TILE, 1))
    for axes, header in zip(places[0, 1 :: len(columns)], headers, strict=True):
        _write(axes, (0, 1), 38, wrapped(header, max(3, len(columns)) * _TILE, 1))
    return figure


def _draw_tile(axes: Any, tile: Tile) -> None:
    from matplotlib.patches import Rectangle

    axes.set(xticks=[], yticks=[], facecolor="#dcdcdc")
    axes.spines[:].set_visible(False)
    _write(axes, (0, 0), -4, [line for text in tile.lines for line in wrapped(text, _TILE, 1)])
    _write(axes, (0, 1), -8, wrapped(tile.reason, _TILE, 8))
    if tile.image is None:
        return
    # Enlarged pixels stay pixels.
    axes.imshow(tile.image, interpolation="nearest" if max(tile.image.shape) <= _TILE else "auto")
    if "mask" in tile.targets:
        axes.imshow(_COLOURS[tile.targets["mask"]], interpolation="nearest")
    for x0, y0, x1, y1, label in tile.targets.get("boxes", ()):
        if label >= 0:
            # Coordinates of pixels are those of their centres here.
            place = (x0 - 0.5, y0 - 0.5), x1 - x0, y1 - y0
            axes.add_patch(
                Rectangle(*place, fill=False, edgecolor=_COLOURS[1 + int(label) % 254, :3], linewidth=2)
            )
    for x, y, label in tile.targets.get("keypoints", ()):
        if label >= 0:
            colour = _COLOURS[1 + int(label) % 254, :3]
            axes.plot(x, y, "o", markersize=5, color=colour, markeredgecolor="white", scalex=False, scaley=False)
    axes.set_adjustable("datalim")  # captions stay in their row, whatever the image's shape


def _write(axes: Any, corner: tuple[int, int], up: int, lines: list[str]) -> None:
    axes.annotate("\n".join(lines), corner, (0, up), "axes fraction", "offset pixels", **_FONT)


def wrapped(text: str, width: int, most: int) -> list[str]:
    """Text in lines no wider than `width` pixels, in letters that the font has; an ellipsis where it was cut."""
    written = printable(text).encode("latin-1", "backslashreplace").decode("latin-1")
    # Six pixels for each letter of DejaVu Sans Mono.
    return textwrap.wrap(written, width // 6, max_lines=most, placeholder="…")
