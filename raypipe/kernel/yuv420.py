"""The wire: how images travel from the actors to the training device, `transform.wire`.

    rgb       uint8 (H, W, 3)                                                        150,528 bytes at 224 px
    yuv420    luma, uint8 (H, W, 1), and chroma, Cb and Cr, uint8 (H/2, W/2, 2)       75,264

The sides of chroma are rounded up: the last row and the last column of an odd side count twice. Planes are those
of JFIF (BT.601, full range), made of finished images in integers, so a value is the same wherever it is made:

    Y         weights of R, G and B in Q15, rounded
    Cb, Cr    weights of their sums over 2 x 2 pixels, rounded, halves down, + 128
    RGB       weights of Cb and Cr, rounded, added to each Y of the 2 x 2 pixels, and clipped

Here is the definition. csrc/wire.h and `raypipe.device.wire` give the same bits.
"""

from __future__ import annotations

import numpy as np

ONE_BITS = 15
"""Of all weights."""
RED_OF_CR = 45941
GREEN_OF_CB = -11277
GREEN_OF_CR = -23401
BLUE_OF_CB = 58065
# By R, G, B. The weights of luma add up to one, those of chroma to nothing: no result needs to be clipped.
_TO_Y = np.array([9798, 19235, 3735], np.int32)
_TO_CHROMA = np.array([[-5529, -10855, 16384], [16384, -13720, -2664]], np.int32)


def chroma_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of chroma, (…, H/2, W/2, 2), by that of luma or of the image, (…, H, W, C)."""
    *batch_shape, height, width, _ = shape
    return *batch_shape, -(-height // 2), -(-width // 2), 2


def numpy_planes(image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Luma (…, H, W, 1) and chroma (…, H/2, W/2, 2) of images, uint8 (…, H, W, 3)."""
    luma = (image @ _TO_Y + (1 << (ONE_BITS - 1))) >> ONE_BITS
    *batch_shape, height, width, _ = image.shape
    rows = np.arange(height + height % 2)
    columns = np.arange(width + width % 2)
    even = image[
        ..., rows.clip(max=height - 1)[:, None], columns.clip(max=width - 1), :
    ]
    sums = even.reshape(*batch_shape, len(rows) // 2, 2, len(columns) // 2, 2, 3).sum(
        (-4, -2), dtype=np.int32
    )
    bits = ONE_BITS + 2
    chroma = (sums @ _TO_CHROMA.T + ((128 << bits) + (1 << (bits - 1)) - 1)) >> bits
    return luma[..., None].astype(np.uint8), chroma.astype(np.uint8)


def rgb(luma: np.ndarray, chroma: np.ndarray) -> np.ndarray:
    """Images, uint8 (…, H, W, 3), of their planes."""
    height, width = luma.shape[-3:-1]
    cb, cr = np.moveaxis(chroma.astype(np.int32) - 128, -1, 0)
    above = np.stack(
        [RED_OF_CR * cr, GREEN_OF_CB * cb + GREEN_OF_CR * cr, BLUE_OF_CB * cb], -1
    )
    above = (above + (1 << (ONE_BITS - 1))) >> ONE_BITS
    above = above.repeat(2, axis=-3).repeat(2, axis=-2)[..., :height, :width, :]
    return (luma + above).clip(0, 255).astype(np.uint8)
