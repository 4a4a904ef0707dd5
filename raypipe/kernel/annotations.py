"""An image's targets, such as its mask, follow it through a program: with the numbers that were drawn for it.

Numbers are those of Albumentations. A box has corners, counted from the image's upper left one: (0, 0, 1, 1) is
its first pixel. A keypoint is a pixel, the first one (0, 0), so a flip moves it to width - 1 - x; but a resize
multiplies its coordinates, so that a point in the image stays in it. Boxes are cut at the edges behind each step,
and dropped where less than a pixel of width or height is left; keypoints are all kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from raypipe.kernel import reference
from raypipe.kernel.ops import NEAREST, Op, sizes_behind
from raypipe.kernel.step import Step

_Size = tuple[int, int]  # (height, width), pixels
_LEAST = 1 - 1e-6  # pixels of a box's width and height
POINTS = ("bboxes", "keypoints")
"""Targets of which points move; of all others pixels do."""
_OF_CORNERS = 0.5
_OF_PIXELS = 0.0  # where the middle of the first pixel is: for boxes, and for keypoints


def follow(
    applied: Iterable[tuple[Step, Op, list[int]]],
    size: _Size,
    targets: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Move what goes with one image.

    Args:
        applied: the operations on it, see `Program.applied`.
        size: (height, width) of the image.
        targets: "bboxes", float (K, 5); "keypoints", float (K, 3); all others (H, W), numbers.

    Returns:
        The same of the image that they make.
    """
    moved = {
        name: value.astype(np.float64) if name in POINTS else value
        for name, value in targets.items()
    }
    for step, op, numbers in applied:
        height, width = sizes_behind(op, np.array(numbers), np.array(size)).tolist()
        for name, value in moved.items():
            if name == "keypoints":
                if op == Op.RESIZE:
                    value[:, :2] *= step.keypoint_scale(size, (height, width))
                else:
                    value[:, :2] = _points(value[:, :2], op, numbers, size, _OF_PIXELS)
            elif name == "bboxes":
                moved[name] = _cut(_boxes(value, op, numbers, size), (height, width))
            else:
                moved[name] = _mask(value, step, op, numbers)
        size = height, width
    return moved


def _points(
    points: np.ndarray, op: Op, p: list[int], size: _Size, middle: float
) -> np.ndarray:
    """Points (n, 2), (x, y), behind an operation on an image of this size.

    Args:
        middle: x and y of the middle of the first pixel.
    """
    height, width = size
    if op == Op.CROP:
        return points - (p[1], p[0])
    if op == Op.RESIZE:
        return points * (p[1] / width, p[0] / height)
    if op == Op.PAD:
        return points + np.array([p[2], p[0]])
    if op == Op.TURN:
        return _turned(points, p[0], size, middle)
    if op == Op.AFFINE:
        return _mapped(points - middle, p[:6]) + middle
    return points


def _turned(points: np.ndarray, code: int, size: _Size, middle: float) -> np.ndarray:
    """Points behind a turn, whose code is the sum of that of `Turn`."""
    height, width = size
    if code & 4:
        points = points[:, ::-1]
        height, width = width, height
    signs = np.array([-1 if code & 1 else 1, -1 if code & 2 else 1])
    last = np.array([width, height]) - 1 + 2 * middle
    return points * signs + np.where(signs < 0, last, 0)


def _mapped(points: np.ndarray, sources_q32: list[int]) -> np.ndarray:
    """Points behind an affine map, which is given by where its pixels come from."""
    a, b, c, d, e, f = (number / 2**32 for number in sources_q32)
    x, y = points.T - [[c], [f]]
    determinant = a * e - b * d or 1.0
    return np.column_stack([e * x - b * y, a * y - d * x]) / determinant


def _boxes(boxes: np.ndarray, op: Op, p: list[int], size: _Size) -> np.ndarray:
    """Boxes (K, 5), around the corners of what they were, or around what holes leave of them."""
    if op == Op.DROPOUT:
        return _visible(boxes, np.array(p[4 : 4 + 4 * p[3]]).reshape(-1, 4), size)
    corners = boxes[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 2)
    moved = _points(corners, op, p, size, _OF_CORNERS).reshape(-1, 4, 2)
    return np.hstack([moved.min(axis=1), moved.max(axis=1), boxes[:, 4:]])


def _cut(boxes: np.ndarray, size: _Size) -> np.ndarray:
    """Boxes cut at the image's edges, without those of which too little is left."""
    corners = np.clip(boxes[:, :4], 0, (size[1], size[0]) * 2)
    stays = (corners[:, 2:] - corners[:, :2] >= _LEAST).all(axis=1)
    return np.hstack([corners, boxes[:, 4:]])[stays]


def _visible(boxes: np.ndarray, holes: np.ndarray, size: _Size) -> np.ndarray:
    """Boxes around what holes leave of them."""
    is_hidden = np.zeros(size, bool)
    for top, left, bottom, right in holes.tolist():
        is_hidden[top:bottom, left:right] = True
    visible = []
    for box in boxes:
        x0, y0, x1, y1 = box[:4].astype(int).tolist()
        # (x, y) of the pixels that are not hidden
        seen = np.argwhere(~is_hidden[y0:y1, x0:x1])[:, ::-1] + (x0, y0)
        if len(seen):
            around = [*seen.min(axis=0), *(seen.max(axis=0) + 1)]
            if around == [x0, y0, x1, y1]:
                around = box[:4]  # a whole box keeps its fractions of pixels
            visible.append([*around, *box[4:]])
    return np.array(visible).reshape(-1, boxes.shape[1])


def _mask(mask: np.ndarray, step: Step, op: Op, p: list[int]) -> np.ndarray:
    """A mask, its pixels moved and never mixed."""
    if op == Op.RESIZE:
        return reference.nearest(mask, p[0], p[1])
    fill = step.mask_fill or 0
    image = mask[:, :, None]
    if op == Op.PAD:
        p = [*p[:5], fill]
    elif op == Op.AFFINE:
        p = [*p[:6], NEAREST, p[7], fill]
    elif op == Op.DROPOUT and step.mask_fill is not None:
        p = [fill, fill, fill, *p[3:]]
        image = image.repeat(3, axis=2)
    elif op not in (Op.CROP, Op.TURN):
        return mask
    return reference.OPERATIONS[op](image, p)[:, :, 0]
