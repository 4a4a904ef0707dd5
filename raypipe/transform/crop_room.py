"""Whether a store's images have room for the crop of a transform, by the headers of the first few."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError, SampleError
from raypipe.plan.places import Sides, Split
from raypipe.plan.selection import JoinedSelection, Selection
from raypipe.stores.base import Store
from raypipe.transform.decode_array import header_size
from raypipe.transform.presets import build_transform
from raypipe.transform.program import Program, find_program
from raypipe.transform.sizes import Size, sizes_of

_NUM_TRIED = 8


def check_crops(
    config: TransformConfig, split: Split, transform: Any, store: Store, kept: Selection | JoinedSelection
) -> None:
    """Raise ConfigError where a transform crops without a resize, and all of the first images are too small.

    Code of the user's own is not checked, nor are pipelines with masks and boxes.

    Args:
        kept: the samples that the plan draws from.
    """
    sizes = sizes_of(config, split)
    if not _cropping(transform, sizes[0]):
        return
    images = list[Sides]()
    first = kept.indices(np.arange(min(_NUM_TRIED, kept.size)))
    for image in store.read(first, ("image",))["image"]:
        with contextlib.suppress(SampleError):
            images.append(header_size(image, config.apply_exif))
    for size in sizes if images else ():
        crop = _cropping(transform, size)
        reasons = [crop.no_room(sides) for sides in images] if crop else [""]
        if all(reasons):
            height, width = images[-1]
            mend = "Make the crop smaller, or begin with a resize"
            if isinstance(transform, str):
                mend = f"Set transform.size={min(map(min, images))}, or use a preset that resizes, such as small"
            raise ConfigError(
                f"transform.{split} crops without a resize, and the first {len(images)} images of {store.address} "
                f"are too small, the last of them {height}x{width} (height x width): {reasons[-1]}. {mend}"
            )


def _cropping(transform: Any, size: Size) -> Program | None:
    """A transform that crops without a resize; None = it does not, or that is not known."""
    if isinstance(transform, str | list):
        others = isinstance(transform, str) and transform != "flip-crop"  # the only preset that crops so
        transform = None if others else build_transform(transform, size)
    program = transform if isinstance(transform, Program) else find_program(transform)[0]
    return program if program and program.crops_first else None
