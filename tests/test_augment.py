from __future__ import annotations

import numpy as np
import torch

from raypipe.augment import Normalize
from raypipe.config import AugmentConfig

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def images() -> torch.Tensor:
    pixels = np.arange(2 * 8 * 4 * 3 * 4, dtype=np.uint32) % 256
    return torch.from_numpy(pixels.astype(np.uint8).reshape(-1, 8, 4, 3)).permute(0, 3, 1, 2)


def normalize(image: torch.Tensor) -> torch.Tensor:
    return Normalize(AugmentConfig(MEAN, STD), torch.device("cpu"))(image)


def test_pixels_are_scaled_and_standardised_per_channel() -> None:
    image = images()
    mean, std = (torch.tensor(value).view(1, 3, 1, 1) for value in (MEAN, STD))
    out = normalize(image)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, (image / 255 - mean) / std)


def test_channels_last_stays_so_and_contiguous_stays_so() -> None:
    image = images()
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert normalize(image).is_contiguous(memory_format=torch.channels_last)
    assert normalize(image.contiguous()).is_contiguous()
