"""The decoder of a stream: a function from stored bytes to an image, chosen once by the settings."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from raypipe.config import TransformConfig
from raypipe.transform.decode.array import decode_array
from raypipe.transform.decode.rgb import decode


def decoder_of(config: TransformConfig) -> Callable[[bytes], np.ndarray]:
    """Return the decoder of whole images: uint8 RGB, or with `transform.decode_as: array` as they are stored."""
    if config.decode_as == "array":
        return decode_array
    return functools.partial(decode, exif=config.apply_exif)
