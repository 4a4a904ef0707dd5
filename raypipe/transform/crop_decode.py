"""What a random resized crop shows of a JPEG, decoded without the rest.

    mode      decodes                                                   pixels
    off       the whole image                                           the reference
    exact     the crop, where the extension is there; else the whole    to the bit those of "off"
    scaled    the same, at 1/2, 1/4 or 1/8 where the crop stays at      others: less aliased; the same with and
              least as large as what it is resized to                   without the extension, to the bit

So a mode fixes the pixels, and which samples are bad; the extension (`raypipe.transform.decode.extension`) only
fixes the speed, and nodes with and without it can make one run together. Whatever it refuses, and whatever is
not a JPEG, is decoded whole.

The library draws the crop itself, by its own code from its own generators, from an image that has the size
alone; the crop is then decoded, and the library resizes it and goes on. Recognised, and nothing that only looks
like it (a subclass may do as it likes with the pixels outside):

    albumentations.Compose([RandomResizedCrop(…), …])    both with p=1, without replay and saved parameters
    torchvision.transforms.v2.Compose([RandomResizedCrop(…), …])    without hooks

Neither library is imported here: a pipeline of its classes has done that.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import simplejpeg

from raypipe.config import TransformConfig
from raypipe.errors import SampleError
from raypipe.transform.decode import (
    SCALES,
    WHOLE,
    Box,
    decode,
    decode_jpeg_at,
    decode_part,
    extension,
    jpeg_orientation,
)
from raypipe.transform.image_header import jpeg_size

DecodeBox = Callable[[Box], np.ndarray]
"""A box → its pixels, uint8 RGB (h, w, 3), writable; they may come at a reduced scale."""

Undecoded = tuple[tuple[int, int], DecodeBox]
"""(height, width) of an image, pixels, and what decodes a box of it."""

_MIN_SCALED_SIDE = 16  # pixels: below, two scales can give the same size, by which simplejpeg is told the scale


class AlbumentationsCropFirst:
    """A Compose that begins with RandomResizedCrop.

    Args:
        pipeline: it is copied.
        generators: what all its transforms draw from.

    Attributes:
        target: (height, width) to which the crop is resized, pixels.
    """

    def __init__(self, pipeline: Any, generators: tuple[np.random.Generator, random.Random]) -> None:
        self._pipeline = copy.deepcopy(pipeline)
        self._pipeline.set_random_state(*generators)
        self._first = self._pipeline.transforms[0]
        self._first.apply_with_params = self._decode_and_resize  # of this object alone, not of its class
        self._decode_box: DecodeBox
        self.target: tuple[int, int] = tuple(self._first.size)

    def __call__(self, size: tuple[int, int], decode_box: DecodeBox, **targets: Any) -> dict[str, Any]:
        """What the pipeline makes of an image of this (height, width), and of whole masks and boxes."""
        self._decode_box = decode_box
        nothing: np.ndarray = np.ndarray((*size, 3), np.uint8, b"\0", strides=(0, 0, 0))  # a byte for all
        return self._pipeline(image=nothing, **targets)

    def _decode_and_resize(self, params: dict[str, Any], image: Any, **targets: Any) -> dict[str, Any]:
        left, top, right, bottom = map(int, params["crop_coords"])
        crop = self._decode_box((top, left, bottom - top, right - left))
        height, width = crop.shape[:2]
        resized = self._first.apply(crop, **params | {"crop_coords": (0, 0, width, height)})
        cut = type(self._first).apply_with_params(self._first, params, **targets) if targets else {}
        return {"image": np.ascontiguousarray(resized), **cut}


class TorchvisionCropFirst:
    """The same of a v2.Compose, which is used as it is; draws from torch's global generator."""

    def __init__(self, pipeline: Any) -> None:
        self._first, *self._others = pipeline.transforms
        self.target: tuple[int, int] = tuple(self._first.size) * (2 // len(self._first.size))

    def __call__(self, size: tuple[int, int], decode_box: DecodeBox) -> Any:
        """What the pipeline makes of an image of this (height, width)."""
        import torch
        from torchvision import tv_tensors

        whole = tv_tensors.Image(torch.zeros((), dtype=torch.uint8).expand(3, *size))  # takes no memory
        drawn = self._first.make_params([whole])
        crop = decode_box((drawn["top"], drawn["left"], drawn["height"], drawn["width"]))
        height, width = crop.shape[:2]
        image = tv_tensors.Image(torch.from_numpy(crop).permute(2, 0, 1))
        result = self._first.transform(image, {"top": 0, "left": 0, "height": height, "width": width})
        for transform in self._others:
            result = transform(result)
        return result


CropFirst = AlbumentationsCropFirst | TorchvisionCropFirst


def find_crop_first(pipeline: Any, generators: tuple[np.random.Generator, random.Random]) -> CropFirst | None:
    """The pipeline in this form; None = it does not begin with a random resized crop, or not surely."""
    kind = type(pipeline)
    steps = getattr(pipeline, "transforms", None)
    if not isinstance(steps, list | tuple) or not steps:
        return None
    first = steps[0]
    albumentations, v2 = sys.modules.get("albumentations"), sys.modules.get("torchvision.transforms.v2")
    if albumentations and kind is albumentations.Compose and type(first) is albumentations.RandomResizedCrop:
        special = first.deterministic or first.replay_mode or pipeline.save_applied_params
        special = special or set(pipeline.processors) - {"bboxes"} or not pipeline.p == first.p == 1
        return None if special else AlbumentationsCropFirst(pipeline, generators)
    if v2 and kind is v2.Compose and type(first) is v2.RandomResizedCrop and hasattr(first, "make_params"):
        hooks = [*vars(pipeline).items(), *vars(first).items()]
        hooked = any(value for name, value in hooks if name.endswith("_hooks"))
        return None if hooked else TorchvisionCropFirst(pipeline)
    return None


def open_for_crop(data: bytes | None, config: TransformConfig, target: tuple[int, int]) -> Undecoded | None:
    """A JPEG by its header; None: decode it whole, as those that `exif` turns or `decode_min_side` reduces.

    Args:
        config: its `crop_decode` is not "off".
        target: (height, width) to which the crop is resized, pixels.
    """
    scaled = config.crop_decode == "scaled"
    if not ((scaled or extension()) and isinstance(data, bytes) and data.startswith(b"\xff\xd8\xff")):
        return None
    try:
        size = jpeg_size(data)
    except SampleError:  # `decode` says why
        return None
    if size is None or (config.decode_min_side and min(size) >= 2 * config.decode_min_side):
        return None
    if config.exif and b"Exif\0\0" in data and 2 <= jpeg_orientation(data) <= 8:
        return None
    if scaled and min(size) >= _MIN_SCALED_SIDE:
        return size, functools.partial(_decode_scaled, data, size, target)
    return size, functools.partial(decode_box, data)


def _decode_scaled(data: bytes, size: tuple[int, int], target: tuple[int, int], box: Box) -> np.ndarray:
    enough = (n for n in SCALES if box[2] * n >= 8 * target[0] and box[3] * n >= 8 * target[1])
    eighths = next(enough, WHOLE)
    top, rows = _scaled_span(box[0], box[2], size[0], eighths)
    left, columns = _scaled_span(box[1], box[3], size[1], eighths)
    return decode_box(data, (top, left, rows, columns), eighths)


def decode_box(data: bytes, box: Box, eighths: int = WHOLE) -> np.ndarray:
    """Decode a box of a JPEG: the same with and without the extension.

    Args:
        data: a JPEG whose header can be read.
        box: of the image at its scale, inside it.
        eighths: the scale, in the DCT: 8, or, of an image of at least 16 x 16 pixels, 1, 2 or 4.

    Returns:
        uint8 RGB of shape (h, w, 3), writable; a view.

    Raises:
        SampleError: the file is damaged, in the box or anywhere else.
    """
    part = decode_part(data, box, eighths)
    if part is None:
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
        short_side = _scaled(min(height, width), eighths)
        part = cut(decode(data) if eighths == WHOLE else decode_jpeg_at(data, short_side), box)
    return part


def cut(image: np.ndarray, box: Box) -> np.ndarray:
    """The box of an image; a view."""
    top, left, height, width = box
    return image[top : top + height, left : left + width]


def _scaled(side: int, eighths: int) -> int:
    return -(-side * eighths // 8)  # libjpeg rounds up


def _scaled_span(start: int, length: int, side: int, eighths: int) -> tuple[int, int]:
    """(start, length) at a scale of a span in `side` pixels: rounded, at least a pixel, inside."""
    scaled_side = _scaled(side, eighths)
    first = min((start * eighths + 4) // 8, scaled_side - 1)
    end = min(((start + length) * eighths + 4) // 8, scaled_side)
    return first, max(end - first, 1)
