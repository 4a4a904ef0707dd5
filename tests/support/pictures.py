"""Small samples: JPEGs of random fields with labels, and a tar of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from tars import write_members


def picture(index: int, height: int = 40, width: int = 48) -> bytes:
    """A JPEG that no other index has: a blurred random field."""
    rng = np.random.default_rng(index)
    pixels = cv2.resize(rng.integers(0, 256, (5, 6, 3), np.uint8), (width, height))
    return cv2.imencode(".jpg", pixels)[1].tobytes()


def samples(num: int, num_classes: int = 5, first: int = 0) -> list[dict[str, object]]:
    return [{"image": picture(first + i), "label": i % num_classes} for i in range(num)]


CLASSES = tuple("abcde")


def write_tar(path: str | Path, samples: Iterable[dict[str, Any]]) -> None:
    """A tar of class folders."""
    members = (
        (f"{CLASSES[sample['label']]}/{number:06d}.jpg", sample["image"])
        for number, sample in enumerate(samples)
    )
    write_members(Path(path), members)
