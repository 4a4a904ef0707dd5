"""Transform that makes several views of one image, see `raypipe.transform.views`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from raypipe.errors import ConfigError
from raypipe.plan.order import mix64
from raypipe.transform.draws import Key
from raypipe.transform.fields import VIEW
from raypipe.transform.sample_transform import SampleTransform
from raypipe.transform.sizes import Undecoded
from raypipe.transform.views import View, view_key


class ViewsTransform:
    """Makes the views of one image; used as a `SampleTransform` is, without targets.

    Args:
        views: with transforms that `SampleTransform` takes.
        arrays: as of a `SampleTransform`.

    Attributes:
        crops: the transforms of each field's crops, in order.
        parts: uint64 (n, 2), with which the key of a sample is mixed for each crop of these.
    """

    crop_target = None
    """The image is decoded whole."""

    def __init__(self, views: Mapping[str, View], arrays: bool = False) -> None:
        self.crops: dict[str, list[SampleTransform]] = {}
        for name, view in views.items():
            transforms = [SampleTransform(each, arrays) for each in view.transforms]
            self.crops[f"{VIEW}.{name}"] = transforms if len(transforms) == view.count else transforms * view.count
        self.parts = np.array([view_key(name, i) for name, view in views.items() for i in range(view.count)])
        self.draws_globally = any(each.draws_globally for crops in self.crops.values() for each in crops)

    def with_targets(
        self, image: np.ndarray | Undecoded, targets: Mapping[str, Any], key: Key, out: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Make all views of an image uint8 (H, W, 3), by field.

        Raises:
            ConfigError: a transform returns anything but an image, or crops of one view differ in size.
        """
        assert isinstance(image, np.ndarray), "there is no crop_target"
        keys = iter(mix64(self.parts ^ np.array(key, np.uint64)).tolist())

        made = {}
        for column, transforms in self.crops.items():
            crops = []
            for transform in transforms:
                # A transform may write into what it is given, and all are given the same image.
                found = transform.with_targets(image.copy(), {}, next(keys))
                if "image" not in found:
                    raise ConfigError(f"a transform of {column} made several images, and a view is one")
                crops.append(found["image"])
            if len({crop.shape for crop in crops}) > 1:
                sizes = ", ".join(sorted({f"{crop.shape[0]}x{crop.shape[1]}" for crop in crops}))
                raise ConfigError(
                    f"the crops of {column} differ in size, {sizes} (height x width): end their transforms with a "
                    "crop or resize to a fixed size"
                )
            if len(dtypes := {str(crop.dtype) for crop in crops}) > 1:
                raise ConfigError(f"the crops of {column} differ in dtype, {', '.join(sorted(dtypes))}")
            made[column] = np.stack(crops) if len(crops) > 1 else crops[0]
        return made
