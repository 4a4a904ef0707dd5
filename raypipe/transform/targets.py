"""Masks, boxes, keypoints: their stored forms, and their transform with the image: one pipeline, one key.

    column     holds                                                           one sample
    mask       one PNG of one channel, a class index per pixel                 uint8 (H, W)
    boxes      K boxes [x0, y0, x1, y1, label], pixels of the image, as 5·K    float32 (K, 5)
               little-endian float32 bytes, as JSON, or as numbers, flat or
               five to a box; or Hugging Face's {bbox: K of 4, category: K}
    keypoints  K keypoints [x, y, label], as boxes, three to a keypoint        float32 (K, 3)

x1 and y1 are one past the last pixel, so x1 - x0 is a width. A keypoint is a pixel: (0, 0) is the first one. Both
move as Albumentations moves them, see `raypipe.kernel.annotations`. A malformed target makes a bad sample.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError, SampleError
from raypipe.plan.places import Sides
from raypipe.stores.numbers import exactly, stored_numbers
from raypipe.transform.decode.image_header import damage_in, image_kind
from raypipe.transform.decode.pillow_images import open_pillow
from raypipe.transform.fields import Arrays, Field, SampleFields, Shape
from raypipe.transform.pipelines import is_compose

IGNORE = 255
"""In a mask: a pixel of no class. Presets pad masks with it, and so are padding rows filled."""
NO_BOX = -1
"""The label of a row of `boxes` that holds no box, or of `keypoints` that holds none."""
OUTSIDE = -2
"""The label of a keypoint outside of the image is this minus its own."""
# float32 holds all whole numbers up to it, and -2 minus each of them
_MAX_LABEL = 1 << 24


def decode_mask(data: Any, size: Sides, _: str = "") -> np.ndarray:
    """Decode a mask: a PNG of 8-bit grayscale, or a palette's indices, or one bit, as 0 and 1.

    Args:
        size: (height, width) of the image, pixels.

    Returns:
        uint8 (H, W), writable.

    Raises:
        SampleError: the bytes cannot be decoded; no other error is raised for them.
    """
    if not data:
        raise SampleError("the mask has no value")
    if not isinstance(data, bytes) or image_kind(data) != "PNG":
        if isinstance(data, bytes):
            description = f"starts with {data[:3].hex(' ')}"
        else:
            description = f"is a {type(data).__name__}"
        raise SampleError(f"the mask is no PNG: it {description}")
    with damage_in("PNG of a mask", data):
        image = open_pillow(data, "PNG")
        if image.size != size[::-1]:
            # before anything is allocated
            raise SampleError(
                f"the mask has {image.width}x{image.height} pixels (width x height), the image {size[1]}x{size[0]}"
            )
        # Grayscale of 2 and 4 bits would come scaled to 255.
        bits = data[24]
        if image.mode not in ("L", "P", "1") or (image.mode == "L" and bits != 8):
            raise SampleError(
                f"the mask is a PNG of mode {image.mode!r} with {bits} bits: it must have one channel of 8 "
                "bits, or a palette"
            )
        return np.array(image, dtype=np.uint8)


def decode_boxes(value: Any, size: Sides, boxes_format: str = "") -> np.ndarray:
    """Decode the boxes of a sample, cut at the image's edges.

    Args:
        value: see the module's table; only None is a missing value; any empty value means no boxes.
        size: (height, width) of the image, pixels.
        boxes_format: see `TransformConfig`.

    Returns:
        float32 (K, 5): x0 < x1 and y0 < y1 inside of the image, and a label.

    Raises:
        SampleError: they are malformed, or a box is outside, or extends more than a pixel beyond the image.
        ConfigError: they are a struct of lists, and boxes_format is empty.
    """
    struct = _struct_in(value)
    if struct is not None and boxes_format:
        value = _rows(struct)
    elif struct is not None and not struct.keys().isdisjoint(_BOXES):
        raise ConfigError(
            f"the boxes are a struct with {', '.join(map(str, struct))}, which may have corners or sizes: set "
            "transform.targets.boxes_xywh, [x, y, width, height] as in COCO, or boxes_xyxy"
        )
    boxes = _numbers(value, "boxes", "x0, y0, x1, y1, label")
    if boxes_format == "xywh":
        boxes[:, 2:4] += boxes[:, :2]
    corners = boxes[:, :4]
    limits = np.array(size[::-1] * 2, np.float64)
    cut = np.clip(corners, 0, limits)
    is_beyond = np.any((corners < -1) | (corners > limits + 1), axis=1)
    is_empty = (cut[:, :2] >= cut[:, 2:]).any(1)
    image = f"the image of {size[1]}x{size[0]} pixels (width x height)"
    beyond = {
        f"reaches out of {image}": is_beyond,
        "is empty: expected is x0 < x1, y0 < y1, in the image": is_empty,
    }
    _refuse("box", boxes, _wrong(boxes) | beyond)
    return np.hstack([cut, boxes[:, 4:]]).astype(np.float32)


_BOXES = ("bbox", "bboxes", "boxes")
_JSON_STRUCTS = re.compile(rb"\s*\[?\s*\{")
_LABELS = ("category", "categories", "category_id", "label", "labels")


def _struct_in(value: Any) -> Mapping[str, Any] | None:
    """Return lists of boxes and of labels by their names, from a struct, a list of structs or JSON; else None."""
    text = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    if isinstance(text, bytes) and _JSON_STRUCTS.match(text):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if (
        isinstance(value, list)
        and value
        and all(isinstance(row, Mapping) for row in value)
    ):
        return {name: [row.get(name) for row in value] for name in value[0]}
    return value if isinstance(value, Mapping) else None


def _rows(struct: Mapping[str, Any]) -> list[list[Any]]:
    """Return the boxes of a struct of lists, each with its label."""
    columns = []
    for kind, names in (("boxes", _BOXES), ("labels", _LABELS)):
        present = [name for name in names if name in struct]
        if len(present) != 1:
            raise SampleError(
                f"the boxes are a struct with {', '.join(map(str, struct))}: exactly one of {', '.join(names)} "
                f"must have the {kind}"
            )
        columns.append(struct[present[0]] or [])
    boxes, labels = columns
    if len(boxes) != len(labels) or any(
        not isinstance(box, list) or len(box) != 4 for box in boxes
    ):
        raise SampleError(
            f"{len(boxes)} boxes of 4 numbers need as many labels, and there are {len(labels)}"
        )
    return [[*box, label] for box, label in zip(boxes, labels, strict=True)]


def decode_keypoints(value: Any, size: Sides, _: str = "") -> np.ndarray:
    """Decode the keypoints of a sample, in their order; they may be outside the image.

    Args:
        value: see the module's table.
        size: (height, width) of the image, pixels.

    Returns:
        float32 (K, 3): x, y and a label.

    Raises:
        SampleError: they are malformed.
    """
    keypoints = _numbers(value, "keypoints", "x, y, label")
    _refuse("keypoint", keypoints, _wrong(keypoints))
    return keypoints.astype(np.float32)


def _wrong(rows: np.ndarray) -> dict[str, np.ndarray]:
    """Reasons against rows, float64 (K, n): float32 does not hold all numbers, or the last of each is no label."""
    labels = rows[:, -1]
    with np.errstate(over="ignore"):
        is_finite = np.all(np.isfinite(rows.astype(np.float32)), axis=1)
    is_label = (labels >= 0) & (labels <= _MAX_LABEL) & (labels == np.floor(labels))
    no_label = f"has a label that is not a whole number from 0 to {_MAX_LABEL}"
    return {"is not finite as float32": ~is_finite, no_label: ~is_label}


def _refuse(kind: str, rows: np.ndarray, reasons: Mapping[str, np.ndarray]) -> None:
    """Raise SampleError for the first row against which there is a reason, bool (K,)."""
    for why, is_wrong in reasons.items():
        for number in np.flatnonzero(is_wrong)[:1]:
            raise SampleError(
                f"{kind} {number} of {len(rows)}, {rows[number].tolist()}, {why}"
            )


def marked(keypoints: Any, shape: Shape) -> np.ndarray:
    """Transformed keypoints, float32 (K, 3), of an image of this (height, width, …): those outside have the label
    -2 - label. Raises SampleError where the transform made one infinite."""
    points = np.asarray(keypoints, np.float32).reshape(-1, 3)
    for number in np.flatnonzero(~np.isfinite(points).all(1))[:1]:
        raise SampleError(
            f"keypoint {number} of {len(points)} is not finite behind the transform"
        )
    x, y, labels = points.T
    outside = ~((x >= 0) & (y >= 0) & (x < shape[1]) & (y < shape[0]))
    return np.column_stack([x, y, np.where(outside, OUTSIDE - labels, labels)])


@dataclass(frozen=True)
class Target:
    """Target that follows the image through the pipeline.

    Attributes:
        keyword: Albumentations' name for it.
        width: numbers of each box or keypoint, the last of which is a label; 0 = a mask.
        decode: (stored value, (height, width) of the image, format of boxes) → the pipeline's input.
    """

    keyword: str
    width: int
    decode: Callable[..., np.ndarray]

    def field(self, config: TransformConfig) -> Field:
        """The field of a micro-batch that has it."""
        if not self.width:
            return Field("array", "uint8", None, IGNORE)
        fill = (*[0.0] * (self.width - 1), float(NO_BOX))
        shape = (config.max_targets, self.width)
        return Field("array", "float32", shape, fill, is_padded=True)

    def finish(
        self,
        transformed: Any,
        decoded: np.ndarray,
        image: Shape,
        limit: int,
    ) -> np.ndarray:
        """The sample's value of the field.

        Args:
            transformed: the pipeline's result, of what was decoded.
            image: shape of the resulting image.
            limit: the most boxes, or keypoints, that a sample may have.
        """
        if not self.width:
            mask = np.asarray(transformed)  # ToTensorV2 makes a tensor of it
            if mask.dtype != np.uint8 or mask.shape != image[:2]:
                raise ConfigError(
                    f"the transform made a mask of {mask.dtype} {mask.shape} for an image of {(*image[:2], 3)}: "
                    "it must be uint8 of the image's height and width"
                )
            return mask
        # By what is stored and not by what is seen of it, so that no epoch finds out later than another.
        number = max(len(transformed), len(decoded))
        if number > limit:
            name = "boxes" if self.width == 5 else "keypoints"
            raise ConfigError(
                f"it has {number} {name}, and transform.targets.max is {limit}: raise it, or leave the sample out"
            )
        if self.keyword == "keypoints":
            return marked(transformed, image)
        return np.asarray(transformed, np.float32).reshape(-1, self.width)


def by_pipeline(pipeline: Any, image: np.ndarray, targets: Arrays) -> SampleFields:
    """Return what a pipeline of Albumentations makes of an image and its targets, by keyword.

    It loses keypoints that a distortion moves outside, or does not find again: they come back as outside.
    """
    if "keypoints" not in targets:
        return pipeline(image=image, **targets)
    kept = targets["keypoints"].copy()
    numbered = kept.copy()
    numbered[:, 2] = np.arange(len(numbered))
    result = pipeline(image=image, **{**targets, "keypoints": numbered})
    moved = np.asarray(result["keypoints"]).reshape(-1, 3)
    numbers = moved[:, 2].astype(int)
    if len(np.unique(numbers)) < len(numbers):
        raise ConfigError(
            f"the transform made {len(numbers)} keypoints of {len(kept)}: a border that repeats pixels repeats "
            "keypoints, too; set its border_mode to 0 (cv2.BORDER_CONSTANT)"
        )
    kept[:, :2] = -1
    kept[numbers, :2] = moved[:, :2]
    return {**result, "keypoints": kept}


TARGETS = {
    "mask": Target("mask", 0, decode_mask),
    "boxes": Target("bboxes", 5, decode_boxes),
    "keypoints": Target("keypoints", 3, decode_keypoints),
}
"""By name; those of `transform.targets`."""


def decode_targets(
    columns: Mapping[str, Any],
    targets: Mapping[str, str],
    size: Sides,
    boxes_format: str = "",
) -> Arrays:
    """Decode a sample's targets.

    Args:
        columns: the sample's columns, by the store's names.
        targets: see `TransformConfig.target_columns`.
        size: (height, width) of the image.
        boxes_format: see `TransformConfig`.
    """
    return {
        name: TARGETS[name].decode(columns[column], size, boxes_format)
        for name, column in targets.items()
    }


def _numbers(value: Any, target_name: str, fields: str) -> np.ndarray:
    """float64 (K, n), as they are stored: n fields of each."""
    width = fields.count(",") + 1
    if value is None:
        raise SampleError(f"the {target_name} have no value")
    try:
        # No label ends with the byte of a bracket, or of a space: it would be 1e17, or a fraction.
        if isinstance(value, bytes) and value.rstrip().endswith(b"]"):
            value = value.decode()
        if isinstance(value, str) and not value.strip():
            value = []
        numbers = exactly(stored_numbers(value, "f4"), np.float64)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise SampleError(f"the {target_name} are not numbers: {error}") from error
    if not numbers.size:
        return np.empty((0, width))
    wrong = numbers.ndim == 2 and numbers.shape[1] != width
    if wrong or numbers.ndim not in (1, 2) or numbers.size % width:
        expected = {5: "five to a box", 3: "three to a keypoint"}[width]
        raise SampleError(
            f"the {target_name} are numbers of shape {numbers.shape}: they must be {expected}, [{fields}]"
        )
    return numbers.reshape(-1, width)


def target_pipeline(transform: Any, targets: Collection[str]) -> Any:
    """Copy an Albumentations Compose so that it transforms targets too, with the same draws for the image.

    Args:
        transform: from `build_transform`; None, which changes nothing, stays None.
        targets: names of the targets. The pipeline's own limits for boxes are kept; without them, boxes
            narrower or lower than a pixel are dropped. All keypoints are kept.

    Raises:
        ConfigError: it is not a Compose.
    """
    if transform is None:
        return None
    if not is_compose(transform):
        package = type(transform).__module__.partition(".")[0]
        kind = f"{package}.{type(transform).__name__}".removeprefix("builtins.")
        raise ConfigError(
            f"{', '.join(f'transform.targets.{name}' for name in sorted(targets))} needs an albumentations."
            "Compose or a pipeline of torchvision.transforms.v2, and the transform is a "
            f"{kind}: write it as one of these, name a preset, or leave it out"
        )
    library = sys.modules["albumentations"]
    processor = transform.processors.get("bboxes")
    params = None
    boxes = "boxes" in targets
    if boxes and processor is None:
        params = library.BboxParams("pascal_voc", min_width=1, min_height=1)
    elif boxes:
        params = copy.copy(processor.params)
        given = getattr(params, "coord_format", None) or params.format
        if given != "pascal_voc":
            raise ConfigError(
                f"the transform's bbox_params have format={given!r}; raypipe gives boxes as "
                "[x0, y0, x1, y1, label] in pixels: set format='pascal_voc'"
            )
        params.label_fields = None  # the label goes along as the fifth number
    with warnings.catch_warnings():
        # a Compose of only color operations would warn that boxes have no use
        warnings.simplefilter("ignore")
        return library.Compose(
            copy.deepcopy(transform.transforms),  # the results are stored in these
            bbox_params=params,
            keypoint_params=library.KeypointParams("xy", remove_invisible=False)
            if "keypoints" in targets
            else None,
            p=transform.p,
            is_check_shapes=False,
            save_applied_params=transform.save_applied_params,
        )
