"""Where the picture puts its tiles, and what it draws over them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raypipe.commands.picture import Tile, draw_tiles, wrapped

# of the first tile, and of a row with its captions, pixels
LEFT, SIZE, ROW = (
    24,
    160,
    212,
)


def pixels(rows: list[list[Tile]], **texts: Any) -> np.ndarray:
    """The picture, uint8 (H, W, 3)."""
    return np.asarray(
        draw_tiles(rows, **{"title": "", "names": ["decoded", "a", "b", "c"], **texts})
    )


@pytest.mark.parametrize(
    "text", ["W" * 200, "many words of ordinary length " * 9, "a " + "W" * 200 + " b"]
)
def test_nothing_that_is_written_is_wider_than_its_place(text: str) -> None:
    rows = [[Tile(None, (text, text), text)] + [Tile(None)] * 3]
    seen = pixels(rows, title=text, headers={1: text})
    ink = seen.min(2) < 200
    assert not ink[:, :LEFT].any() and not ink[:, -LEFT:].any()
    caption, reason = ink[SIZE - ROW :], ink[-ROW : SIZE - ROW]
    for place in (caption, reason):
        assert place[:, LEFT : LEFT + SIZE].any() and not place[:, LEFT + SIZE :].any()


def test_short_text_is_whole_and_what_the_font_lacks_is_an_escape() -> None:
    assert wrapped("short $x$", SIZE, 1) == ["short $x$"]
    assert wrapped("größe", SIZE, 1) + wrapped("猫 \x1b", SIZE, 1) == [
        "größe",
        r"\u732b \x1b",
    ]


def test_a_mask_tints_and_a_box_frames_its_place() -> None:
    image, mask = np.full((80, 80, 3), 50, np.uint8), np.zeros((80, 80), np.uint8)
    mask[:40, :40], mask[:40, 40:] = 1, 255
    boxes = np.array([[40, 40, 80, 80, 2], [0, 0, 0, 0, -1]], np.float32)
    seen = pixels([[Tile(image, targets={"mask": mask, "boxes": boxes})]])[
        -ROW:, LEFT:
    ].astype(int)
    assert (seen[100, 40] == 50).all() and (seen[120, 120] == 50).all()
    tinted, ignored, frame = seen[40, 40], seen[40, 120], seen[80, 120]
    assert (
        tinted.max() - tinted.min() > 80 and (ignored < 40).all() and frame.max() == 255
    )
