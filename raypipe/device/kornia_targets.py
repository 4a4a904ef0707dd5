"""A micro-batch's boxes and keypoints as Kornia has them, and back. Knows torch, not Ray; no call waits.

    boxes        float32 (B, N, 5), x0, y0, x1, y1 and a label, corners as in `raypipe.transform.targets`
    Kornia's     `Boxes` of four corners each, which count from the middle of the first pixel: half a pixel less

Boxes are cut at the image's edges, and dropped where less than a pixel of width or height is left; those that stay
are in front. Keypoints stay in their places, and those outside are marked by their labels, as on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from raypipe.transform.fields import LABEL
from raypipe.transform.targets import NO_BOX, OUTSIDE

KEY_OF_TARGET = {
    "mask": "mask",
    "boxes": "bbox_xyxy",
    "keypoints": "keypoints",
    LABEL: "class",
}
"""Targets that Kornia's modules take, and the data key under which each is given to them."""
TARGET_OF_KEY = {
    "MASK": "mask",
    "BBOX": "boxes",
    "BBOX_XYXY": "boxes",
    "BBOX_XYWH": "boxes",
    "KEYPOINTS": "keypoints",
    "CLASS": LABEL,
    "LABEL": LABEL,
}
"""Kornia's names of data keys, besides the image's, and the targets that they stand for."""
_MIDDLE = 0.5  # where the first pixel has it
# pixels of a box's width and height; Kornia's maps are computed in float32
_LEAST = 1 - 1e-3


def to_boxes(boxes: torch.Tensor) -> Any:
    """Convert boxes (B, N, 5) to Kornia's `Boxes`."""
    from kornia.geometry.boxes import Boxes

    x0, y0, x1, y1 = (boxes[..., :4] - _MIDDLE).unbind(-1)
    corners = torch.stack([x0, y0, x1, y0, x1, y1, x0, y1], -1).unflatten(-1, (4, 2))
    return Boxes(corners, mode="vertices_plus")


def from_boxes(boxes: Any) -> torch.Tensor:
    """Convert Kornia's `Boxes` to the corners of the smallest upright boxes around them, (B, N, 4)."""
    corners = boxes.data
    return torch.cat([corners.amin(-2), corners.amax(-2)], -1) + _MIDDLE


def kept_boxes(
    corners: torch.Tensor, labels: torch.Tensor, height: int, width: int
) -> torch.Tensor:
    """Cut boxes (B, N, 4) with labels (B, N) at the edges of an image, and drop those of which nothing is left."""
    x0, x1 = corners[..., 0::2].clamp(0, width).unbind(-1)
    y0, y1 = corners[..., 1::2].clamp(0, height).unbind(-1)
    is_kept = (labels > NO_BOX) & (x1 - x0 >= _LEAST) & (y1 - y0 >= _LEAST)
    cut = _kept(torch.stack([x0, y0, x1, y1, labels], -1), is_kept)
    order = torch.argsort((~is_kept).byte(), dim=1, stable=True)
    return cut.take_along_dim(order[..., None], 1)


def _kept(rows: torch.Tensor, is_kept: torch.Tensor) -> torch.Tensor:
    """Rows (B, N, n) with their labels last, and empty rows in the place of others."""
    none = torch.zeros_like(rows)
    none[..., -1] = NO_BOX
    return torch.where(is_kept[..., None], rows, none)


def kept_keypoints(
    points: torch.Tensor, labels: torch.Tensor, height: int, width: int
) -> torch.Tensor:
    """Mark keypoints (B, N, 2) with labels (B, N) that are outside of an image; rows without one stay zeros."""
    restored = torch.where(labels <= OUTSIDE, OUTSIDE - labels, labels)
    x, y = points.unbind(-1)
    is_inside = (x >= 0) & (y >= 0) & (x < width) & (y < height)
    marked = torch.where(is_inside, restored, OUTSIDE - restored)
    return _kept(torch.stack([x, y, marked], -1), labels != NO_BOX)


def mosaic_labels(container: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return the labels (B, N) of boxes as the mosaics of a container have moved them, in the order of the boxes.

    A mosaic of n images has N·n boxes, and none more than its own N where it was not applied.
    """
    for param in container._params or []:
        module = container.get_submodule(param.name)
        if type(module).__name__ != "RandomMosaic":
            continue
        is_made = param.data["batch_prob"] > 0.5
        if not is_made.any():
            continue
        permutation = param.data["permutation"]
        # the tiles of each row in turn
        tiles = permutation[permutation[:, 0].argsort()]
        made = labels[tiles.to(labels.device, non_blocking=True)].flatten(1)
        missing = made.shape[1] - labels.shape[1]
        own = torch.nn.functional.pad(labels, (0, missing), value=NO_BOX)
        is_made = is_made.to(labels.device, non_blocking=True)[:, None]
        labels = torch.where(is_made, made, own)
    return labels
