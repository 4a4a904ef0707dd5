"""What happens to whole micro-batches on the training device. Knows torch, not Ray."""

from __future__ import annotations

import torch

from raypipe.config import AugmentConfig


class Normalize:
    """uint8 (B, 3, H, W) → float32 in the same memory format, standardised per channel.

    Args:
        config: mean and std of pixels scaled to [0, 1].
        device: where batches are.
    """

    def __init__(self, config: AugmentConfig, device: torch.device) -> None:
        mean = torch.tensor(config.mean, device=device).view(1, 3, 1, 1)
        std = torch.tensor(config.std, device=device).view(1, 3, 1, 1)
        # (x / 255 - mean) / std as one multiply and one add
        self._scale, self._shift = 1 / (255 * std), -mean / std

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(self._shift, image, self._scale)
