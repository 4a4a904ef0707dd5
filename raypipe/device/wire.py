"""Images of the planes that have traveled (`transform.wire: yuv420`), made on the device."""

from __future__ import annotations

import torch

from raypipe.kernel import (
    BLUE_OF_CB,
    GREEN_OF_CB,
    GREEN_OF_CR,
    ONE_BITS,
    RED_OF_CR,
)


def merge_planes(luma: torch.Tensor, chroma: torch.Tensor) -> torch.Tensor:
    """Convert luma (…, H, W, 1) and chroma (…, H/2, W/2, 2) to images, uint8 (…, H, W, 3), as
    `raypipe.kernel.rgb` does.

    It computes in integers, so CPU and CUDA agree; all but the last three operations have the size of chroma.
    """
    *leading, height, width, _ = luma.shape
    rows, columns = chroma.shape[-3:-1]
    cb, cr = (chroma.int() - 128).unbind(-1)
    green = (GREEN_OF_CB * cb).add_(cr, alpha=GREEN_OF_CR)
    above = torch.stack((RED_OF_CR * cr, green, BLUE_OF_CB * cb), -1)
    above = above.add_(1 << (ONE_BITS - 1)).bitwise_right_shift_(ONE_BITS).short()
    above = above.view(*leading, rows, 1, columns, 1, 3).expand(
        *leading, rows, 2, columns, 2, 3
    )
    if height % 2 or width % 2:
        sums = (
            luma
            + above.reshape(*leading, 2 * rows, 2 * columns, 3)[..., :height, :width, :]
        )
    else:
        sums = luma.view(*leading, rows, 2, columns, 2, 1) + above
    return sums.clamp_(0, 255).byte().view(*leading, height, width, 3)
