"""A Dataset whose items show every generator that they may draw from."""

from __future__ import annotations

import random
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils.data import Dataset


class Noisy(Dataset[Any]):
    """Draws from every generator that an item may draw from."""

    def __init__(self, num: int = 40) -> None:
        super().__init__()
        self.num = num
        self.rng = np.random.default_rng()
        self.generator = torch.Generator()

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.num:
            raise IndexError(index)
        noise = torch.tensor(
            [
                torch.rand(()).item(),
                random.random(),
                float(np.random.rand()),
                float(self.rng.random()),
                torch.rand((), generator=self.generator).item(),
                float(cv2.randu(np.zeros((1, 1)), 0, 1)[0, 0]),
            ]
        )
        return noise + index, {"index": index, "name": f"sample {index}"}
