"""Facts about a stream's batches as they reach a device, for the stages there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from raypipe.plan.places import Split
from raypipe.transform.columns import ColumnType
from raypipe.transform.ending import Ending


class DeviceInput(NamedTuple):
    """Facts about a stream's batches as they reach a device; `StreamSpec.device_input` has them.

    Attributes:
        endings: dtype and normalization with which pipelines ended, by split.
        target: type of the target; None = classes, int64.
        has_target: whether batches have a target.
        targets: names of their masks, boxes and keypoints, which move with the image.
        has_views: whether training batches have views.
        is_array: whether images are arrays of any dtype.
        has_images: whether batches have images; those of a Dataset have what its collate function makes.
    """

    endings: Mapping[Split, Ending]
    target: ColumnType | None
    has_target: bool
    targets: tuple[str, ...]
    has_views: bool
    is_array: bool
    has_images: bool = True


IMAGES = DeviceInput({}, None, True, (), False, False)
"""Batches of images and classes, of a pipeline without an ending."""
