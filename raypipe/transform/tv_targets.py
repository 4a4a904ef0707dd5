"""Masks, boxes and keypoints in pipelines of torchvision v2, which move tv_tensors with the image.

A pipeline gets the image and a dict of what the stream has, and returns both:

    {mask: Mask (H, W), boxes: BoundingBoxes XYXY (K, 4), labels: int64 (K,), keypoints: KeyPoints (K, 2)}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from raypipe.errors import ConfigError
from raypipe.plan.places import Sides
from raypipe.transform.fields import IMAGE, Arrays, SampleFields

_LEAST = (
    1 - 1e-3
)  # pixels of a box's width and height that is kept; corners are float32


def by_torchvision(pipeline: Any, image: Any, targets: Arrays) -> SampleFields:
    """Return what a pipeline makes of an image and its targets, by Albumentations' keywords.

    Args:
        image: `tv_tensors.Image`.
        targets: uint8 `mask` (H, W), float32 `bboxes` (K, 5) and `keypoints` (K, 3).

    Raises:
        ConfigError: it returns something else, or removes keypoints.
    """
    given = image, _as_tensors(targets, (image.shape[-2], image.shape[-1]))
    from torchvision.transforms.v2 import functional

    # A sequence of torch's modules passes one argument on.
    is_sequence = type(pipeline).__name__ == "Sequential"
    returned = pipeline(given) if is_sequence else pipeline(*given)
    labels = targets.get("keypoints", np.empty((0, 3)))[:, 2]
    if (
        not isinstance(returned, tuple | list)
        or len(returned) != 2
        or len(returned[1].get("keypoints", ())) != len(labels)
    ):
        raise ConfigError(
            f"the transform returned a {type(returned).__name__} for an image and its {', '.join(targets)}: it "
            "must return both, with all keypoints; those outside of the image get a label that says so"
        )
    moved, found = returned
    results = {IMAGE: moved}
    if "mask" in targets:
        results["mask"] = _mask(np.asarray(found["mask"]))
    if "bboxes" in targets:
        corners = _corners(found["boxes"], functional.get_size(moved))
        rows = np.column_stack([corners, found["labels"]]).astype(np.float32)
        is_kept = corners[:, 2:] - corners[:, :2] >= _LEAST
        results["bboxes"] = rows[is_kept.all(1)]
    if "keypoints" in targets:
        results["keypoints"] = np.column_stack([found["keypoints"], labels])
    return results


def _mask(mask: np.ndarray) -> np.ndarray:
    """A mask of integers as uint8, where -1 is 255; any other as it is. Raises ConfigError for other numbers."""
    if mask.dtype.kind not in "iu" or not mask.size:
        return mask
    least = int(mask.min())
    most = int(mask.max())
    if least < -1 or most > 255:
        raise ConfigError(
            f"the transform made a mask of numbers from {least} to {most}: classes are 0 to 254, and pixels of no "
            "class are 255, or -1; change them in the loop, on the batch"
        )
    return mask.astype(np.uint8)


def _as_tensors(targets: Arrays, size: Sides) -> SampleFields:
    import torch
    from torchvision import tv_tensors

    given = SampleFields()
    for name, target in targets.items():
        tensor = torch.from_numpy(target)
        if name == "mask":
            given[name] = tv_tensors.Mask(tensor)
        elif name == "bboxes":
            given["boxes"] = tv_tensors.BoundingBoxes(
                tensor[:, :4],
                format="XYXY",  # type: ignore[arg-type]
                canvas_size=size,
            )
            given["labels"] = tensor[:, 4].long()
        else:
            given[name] = tv_tensors.KeyPoints(tensor[:, :2], canvas_size=size)
    return given


def _corners(boxes: Any, size: Sequence[int]) -> np.ndarray:
    """Corners (K, 4) of boxes, cut at the edges of an image."""
    from torchvision.transforms.v2 import functional

    if hasattr(boxes, "format"):  # pure tensors have none
        boxes = functional.convert_bounding_box_format(
            boxes,
            new_format="XYXY",  # type: ignore[arg-type]
        )
    height, width = size
    return np.clip(np.asarray(boxes), 0, [width, height, width, height])
