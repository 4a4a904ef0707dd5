"""The sizes of images: of an epoch, where `transform.size` is a schedule, and of a bucket of (height, width)."""

from __future__ import annotations

import math

from raypipe.config import TransformConfig
from raypipe.plan.places import Split

Sides = tuple[int, int]
"""(height, width), pixels."""
Size = int | Sides
"""Of square images, or (height, width); pixels."""


def sides_of(size: Size) -> Sides:
    """Height and width."""
    return (size, size) if isinstance(size, int) else size


def size_in(config: TransformConfig, split: Split, epoch: int, bucket: Sides | None = None) -> Size:
    """The size of the images of an epoch.

    A validation has the last size of a schedule, so that its metrics compare. A bucket is as it is written at that
    last size, and smaller or larger in proportion at others.
    """
    last = config.final_size
    now = last if split == "val" else config.size_at(epoch)
    if bucket is None:
        return now
    height, width = (max(1, (2 * side * now + last) // (2 * last)) for side in bucket)  # the nearest whole pixel
    return height, width


def has_sizes(config: TransformConfig, split: Split) -> bool:
    """Whether a split's images have several sizes, which its transform must make."""
    return split == "train" and len(config.size_by_epoch) > 1


def sizes_of(config: TransformConfig, split: Split) -> list[Size]:
    """The sizes of a split's images, the first epoch's first."""
    epochs = config.size_by_epoch if split == "train" else [0]
    return list(dict.fromkeys(size_in(config, split, epoch) for epoch in epochs))


def most_pixels(config: TransformConfig) -> int:
    """Pixels of the largest image."""
    splits: tuple[Split, ...] = ("train", "val")
    return max(math.prod(sides_of(size)) for split in splits for size in sizes_of(config, split))
