"""Checks of a stream's transforms against its stores and settings, before anything is read of a sample's image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raypipe.config import PlanConfig, TransformConfig
from raypipe.errors import ConfigError
from raypipe.plan.places import Split
from raypipe.stores.base import Store, missing
from raypipe.transform.albumentations import why_no_program
from raypipe.transform.presets import (
    check_name,
    is_preset,
    takes_size,
)
from raypipe.transform.sample_maker import SampleMaker
from raypipe.transform.sizes import has_sizes
from raypipe.transform.transform_steps import brief
from raypipe.transform.views import find_views, makes_views

_REPEATS = (
    "its borders repeat pixels, and so the library makes it for boxes and keypoints"
)


def check_transforms(
    config: TransformConfig,
    transforms: Mapping[Split, Any],
    stores: Mapping[Split, Store],
) -> None:
    """Raise ConfigError where `SampleMaker` would, as far as can be known without the user's code."""
    for split, store in stores.items():
        transform = transforms[split]
        if makes_views(transform) and config.target_columns:
            raise ConfigError(
                f"transform.{split} makes views, and {config.target_settings} goes with one image: leave it out"
            )
        check_target_columns(store, config.target_columns)
        if (
            isinstance(transform, str)
            and ":" in transform
            and not config.target_columns
        ):
            check_name(transform)
        else:
            SampleMaker(transform, config)


def check_target_columns(store: Store, targets: Mapping[str, str]) -> None:
    """Raise ConfigError unless a store has the columns of targets, see `TransformConfig.target_columns`."""
    for name, column in targets.items():
        setting = f"transform.targets.{name}"
        parent, _, field = column.rpartition(".")
        names = store.schema.names
        if column == "image":
            raise ConfigError(
                f"{setting} must be another column than the image, got 'image'"
            )
        if column not in names and parent in names:
            raise ConfigError(
                f"{setting} is {column!r}: name the column that has the labels next to {field!r} too, {parent!r}"
            )
        if column not in names:
            raise ConfigError(missing(store.address, column, names, setting))


def check_strength(config: TransformConfig, transform: Any) -> None:
    """Raise ConfigError if transform.strength is to scale a training transform that the library makes."""
    if config.strength == 1:
        return
    where = "transform.strength scales the steps that raypipe makes itself"
    if config.decode == "array":
        raise ConfigError(
            f"{where}, of uint8 RGB, and transform.decode is 'array': leave one of them out"
        )
    for _, image in SampleMaker(transform, config).transforms:
        if image.given is not None and image.has_rest:
            why = why_no_program(image.given) or _REPEATS
            raise ConfigError(
                f"{where}. transform.train is {brief(transform)}: {why}; leave transform.strength out, or use "
                "steps that docs/transforms.md lists as raypipe's"
            )


def check_follows(transform: Any, config: TransformConfig) -> None:
    """Raise ConfigError if a train_transform has its own size and validation the default size."""
    defaults = (config.val, config.size) == (TransformConfig.val, TransformConfig.size)
    if defaults and not _has_known_size(transform, config.final_size):
        raise ConfigError(
            f"train_transform is {brief(transform)}, and val_transform is not set: validation would have the "
            f"default size, {config.final_size} px, regardless of the training's size. Write "
            "val_transform=PIPELINE, for "
            "the same size and without random steps; or 'center', with transform=TransformConfig(size=…); or "
            "None: pixels as they are stored"
        )


def _has_known_size(transform: Any, size: int) -> bool:
    """True if a transform takes the size of the configuration, or its views name theirs."""
    if not isinstance(transform, Mapping):
        return takes_size(transform) or makes_views(transform)
    views = find_views(transform, size).values()
    return all(is_preset(each) for view in views for each in view.transforms)


def check_sizes(
    config: TransformConfig,
    transforms: Mapping[Split, Any],
    stores: Mapping[Split, Store],
    plan: PlanConfig,
) -> None:
    """Raise ConfigError where a split's images have several sizes, and its transform can make only one."""
    for split in stores:
        sides = plan.sides_in(split)
        if has_sizes(config, split, sides) and not takes_size(transforms[split]):
            several = "plan.buckets" if sides else "transform.size"
            raise ConfigError(
                f"transform.{split} is {brief(transforms[split])}, which is made once, and {several} has "
                "several sizes: use a preset, or module:function, which is called with each size and returns a "
                "transform"
            )
