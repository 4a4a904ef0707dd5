"""Micro-batches with masks and boxes: one pipeline, one key and one judgement for all that a sample consists of.

    image uint8 (B, H, W, 3), mask uint8 (B, H, W), boxes float32 (B, max_boxes, 5)

Rows of weight 0 have the mask IGNORE and no boxes; places without a box have the label -1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError
from raypipe.plan.schedule import Split
from raypipe.stores.base import Store
from raypipe.transform.decode import decode
from raypipe.transform.micro_batch import MicroBatchTransform
from raypipe.transform.presets import IGNORE, build_transform
from raypipe.transform.sample_transform import Key
from raypipe.transform.targets import (
    NO_BOX,
    EncodedSample,
    check_columns,
    decode_boxes,
    decode_mask,
    target_pipeline,
)


class TransformedSample(NamedTuple):
    """One sample: uint8 (H, W, 3), uint8 (H, W) and float32 (K, 5); and the most boxes that it had on the way."""

    image: np.ndarray
    mask: np.ndarray | None
    boxes: np.ndarray | None
    num_boxes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the image."""
        return self.image.shape


class TargetMicroBatchTransform(MicroBatchTransform):
    """Decodes and transforms micro-batches of `EncodedSample`s; results have a dict of arrays as their `image`.

    A sample is bad when any part of it cannot be decoded, or does not fit its image.

    Args:
        transform: for `target_pipeline`.
        targets: which there are, see `TransformConfig.target_columns`.
        max_boxes: places for boxes in a row.
        options: for `MicroBatchTransform`.
    """

    def __init__(
        self, transform: Callable[..., Any] | None, targets: dict[str, str], max_boxes: int, **options: Any
    ) -> None:
        super().__init__(target_pipeline(transform, "boxes" in targets), **options)
        self.targets, self.max_boxes = targets, max_boxes

    def _transformed(self, data: EncodedSample, key: Key) -> TransformedSample:
        jpeg = self._crop_decoder.open(data.image) if self._crop_decoder else None
        image: Any = decode(data.image) if jpeg is None else jpeg
        size = image.shape[:2] if jpeg is None else jpeg[0]
        given = {}
        if "mask" in self.targets:
            given["mask"] = decode_mask(data.mask, size)
        if "boxes" in self.targets:
            given["bboxes"] = decode_boxes(data.boxes, size)
        result = self.sample_transform.with_targets(image, given, key)
        mask, boxes = result.get("mask"), result.get("bboxes")
        if mask is not None and (mask.dtype != np.uint8 or mask.shape != result["image"].shape[:2]):
            raise ConfigError(
                f"the transform made a mask of {mask.dtype} {mask.shape} for an image of {result['image'].shape}: "
                "expected is uint8 of the image's height and width"
            )
        if boxes is not None:
            boxes = np.asarray(boxes, np.float32).reshape(-1, 5) if len(boxes) else np.empty((0, 5), np.float32)
        num_boxes = max((len(each) for each in (boxes, given.get("bboxes")) if each is not None), default=0)
        return TransformedSample(result["image"], mask, boxes, num_boxes)

    def _put(self, out: Any, position: int, image: TransformedSample, num_samples: int, index: int) -> Any:
        # By what is stored and not by what is seen of it, so that no epoch finds out later than another.
        if image.num_boxes > self.max_boxes:
            raise ConfigError(
                f"{self._name(index)} has {image.num_boxes} boxes, and transform.max_boxes is {self.max_boxes}: "
                f"raise it, or leave the sample out"
            )
        out = out or self._no_targets(num_samples, image.shape)
        out["image"] = super()._put(out.get("image"), position, image.image, num_samples, index)
        if image.mask is not None:
            out["mask"][position] = image.mask
        if image.boxes is not None:
            out["boxes"][position, : len(image.boxes)] = image.boxes
        return out

    def _finish(self, out: Any, weight: np.ndarray) -> dict[str, np.ndarray]:
        image = super()._finish(out["image"] if out else None, weight)[0]
        return {**(out or self._no_targets(len(weight), image.shape[1:])), "image": image}

    def _no_targets(self, num_samples: int, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
        empty = {}
        if "mask" in self.targets:
            empty["mask"] = np.full((num_samples, *shape[:2]), IGNORE, np.uint8)
        if "boxes" in self.targets:
            empty["boxes"] = np.zeros((num_samples, self.max_boxes, 5), np.float32)
            empty["boxes"][:, :, 4] = NO_BOX
        return empty


def check_targets(config: TransformConfig, transforms: Mapping[Split, Any], stores: Mapping[Split, Store]) -> None:
    """Raise ConfigError unless stores have the targets that are configured, and transforms can take them along."""
    for split, store in stores.items():
        check_columns(store, config.target_columns)
        if config.target_columns:
            transform = transforms[split]
            built = build_transform(transform, config.size) if isinstance(transform, str | list) else transform
            target_pipeline(built, bool(config.boxes_column))


def micro_batch_transform(
    transform: Callable[..., Any] | None, config: TransformConfig, **options: Any
) -> MicroBatchTransform:
    """The transform of a split's micro-batches on the CPU.

    Args:
        transform: from `build_transform`, or the user's.
        config: decode settings and targets.
        options: `on_bad_sample`, `exact`, `store_address`, `sample_name` and `probe` of `MicroBatchTransform`.

    Raises:
        ConfigError: a setting is wrong, or there are targets that the transform does not take.
    """
    options |= {
        "decode_min_side": config.decode_min_side or None,
        "crop_decode": config.crop_decode,
        "check_whole": config.check_whole,
        "exif": config.exif,
    }
    if config.target_columns:
        return TargetMicroBatchTransform(transform, config.target_columns, config.max_boxes, **options)
    return MicroBatchTransform(transform, **options)
