"""Planes: the form in which images travel to the training device with `transform.wire: yuv420`.

    field           as it is made               as it travels
    image           uint8 (…, H, W, 3)          luma, uint8 (…, H, W, 1)
    chroma.image                                Cb and Cr, uint8 (…, H/2, W/2, 2)

Views have it, too: view.NAME and chroma.view.NAME. No other module knows this form: they hand images to `packer`'s
function, fields that have traveled to `from_planes`, and ask `outputs` for the memory that the kernel fills. The
arithmetic is in `raypipe.kernel.yuv420`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from raypipe.errors import ConfigError
from raypipe.kernel import planes, rgb

_Images = dict[str, np.ndarray]
"""By the name of their field: `image`, or each view."""
_Array = TypeVar("_Array")

_CHROMA = "chroma."
_NO_COLOR = 128


def packer(wire: str) -> Callable[[_Images], _Images]:
    """Return the function that gives images their form of `transform.wire`: planes, or as they are."""
    if wire == "yuv420":
        return to_planes
    return lambda images: images


def to_planes(images: _Images) -> _Images:
    """Return the fields of a sample's images as planes; raise ConfigError unless all are uint8."""
    fields = _Images()
    for name, image in images.items():
        if image.dtype != np.uint8:
            raise ConfigError(
                f"transform.wire='yuv420' sends uint8 RGB, and the transform made {image.dtype}: use "
                "wire='rgb', or end the pipeline with its conversion to floats, which the device then does"
            )
        fields[name], fields[_CHROMA + name] = planes(image)
    return fields


def from_planes(
    fields: Mapping[str, _Array],
    to_rgb: Callable[[_Array, _Array], _Array] = rgb,  # type: ignore[assignment]
) -> dict[str, _Array]:
    """Return fields that have traveled with their images in RGB, whichever form those have.

    Args:
        to_rgb: makes an image of luma and chroma. The default takes arrays; give one for tensors.
    """
    unpacked = {
        name: value for name, value in fields.items() if not name.startswith(_CHROMA)
    }
    for name, chroma in chromas(fields).items():
        unpacked[name] = to_rgb(fields[name], chroma)
    return unpacked


def chromas(fields: Mapping[str, _Array]) -> dict[str, _Array]:
    """Return the chroma of each image that has traveled as planes, by the name of the image."""
    return {
        name.removeprefix(_CHROMA): value
        for name, value in fields.items()
        if name.startswith(_CHROMA)
    }


def outputs(
    arrays: Mapping[str, np.ndarray], name: str
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the memory of a field's images, as a kernel's job has it: RGB and None, or luma and chroma."""
    return arrays[name], arrays.get(_CHROMA + name)


def black(name: str) -> int:
    """Return the value of black in a field of images."""
    return _NO_COLOR if name.startswith(_CHROMA) else 0
