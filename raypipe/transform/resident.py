"""A CPU transform where a device holds the decoded images (`pool.cache: device`): in three parts.

    once, at the start   the first steps, as long as they draw nothing       here: the images that the device holds
    for each sample      the draws of the other steps, from the same key     here: numbers
    a micro-batch        what was drawn, done to the images                  `raypipe.device.resident`

    step                                                    on the device, a stage
    none at all                                             the images as they are held
    RandomCrop, CenterCrop, HorizontalFlip, VerticalFlip    "window": pixels are moved; several in a row are one
    RandomResizedCrop                                       "crop_resize": bilinear, rounded to uint8
    Affine                                                  "warp": the same, black outside of the image

Windows give the pixels of the CPU to the bit. What interpolates differs by OpenCV's roundings, of one level at
most, so a stream with such a stage has a fingerprint of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

import cv2
import numpy as np

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError, SampleError
from raypipe.plan.places import Split
from raypipe.transform.batch import Arrays, Make, Take
from raypipe.transform.direct import Crop, CropResize, Operation
from raypipe.transform.presets import build_transform
from raypipe.transform.sample_transform import DRAWN, Decoded, EncodedSample, Key, SampleTransform
from raypipe.transform.sizes import Sides
from raypipe.transform.transform_steps import brief
from raypipe.transform.user_code import failed
from raypipe.transform.views import makes_views

Kind = Literal["window", "crop_resize", "warp"]
_KINDS: dict[str, Kind] = dict.fromkeys(("RandomCrop", "CenterCrop", "HorizontalFlip", "VerticalFlip"), "window")
_KINDS |= {"RandomResizedCrop": "crop_resize", "Affine": "warp"}
_IDENTITY = np.eye(3)[:2]


class Stage(NamedTuple):
    """One of the device's passes over a micro-batch.

    Attributes:
        kind: see the module's table.
        steps: which of the steps after the first ones it does.
        of, to: height and width of the images that go in, and that come out.
    """

    kind: Kind
    steps: slice
    of: Sides
    to: Sides

    def placed(self, operations: Sequence[Operation | None]) -> Any:
        """What was drawn for a sample, as numbers, see `numbers`."""
        mine: Any = operations[self.steps]
        if self.kind == "window":
            return _window(mine, self.of)
        (operation,) = mine
        if self.kind == "crop_resize":
            return (0, 0, *self.of) if operation is None else operation.box
        return _IDENTITY if operation is None else operation.matrix

    def numbers(self, placed: Sequence[Any], rows: np.ndarray) -> np.ndarray:
        """Of B samples.

        Args:
            rows: int64 (B,), where the images lie that go in.

        Returns:
            Of a window int64 (B, 3): the number of the pixel, among those of all images, that the first one comes
            from, and the steps to those that the next ones down and to the right come from. Of the others float32,
            where -1 and 1 are the outer edges of the image that goes in: of crop_resize (B, 8), the place that the
            first pixel comes from, the step to the next, and the first and last place, of x, then of y; of warp
            (B, 6), a row-major matrix (2, 3) from (x, y, 1) of a pixel that comes out to its place.
        """
        if self.kind == "window":
            top, down, left, right = np.array(placed, np.int64).T
            height, width = self.of
            return np.stack([(rows * height + top) * width + left, down * width, right], 1)
        if self.kind == "crop_resize":
            top, left, height, width = np.array(placed, np.float64).T
            axes = (left, width, self.to[1], self.of[1]), (top, height, self.to[0], self.of[0])
            return np.concatenate([_resized(*axis) for axis in axes], 1).astype(np.float32)
        forth = np.tile(np.eye(3), (len(placed), 1, 1))
        forth[:, :2] = placed
        back = np.linalg.inv(forth)[:, :2] * 2 / np.array(self.of[::-1])[:, None]
        back[:, :, 2] += 1 / np.array(self.of[::-1]) - 1
        return back.reshape(-1, 6).astype(np.float32)


def _resized(start: np.ndarray, length: np.ndarray, num: int, full: int) -> np.ndarray:
    """Of one axis, float64 (B, 4): where `num` pixels come from, by OpenCV's rule; none from beside the box."""
    step = length / num
    places = np.stack([start + (step - 1) / 2, step, start, start + length - 1], 1)
    is_place = np.array([1, 0, 1, 1])
    return (2 * places + is_place) / full - is_place


def _window(operations: Sequence[Any], size: Sides) -> tuple[int, int, int, int]:
    """(top, ±1, left, ±1): where the first pixel comes from, and which way those below and beside it."""
    (top, down), (left, right), (height, width) = (0, 1), (0, 1), size
    for operation in operations:
        if isinstance(operation, Crop):
            by_top, by_left, height, width = operation.box
            top, left = top + down * by_top, left + right * by_left
        elif operation is not None and operation.axis:
            left, right = left + right * (width - 1), -right
        elif operation is not None:
            top, down = top + down * (height - 1), -down
    return top, down, left, right


class ResidentTransform:
    """A transform whose first steps run here once, and the others on a device that holds what these made.

    An object serves one thread at a time, but for `first`.

    Args:
        transform: from `build_transform`.
        name: of the setting, for errors.
        shown: what the setting has, for errors.

    Attributes:
        resamples: a stage interpolates.

    Raises:
        ConfigError: the device has no equivalent of a step.
    """

    def __init__(self, transform: Any, name: str = "transform", shown: str = "") -> None:
        self._sample, self._name, self._shown = SampleTransform(transform), name, shown
        direct = self._direct = self._sample.direct
        if transform is not None and direct is None:
            raise self._refused("is no list of Albumentations steps that raypipe draws for itself")
        if direct and direct.rest:
            raise self._refused(f"has {type(direct.rest[0]).__name__}, which the device has no equivalent of")
        steps = direct.steps[direct.num_fixed :] if direct else []
        self._kinds = [self._kind(step) for step in steps]
        self.resamples = bool({"crop_resize", "warp"} & {*self._kinds})

    def _kind(self, step: Any) -> Kind:
        """The kind of stage that a step is of."""
        if step.p <= 0:  # never: a window of the whole
            return "window"
        name = type(step).__name__
        if name not in _KINDS:
            raise self._refused(f"has {name} behind a step that draws, where the device has no equivalent of it")
        reason = ""
        if step.p < 1 and name in ("RandomCrop", "CenterCrop", "RandomResizedCrop"):
            reason = f"p={step.p:g}, where all images must come to one size"
        elif _KINDS[name] != "window" and step.interpolation != cv2.INTER_LINEAR:
            reason = "another interpolation than the linear one"
        elif name == "RandomResizedCrop" and step.area_for_downscale:
            reason = "area_for_downscale"
        elif name == "Affine" and (step.border_mode != cv2.BORDER_CONSTANT or np.any(step.fill)):
            reason = "something other than black around the image"
        if reason:
            raise self._refused(f"has {name} with {reason}")
        return _KINDS[name]

    def _refused(self, reason: str) -> ConfigError:
        return ConfigError(
            f"pool.cache='device': {self._name}{self._shown and f'={self._shown}'} {reason}. Use one of "
            "none, flip-crop, light, small, center and resize, or steps of their kind (resizes and paddings first,"
            " then crops, flips and Affine), and leave the rest, such as changes of colour, to augment.preset and "
            "augment.ops, which run on the device as well; or set pool.cache='disk'"
        )

    def first(self, image: np.ndarray) -> np.ndarray:
        """What the device holds of an image, uint8 (H, W, 3); raises SampleError where a step does."""
        if self._direct is None:
            return image
        try:
            return self._direct.fixed(image)
        except Exception as error:
            raise failed("the transform", error) from error

    def stages(self, size: Sides) -> list[Stage]:
        """Those of images that are held at this size.

        Raises:
            ConfigError: a step does not go with it.
        """
        try:
            operations = self.drawn(size, (0, 0))
        except Exception as error:
            raise self._refused(f"raised {type(error).__name__}: {error} (of images of {size})") from error
        stages = []
        # Windows in a row are one stage; each step that interpolates is one.
        kinds = [(kind, kind != "window" and number) for number, kind in enumerate(self._kinds)]
        for (kind, _), run in groupby(range(len(kinds)), kinds.__getitem__):
            numbers, to = [*run], size
            steps = slice(numbers[0], numbers[-1] + 1)
            for operation in operations[steps]:
                if isinstance(operation, Crop):
                    to = operation.box[2:]
                elif isinstance(operation, CropResize):
                    to = operation.target
            stages.append(Stage(kind, steps, size, to))
            size = to
        return stages

    def drawn(self, size: Sides, key: Key) -> list[Operation | None]:
        """What the steps after the first ones do to a sample, by its key."""
        return self._sample.drawn(size, key) if self._kinds else []


class ResidentContent:
    """What samples become where a device holds the images: their rows there, and what is to be done to them.

    Instead of a sample's image there is its row, or, of one that cannot be used, ~number of its reason.

    Args:
        transform: of the split.
        size: height and width of the images that the device holds.
        black: the row of an image of zeros.
        reasons: why samples cannot be used.
    """

    draws_globally = False

    def __init__(self, transform: ResidentTransform, size: Sides, black: int, reasons: Sequence[str]) -> None:
        self._transform, self._size, self._black, self._reasons = transform, size, black, reasons
        self.stages = transform.stages(size)
        self._nothing = [stage.placed([None] * (stage.steps.stop)) for stage in self.stages]

    def one(
        self, sample: EncodedSample | Decoded, key: Key, out: np.ndarray | None = None
    ) -> tuple[int, list[Any]]:
        """The row of a sample, and what was drawn for it."""
        row: Any = sample.image  # type: ignore[union-attr]
        if row < 0:
            raise SampleError(self._reasons[~row])
        operations = self._transform.drawn(self._size, key)
        return row, [stage.placed(operations) for stage in self.stages]

    def pack(self, make: Make, num_samples: int, take: Take) -> Arrays:
        """`drawn.row`, int64 (B,), and `drawn.0`, …, the numbers of each stage."""
        made = [make(position, None) or (self._black, self._nothing) for position in range(num_samples)]
        row = np.array([row for row, _ in made], np.int64)
        arrays, rows = {f"{DRAWN}row": row}, row
        for number, stage in enumerate(self.stages):
            arrays[f"{DRAWN}{number}"] = stage.numbers([placed[number] for _, placed in made], rows)
            rows = np.arange(num_samples)
        return arrays


def resident_transforms(
    transforms: Mapping[Split, Any], config: TransformConfig
) -> dict[Split, ResidentTransform]:
    """Those of a stream.

    Raises:
        ConfigError: a setting, or a transform, does not go with images that a device holds.
    """
    if len(config.size_by_epoch) > 1:
        raise ConfigError(
            f"pool.cache='device' holds images of one size, and transform.size has {config.size_text}: choose "
            "one, or set pool.cache='disk'"
        )
    made = {}
    for split, transform in transforms.items():
        name, known = f"transform.{split}", isinstance(transform, str | list)
        if makes_views(transform):
            raise ConfigError(f"pool.cache='device' holds one image of a sample, and {name} makes views of it")
        built = build_transform(transform, config.final_size)
        made[split] = ResidentTransform(built, name, brief(transform) if known else "")
    return made


Gather = Callable[[Split, Mapping[str, Any]], Any]
"""(split, tensors by name of what `ResidentContent` packs) → uint8 images (B, H, W, 3) on their device."""
