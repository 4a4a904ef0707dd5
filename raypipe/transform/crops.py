"""Images that are made of each sample: one, or the crops of its views, see `raypipe.transform.views`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raypipe.errors import ConfigError
from raypipe.plan.order import mix64
from raypipe.transform.fields import IMAGE, VIEW
from raypipe.transform.sample_transform import SampleTransform
from raypipe.transform.views import view_key


@dataclass(frozen=True)
class Crop:
    """Image that is made of each sample: its only image, or one of a view.

    Attributes:
        field: the image's field.
        transform: makes it.
        number: its number among several of the field; None = it is the only one.
        part: uint64 (2,), mixed with the samples' keys; None = the keys are used as they are.
    """

    field: str
    transform: SampleTransform
    number: int | None = None
    part: np.ndarray | None = None

    def keys(self, keys: np.ndarray) -> np.ndarray:
        """Derive its keys, uint64 (…, 2), from those of the samples."""
        return keys if self.part is None else mix64(self.part ^ keys)


def crops_of(transform: Any, arrays: bool = False, targets: Collection[str] = ()) -> list[Crop]:
    """The crops that a transform makes, which is from `build_transform`; for the rest see `SampleTransform`."""
    if not isinstance(transform, Mapping):
        return [Crop(IMAGE, SampleTransform(transform, arrays, targets))]
    crops = []
    for name, view in transform.items():
        transforms = [SampleTransform(each, arrays) for each in view.transforms]
        for i in range(view.count):
            number = i if view.count > 1 else None
            crops.append(Crop(f"{VIEW}.{name}", transforms[i % len(transforms)], number, view_key(name, i)))
    return crops


def by_field(crops: Sequence[Crop], images: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    """Join the images of crops: of each field (h, w, 3), or (n, h, w, 3).

    Raises:
        ConfigError: crops of one field differ in size or dtype.
    """
    parts = dict[str, list[np.ndarray]]()
    for crop, image in zip(crops, images, strict=True):
        parts.setdefault(crop.field, []).append(image)
    for field, of_field in parts.items():
        if len({image.shape for image in of_field}) > 1:
            sizes = ", ".join(sorted({f"{image.shape[0]}x{image.shape[1]}" for image in of_field}))
            raise ConfigError(
                f"the crops of {field} differ in size, {sizes} (height x width): end their transforms with a "
                "crop or resize to a fixed size"
            )
        if len(dtypes := {str(image.dtype) for image in of_field}) > 1:
            raise ConfigError(f"the crops of {field} differ in dtype, {', '.join(sorted(dtypes))}")
    return {field: np.stack(images) if len(images) > 1 else images[0] for field, images in parts.items()}
