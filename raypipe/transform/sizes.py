"""Sizes of images, by epoch where `transform.size` is a schedule, and by bucket."""

from __future__ import annotations

import math
from collections.abc import Sequence

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError
from raypipe.plan.places import Sides, Split
from raypipe.transform.decode.limits import MAX_PIXELS

Size = int | Sides
"""Of square images, or (height, width); pixels."""


def sides_of(size: Size) -> Sides:
    """Return an image's height and width."""
    return (size, size) if isinstance(size, int) else size


def size_in(
    config: TransformConfig, split: Split, epoch: int, bucket: Sides | None = None
) -> Size:
    """The size of the images of an epoch.

    A validation has the last size of a schedule, so that its metrics compare. A bucket is as it is written at that
    last size, and smaller or larger in proportion at others.

    Raises:
        ConfigError: a bucket is larger than an image may be.
    """
    last = config.final_size
    now = last if split == "val" else config.size_at(epoch)
    if bucket is None:
        return now
    # the nearest whole pixel
    height, width = (max(1, (2 * side * now + last) // (2 * last)) for side in bucket)
    if height * width > MAX_PIXELS:
        raise ConfigError(
            f"the bucket {bucket[0]}x{bucket[1]} of plan.buckets is {height}x{width} at transform.size {now} of "
            f"{last}, and images have at most {MAX_PIXELS} pixels: lower one of them"
        )
    return height, width


def has_sizes(
    config: TransformConfig, split: Split, buckets: Sequence[Sides] = ()
) -> bool:
    """True if a split's images have given sizes, mostly several, that its transform must make."""
    return bool(buckets) or (split == "train" and len(config.size_by_epoch) > 1)


def pixel_range(
    config: TransformConfig, buckets: Sequence[Sides] = ()
) -> tuple[int, int]:
    """Return the pixels of the smallest and of the largest image in training."""
    shapes: Sequence[Sides | None] = buckets or [None]
    pixels = [
        math.prod(sides_of(size_in(config, "train", epoch, shape)))
        for epoch in config.size_by_epoch
        for shape in shapes
    ]
    return min(pixels), max(pixels)
