"""Checks of a stream's transforms against its stores and settings, before anything is read of a sample's image."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raypipe.config import PlanConfig, TransformConfig
from raypipe.errors import ConfigError, SampleError
from raypipe.plan.places import Sides, Split
from raypipe.plan.selection import JoinedSelection, Selection
from raypipe.stores.base import Store
from raypipe.transform.decode_array import header_size
from raypipe.transform.presets import build_transform, check_transform, num_pixels, takes_size
from raypipe.transform.program import Program, find_program
from raypipe.transform.sample_transform import SampleTransform
from raypipe.transform.sizes import Size, has_sizes, sizes_of
from raypipe.transform.targets import check_columns
from raypipe.transform.transform_steps import brief
from raypipe.transform.views import makes_views

_NUM_TRIED = 8  # images, by whose headers a crop is held to have room


def check_transforms(
    config: TransformConfig, transforms: Mapping[Split, Any], stores: Mapping[Split, Store]
) -> None:
    """Raise ConfigError where `build_content` would, as far as can be known without the user's code."""
    for split, store in stores.items():
        transform = transforms[split]
        check_transform(transform, config.final_size, config.decode_as == "array")
        if makes_views(transform):
            _check_views(config, split)
        check_columns(store, config.target_columns)
        if config.target_columns:
            SampleTransform(build_transform(transform, config.final_size), targets=tuple(config.target_columns))


def check_follows(transform: Any, config: TransformConfig) -> None:
    """Raise ConfigError if a train_transform has its own size and validation the default size."""
    defaults = (config.val, config.size) == (TransformConfig.val, TransformConfig.size)
    if defaults and not takes_size(transform) and num_pixels(transform, config.final_size) is None:
        raise ConfigError(
            f"train_transform is {_name_of(transform)}, and val_transform is not set: validation would have the "
            f"default size, {config.final_size} px, regardless of the training's size. Write "
            "val_transform=PIPELINE, for "
            "the same size and without random steps; or 'center', with transform=TransformConfig(size=…); or "
            "None: pixels as they are stored"
        )


def _name_of(transform: Any) -> str:
    """A transform for a message."""
    known = isinstance(transform, str | list) or makes_views(transform)
    return brief(transform) if known else "None" if transform is None else f"a {type(transform).__name__}"


def _check_views(config: TransformConfig, split: Split) -> None:
    """Raise ConfigError where something does not go with a split's views."""
    reason = ""
    if config.target_columns:
        reason = f"{config.target_settings} is of one image: leave it out"
    elif config.crop_decode == "scaled":
        reason = (
            "transform.crop_decode='scaled' decodes each crop by itself, where views share one decoding: leave it "
            "out, or set transform.decode_min_side"
        )
    if reason:
        raise ConfigError(f"transform.{split} makes views, and {reason}")


def check_images(
    config: TransformConfig,
    transforms: Mapping[Split, Any],
    stores: Mapping[Split, Store],
    plan: PlanConfig,
    kept: Mapping[Split, Selection | JoinedSelection],
) -> None:
    """Raise ConfigError where a split's transform cannot make its images: of their sizes, or of a crop's room."""
    for split, store in stores.items():
        sides = plan.sides_in(split)
        _check_sizes(config, split, transforms[split], sides)
        if not sides:  # images are not assigned to buckets yet
            _check_crops(config, split, transforms[split], store, kept[split])


def _check_sizes(config: TransformConfig, split: Split, transform: Any, sides: Sequence[Sides]) -> None:
    """Raise ConfigError where a split's images have several sizes, and its transform can make but one."""
    if has_sizes(config, split, sides) and not takes_size(transform):
        several = "plan.buckets" if sides else "transform.size"
        raise ConfigError(
            f"transform.{split} is {_name_of(transform)}, which is made once, and {several} has several "
            "sizes: use a preset, or module:function, which is called with each size and returns a transform"
        )


def _check_crops(
    config: TransformConfig, split: Split, transform: Any, store: Store, kept: Selection | JoinedSelection
) -> None:
    """Raise ConfigError where a transform crops without a resize, and all of the first images are too small.

    Code of the user's own is not checked, nor are pipelines with targets.

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
