"""Drawn files, and the pictures in them. Each module `draw_*` yields those of some formats."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
from PIL import Image

HEIGHT, WIDTH = 36, 44


@dataclass(frozen=True)
class Drawn:
    """A file.

    Attributes:
        name: its kind, and the suffix that its format has.
        refused: the readings that are refused by name: "rgb", for upright as well, and "array".
        truth: what was drawn, (H, W, C), where the file keeps it to the bit; None = its reference says so.
    """

    name: str
    data: bytes
    refused: frozenset[str] = frozenset()
    truth: np.ndarray | None = None


NEITHER = frozenset({"rgb", "array"})
"""What is refused of a file that no reading takes."""
NO_RGB, NO_ARRAY = frozenset({"rgb"}), frozenset({"array"})


def picture(
    channels: int = 3, dtype: Any = np.uint8, height: int = HEIGHT, width: int = WIDTH
) -> np.ndarray:
    """Smooth values of the whole range of a dtype, floats in [0, 1); the same for the same arguments."""
    rng = np.random.default_rng([height, width, channels])
    coarse = rng.random((5, 7, channels))
    smooth = cv2.resize(coarse, (width, height)).reshape(height, width, channels)
    dtype = np.dtype(dtype)
    if dtype.kind == "f":
        return smooth.astype(dtype)
    limits = np.iinfo(dtype)
    span = float(limits.max) - float(limits.min)
    return (smooth * span * 0.999 + float(limits.min)).astype(dtype)


def image(mode: str = "RGB", **size: int) -> Image.Image:
    """The picture as an image of Pillow's; its alpha and palettes have several values."""
    if mode == "P":
        return image(**size).quantize(40)
    if mode in ("1", "L", "I;16", "I", "F"):
        gray = picture(
            1,
            {"I;16": np.uint16, "I": np.int32, "F": np.float32}.get(mode, np.uint8),
            **size,
        )[:, :, 0]
        return (
            Image.fromarray(gray).convert("1") if mode == "1" else Image.fromarray(gray)
        )
    if mode in ("LA", "RGBA"):
        return Image.fromarray(picture(len(mode), **size))
    return Image.fromarray(picture(**size)).convert(mode)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    """An image as Pillow writes it."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def by_opencv(suffix: str, array: np.ndarray, *options: int) -> bytes:
    """An array as OpenCV writes it, which has blue first."""
    order = {3: [2, 1, 0], 4: [2, 1, 0, 3]}.get(array.shape[2], [0])
    done, data = cv2.imencode(suffix, array[:, :, order], options)
    assert done
    return data.tobytes()


def unique(files: Iterable[Drawn]) -> list[Drawn]:
    """The files by name; raises if two have one name."""
    by_name = dict[str, Drawn]()
    for file in files:
        assert file.name not in by_name, file.name
        by_name[file.name] = file
    return list(by_name.values())
