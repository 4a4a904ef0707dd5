"""The images that are made of a sample: the only one, whose field is `image`, or the crops of its views."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raypipe.errors import ConfigError
from raypipe.plan.order import mix64
from raypipe.transform.fields import IMAGE, VIEW
from raypipe.transform.pixels import RGB, Pixels
from raypipe.transform.sample_transform import SampleTransform
from raypipe.transform.views import view_key


@dataclass(frozen=True)
class ViewImage:
    """An image that is made of a sample.

    Attributes:
        field: the name of its field.
        transform: the transform that makes it.
        crop: its number among the crops of a view; None = the field has no other.
        key: two words that no other crop of a view has; None = the image has the sample's key itself.
    """

    field: str
    transform: SampleTransform
    crop: int | None = None
    key: np.ndarray | None = None

    def keys(self, keys: np.ndarray) -> np.ndarray:
        """Derive its keys, uint64 (…, 2), from those of the samples."""
        if self.key is None:
            return keys
        return mix64(self.key ^ keys)

    def output(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """The memory of this image of B samples among the arrays of a micro-batch."""
        out = arrays[self.field]
        return out if self.crop is None else out[:, self.crop]


def view_images(
    transform: Any, pixels: Pixels = RGB, targets: Collection[str] = ()
) -> list[ViewImage]:
    """The images that a transform makes of a sample, which is from `build_transform`; see `SampleTransform`."""
    if not isinstance(transform, Mapping):
        return [ViewImage(IMAGE, SampleTransform(transform, pixels, targets))]
    images = []
    for name, view in transform.items():
        transforms = [
            SampleTransform(view_transform, pixels)
            for view_transform in view.transforms
        ]
        for number in range(view.count):
            images.append(
                ViewImage(
                    f"{VIEW}.{name}",
                    transforms[number % len(transforms)],
                    number if view.count > 1 else None,
                    view_key(name, number),
                )
            )
    return images


def join_crops(
    views: Sequence[ViewImage], images: Sequence[np.ndarray]
) -> dict[str, np.ndarray]:
    """Join images, each made by one of `views`, by field: (h, w, 3), or (n, h, w, 3) for n crops.

    Raises:
        ConfigError: the crops of a field differ in size or dtype.
    """
    crops = dict[str, list[np.ndarray]]()
    for view, image in zip(views, images, strict=True):
        crops.setdefault(view.field, []).append(image)
    return {field: _stacked(field, of_field) for field, of_field in crops.items()}


def _stacked(field: str, images: Sequence[np.ndarray]) -> np.ndarray:
    if len(images) == 1:
        return images[0]
    kinds = sorted({f"{image.dtype} {image.shape}" for image in images})
    if len(kinds) > 1:
        raise ConfigError(
            f"the crops of {field} differ, {', '.join(kinds)}: end their transforms with a crop or resize to a "
            "fixed size, and in one dtype"
        )
    return np.stack(images)
