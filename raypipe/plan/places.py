"""The places of micro-batches in a run, and of samples in them; the sides of images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "val"]
Sides = tuple[int, int]
"""Height and width of an image, pixels."""
PADDING = -1
"""The index of a padding row: zeros, weight 0."""


@dataclass(frozen=True)
class MicroBatchId:
    """The place of one micro-batch in a run."""

    split: Split
    epoch: int
    step: int
    micro: int

    def __str__(self) -> str:
        return f"{self.split}-e{self.epoch:04d}-s{self.step:06d}-m{self.micro:03d}"
