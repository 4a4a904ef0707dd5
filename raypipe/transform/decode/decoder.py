"""The decoder of a stream: a function from stored bytes to an image, chosen once by the settings."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from raypipe.config import TransformConfig
from raypipe.transform.decode.array import decode_array
from raypipe.transform.decode.jpeg import Undecoded, open_for_crop
from raypipe.transform.decode.rgb import decode


def decoder_of(config: TransformConfig) -> Callable[[bytes], np.ndarray]:
    """Return the decoder of whole images: uint8 RGB, or with `transform.decode: array` as they are stored."""
    if config.decode == "array":
        return decode_array
    return functools.partial(decode, exif=config.apply_exif)


def opener_of(
    config: TransformConfig, crops_first: bool
) -> Callable[[bytes], np.ndarray | Undecoded]:
    """Return the decoder for a transform that may begin with a random resized crop: JPEGs whose crop can be
    decoded without the rest are then only opened."""
    decode_whole = decoder_of(config)
    if not crops_first:
        return decode_whole

    def opened(encoded: bytes) -> np.ndarray | Undecoded:
        return open_for_crop(encoded, config.apply_exif) or decode_whole(encoded)

    return opened
