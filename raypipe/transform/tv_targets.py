"""Masks, boxes and keypoints in pipelines of torchvision v2, which move tv_tensors with the image.

targets of the stream          second argument of the pipeline
mask                           Mask (H, W), as in the scripts for segmentation
others, or several             {boxes, labels, mask, keypoints}, as in those for detection
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from raypipe.errors import ConfigError
from raypipe.transform.fields import IMAGE

_LEAST = (
    1 - 1e-3
)  # pixels of a box's width and height that is kept; corners are float32


def by_torchvision(
    pipeline: Any, image: Any, targets: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Return what a pipeline makes of an image and its targets, by Albumentations' keywords.

    Args:
        image: `tv_tensors.Image`.
        targets: uint8 `mask` (H, W), float32 `bboxes` (K, 5) and `keypoints` (K, 3).

    Raises:
        ConfigError: it returns something else, or removes keypoints.
    """
    given = image, _as_tensors(targets, (image.shape[-2], image.shape[-1]))
    # A sequence of torch's modules passes one argument on.
    is_sequence = type(pipeline).__name__ == "Sequential"
    returned = pipeline(given) if is_sequence else pipeline(*given)
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise ConfigError(
            f"the transform gets an image and its {', '.join(targets)}, and returned a {type(returned).__name__}: "
            "it must return both"
        )
    moved, found = returned
    if not isinstance(found, Mapping):
        found = {"mask": found}
    results = {IMAGE: moved}
    if "mask" in targets:
        results["mask"] = _mask(found["mask"])
    if "bboxes" in targets:
        height, width = moved.shape[-2:]
        results["bboxes"] = _kept_boxes(found, height, width)
    if "keypoints" in targets:
        labels = targets["keypoints"][:, 2]
        points = np.asarray(found["keypoints"]).reshape(-1, 2)
        if len(points) != len(labels):
            raise ConfigError(
                f"the transform made {len(points)} keypoints of {len(labels)}: leave out the step that removes "
                "some; those outside of the image get a label that says so"
            )
        results["keypoints"] = np.column_stack([points, labels])
    return results


def _as_tensors(targets: Mapping[str, np.ndarray], size: tuple[int, int]) -> Any:
    import torch
    from torchvision import tv_tensors

    tensors = {name: torch.from_numpy(value) for name, value in targets.items()}
    given = dict[str, Any]()
    if "mask" in tensors:
        given["mask"] = tv_tensors.Mask(tensors["mask"])
        if len(tensors) == 1:
            return given["mask"]
    if "bboxes" in tensors:
        boxes = tensors["bboxes"]
        given["boxes"] = tv_tensors.BoundingBoxes(
            boxes[:, :4],
            format="XYXY",  # type: ignore[arg-type]
            canvas_size=size,
        )
        given["labels"] = boxes[:, 4].long()
    if "keypoints" in tensors:
        points = tensors["keypoints"][:, :2]
        given["keypoints"] = tv_tensors.KeyPoints(points, canvas_size=size)
    return given


def _mask(mask: Any) -> np.ndarray:
    """A mask, also of another integer type or with a channel, as uint8 (H, W)."""
    array = np.asarray(mask)
    if array.dtype.kind in "iu":
        array = array.astype(np.uint8)  # -1 becomes 255, the pixels of no class
    if array.ndim == 3 and len(array) == 1:
        return array[0]
    return array


def _kept_boxes(found: Mapping[str, Any], height: int, width: int) -> np.ndarray:
    """Boxes with their labels, float32 (K, 5), cut at the image's edges; those with no pixel left are dropped."""
    from torchvision import tv_tensors
    from torchvision.transforms.v2 import functional

    boxes = found["boxes"]
    if isinstance(boxes, tv_tensors.BoundingBoxes):
        boxes = functional.convert_bounding_box_format(
            boxes,
            new_format="XYXY",  # type: ignore[arg-type]
        )
    corners = np.asarray(boxes).reshape(-1, 4)
    corners = np.clip(corners, 0, [width, height, width, height])
    sides = corners[:, 2:] - corners[:, :2]
    rows = np.column_stack([corners, np.asarray(found["labels"])])
    return rows[(sides >= _LEAST).all(1)].astype(np.float32)
