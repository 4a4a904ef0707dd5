"""Pixels of a stream's images, `transform.decode`: the values that its transforms get and may return.

RGB       they get uint8 (H, W, 3), which programs take; they return the same, or floats of 1 or 3 channels, which
          become float32
arrays    they get and return integers or floats of up to 64 bits, of any number of channels; (H, W) has one
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from raypipe.errors import ConfigError
from raypipe.importing import is_of
from raypipe.transform.fields import VIEW, Arrays
from raypipe.transform.pipelines import TransformKind

_IMAGE = {
    True: "uint8 {layout} with 3 channels, or floats {layout} with 1 or 3",
    False: "integers or floats of up to 64 bits, {layout}",
}
_VIEW = {True: "uint8 (H, W, 3), (n, H, W, 3)", False: "(H, W, C), (n, H, W, C)"}
"""The accepted results, for messages, by whether images are RGB."""


def image_of(result: Any, are_rgb: bool, kind: TransformKind = "plain") -> np.ndarray:
    """Check the image that a transform of this kind returned, and return it as it travels: (H, W, C).

    Tensors have their channels first; arrays have them last, or, from torchvision's, maybe first.
    """
    by_torchvision = kind in ("torchvision", "pil")
    array = channels_last(result)
    if isinstance(array, np.ndarray):
        if by_torchvision and array is result and len(array) in (1, 3):
            array = np.moveaxis(array, 0, -1)
        if array.ndim == 2 and not are_rgb:
            array = array[..., None]
        taken = _taken(array, are_rgb) if array.ndim == 3 else None
        if taken is not None:
            return taken
    layout = "CHW" if by_torchvision or is_tensor(result) else "HWC"
    views = ""
    if isinstance(result, list | tuple):
        views = ", or several views as a dict, {name: image, …}"
    raise ConfigError(
        f"the transform returned {_came(result)}; it must return {_IMAGE[are_rgb].format(layout=layout)}{views}"
    )


def views_of(returned: Mapping[Any, Any], are_rgb: bool) -> Arrays:
    """Check the views that a function returned, and return them by field: each (H, W, C) or (n, H, W, C)."""
    views = {}
    for name, given in returned.items():
        value = _view(given)
        taken = None
        if isinstance(value, np.ndarray) and value.ndim in (3, 4):
            taken = _taken(value, are_rgb)
        if taken is None or not isinstance(name, str):
            raise ConfigError(
                f"the transform returned {_came(value)} for view {name!r}: it must be {_VIEW[are_rgb]}, or a list "
                "of n of one size, by a name"
            )
        views[f"{VIEW}.{name}"] = taken
    if not views:
        raise ConfigError("the transform returned a mapping without views")
    return views


def _taken(array: np.ndarray, are_rgb: bool) -> np.ndarray | None:
    """Return an array (…, H, W, C) as it travels; None: it is refused."""
    if not array.size:
        return None
    if are_rgb and not is_rgb(array):
        is_taken = array.dtype.kind == "f" and array.shape[-1] in (1, 3)
        return array.astype(np.float32) if is_taken else None
    dtype = array.dtype
    is_taken = dtype.kind in "uif" and dtype.itemsize <= 8 and dtype.isnative
    return array if is_taken else None


def _came(result: Any) -> str:
    """Return the words for what a transform returned."""
    if is_pil(result):
        return f"a PIL image of mode {result.mode}"
    if isinstance(result, np.ndarray) or is_tensor(result):
        return f"{result.dtype} of shape {tuple(result.shape)}"
    return f"a {type(result).__name__}"


def _view(given: Any) -> Any:
    """The array of a view, whose crops may be a list; anything else as it is."""
    if not isinstance(given, list | tuple):
        return channels_last(given)
    crops = [*map(channels_last, given)]
    shapes = {getattr(crop, "shape", None) for crop in crops}
    if len(shapes) == 1 and None not in shapes:
        return np.stack(crops)
    return crops


def channels_last(value: Any) -> Any:
    """A tensor (…, C, H, W) as an array (…, H, W, C), as is a PIL image; an array, or anything else, as it is."""
    if is_pil(value):
        return np.array(value)
    if not is_tensor(value):
        return value
    if value.dtype == sys.modules["torch"].bfloat16:  # numpy has no such type
        value = value.float()
    array = value.detach().cpu().numpy()
    return np.moveaxis(array, -3, -1) if array.ndim > 2 else array


def is_tensor(value: Any) -> bool:
    return is_of(value, "torch", "Tensor")


def is_pil(value: Any) -> bool:
    return is_of(value, "PIL.Image", "Image")


def is_rgb(image: Any) -> bool:
    """True for arrays uint8 (…, H, W, 3)."""
    is_bytes = isinstance(image, np.ndarray) and image.dtype == np.uint8
    return is_bytes and image.ndim > 2 and image.shape[-1] == 3
