"""Images of the planes that have traveled (`transform.wire: yuv420`), made on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from raypipe.device.ring import hand_over, new_event
from raypipe.transform import wire


class ToRgb:
    """Makes images of planes, under any stream of one device; of integers alone, so CPU and CUDA give the same bits."""

    def __init__(self) -> None:
        self._constants: tuple[torch.Tensor, ...] = ()
        self._ready: Any = None  # the event behind them

    def __call__(self, luma: torch.Tensor, chroma: torch.Tensor) -> torch.Tensor:
        """uint8 (…, H, W, 3) of luma (…, H, W, 1) and chroma (…, H/2, W/2, 2): the bits of `wire.rgb`."""
        if not self._constants:
            self._prepare(luma.device)
        hand_over(self._ready, self._constants, luma.device)
        offsets, least, most = self._constants
        *others, height, width, _ = luma.shape
        rows, columns = chroma.shape[-3:-1]
        # Both bytes of a pair as one number, which counts from the table's end where it is negative.
        above = offsets[chroma.view(torch.int16).squeeze(-1).int()]
        above = above.view(*others, rows, 1, columns, 1, 3).expand(*others, rows, 2, columns, 2, 3)
        if height % 2 or width % 2:
            sums = luma + above.reshape(*others, 2 * rows, 2 * columns, 3)[..., :height, :width, :]
        else:
            sums = luma.view(*others, rows, 2, columns, 2, 1) + above
        image = torch.empty((*others, height, width, 3), dtype=torch.uint8, device=luma.device)
        torch.clamp(sums, least, most, out=image.view(sums.shape))  # by tensors: by numbers it makes no bytes
        return image

    def _prepare(self, device: torch.device) -> None:
        limits = np.array([[0], [255]], np.int16)
        self._constants = tuple(torch.from_numpy(array).to(device) for array in (wire.offsets(), *limits))
        self._ready = new_event(device)
        self._ready.record(torch.get_device_module(device).current_stream(device))
