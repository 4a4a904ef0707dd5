"""A pipeline that begins with a random resized crop, run on an image of which only that crop is decoded.

The library draws the crop itself, by its own code from its own generators, from an image that has the size alone;
the crop is then decoded, and the library resizes it and goes on. So the result is that of the whole image, to the
bit, as long as the crop's pixels are.

Recognised, and nothing that only looks like it (a subclass may do as it likes with the pixels outside):

    albumentations.Compose([RandomResizedCrop(…), …])    both with p=1, without replay and saved parameters
    torchvision.transforms.v2.Compose([RandomResizedCrop(…), …])    without hooks

Neither library is imported here: a pipeline of its classes has done that.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

Box = tuple[int, int, int, int]
"""(top, left, height, width), pixels of the whole image, inside it."""

DecodeBox = Callable[[Box], np.ndarray]
"""A box → its pixels, uint8 RGB (h, w, 3), writable; they may come at a reduced scale."""

_ZERO = b"\0"


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
        nothing: np.ndarray = np.ndarray((*size, 3), np.uint8, _ZERO, strides=(0, 0, 0))  # a byte for all
        return self._pipeline(image=nothing, **targets)

    def _decode_and_resize(self, params: dict[str, Any], image: Any, **targets: Any) -> dict[str, Any]:
        left, top, right, bottom = map(int, params["crop_coords"])
        crop = self._decode_box((top, left, bottom - top, right - left))
        height, width = crop.shape[:2]
        resized = self._first.apply(crop, **params | {"crop_coords": (0, 0, width, height)})
        cut = type(self._first).apply_with_params(self._first, params, **targets) if targets else {}
        return {"image": np.ascontiguousarray(resized), **cut}


class TorchvisionCropFirst:
    """A v2.Compose that begins with RandomResizedCrop; draws from torch's global generator.

    Args:
        pipeline: as it is.

    Attributes:
        target: (height, width) to which the crop is resized, pixels.
    """

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
        special = special or set(pipeline.processors) - {"bboxes"}
        return (
            AlbumentationsCropFirst(pipeline, generators) if pipeline.p == first.p == 1 and not special else None
        )
    if v2 and kind is v2.Compose and type(first) is v2.RandomResizedCrop and hasattr(first, "make_params"):
        hooks = [*vars(pipeline).items(), *vars(first).items()]
        hooked = any(value for name, value in hooks if name.endswith("_hooks"))
        return None if hooked else TorchvisionCropFirst(pipeline)
    return None
