"""What samples become for the model: pixels made here, or encoded bytes for `transform.decode="gpu"`.

    Content            one sample                                  the arrays of B samples
    Images             its image, mask and boxes                   image uint8 (B, H, W, 3); of streams that have
                                                                   them, mask uint8 (B, H, W), boxes float32
                                                                   (B, max_boxes, 5), keypoints float32
                                                                   (B, max_keypoints, 3); or, of views, view.NAME
                                                                   uint8 (B, H, W, 3) or (B, n, H, W, 3)
    EncodedTransform   its bytes and what is to be cut from them   an EncodedMicroBatch, see
                                                                   `raypipe.transform.encoded`

With `transform.decode_as: array`, images and views have the dtype and the channels C that the transform gives
them, all alike: (B, H, W, C).

Rows that are left out are black, without a class (IGNORE), and without boxes and keypoints (label NO_BOX).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError, SampleError
from raypipe.transform.batch import Arrays, Make, Take, reused_arrays
from raypipe.transform.decode import decode
from raypipe.transform.decode_array import decode_array
from raypipe.transform.direct import Undecoded, cut
from raypipe.transform.jpeg import open_for_crop
from raypipe.transform.sample_transform import Decoded, EncodedSample, Key, SampleTransform
from raypipe.transform.sizes import Sides
from raypipe.transform.targets import IGNORE, NO_BOX, decode_targets, marked, target_pipeline
from raypipe.transform.user_code import NOT_OF_A_SAMPLE, failed
from raypipe.transform.views import View, ViewsTransform


class Images:
    """Decodes and transforms samples to images of one size, with their masks and boxes, or to views.

    Args:
        transform: from `build_transform`; with targets, for `target_pipeline`.
        config: how they are decoded, which targets there are, and places for boxes in a row.
        probe: samples to learn the size of the results by, should a micro-batch of nothing but padding come
            first; else the first result decides it.
        store_address: named in errors.
        sides: (height, width) that results must have; None = those of the first.
    """

    def __init__(
        self,
        transform: Callable[..., Any] | dict[str, View] | None,
        config: TransformConfig,
        probe: Callable[[], Iterable[EncodedSample]] = tuple,
        store_address: str = "",
        sides: Sides | None = None,
    ) -> None:
        self._targets = config.target_columns
        if self._targets:
            transform = target_pipeline(transform, set(self._targets))
        self._transform: SampleTransform | ViewsTransform
        arrays = self._is_array = config.decode_as == "array"
        make: Any = ViewsTransform if isinstance(transform, dict) else SampleTransform
        self._transform = make(transform, arrays)
        self.draws_globally = self._transform.draws_globally
        self._crop_target = self._transform.crop_target if config.crop_decode != "off" else None
        self._config, self._probe, self._store_address = config, probe, store_address
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, np.dtype[Any]] = {}
        self._sides = sides

    def one(self, sample: EncodedSample | Decoded, key: Key, out: np.ndarray | None = None) -> Arrays:
        """Decode and transform one sample; its image may be put into `out`, uint8 (H, W, 3), or as arrays are.

        Returns:
            `image`, uint8 (H, W, 3); of streams that have them, `mask`, uint8 (H, W), `boxes`, float32 (K, 5), and
            `keypoints`, float32 (K, 3). Or views.

        Raises:
            SampleError: any part of it cannot be decoded or does not fit its image.
            TransformError: the transform failed on it.
            ConfigError: what the transform made is of another kind or size than it must be, or more boxes than
                there is room for.
        """
        image = self._opened(sample)
        targets: dict[str, np.ndarray] = {}
        if self._targets:
            size = image.shape[:2] if isinstance(image, np.ndarray) else image[0]
            targets = decode_targets(sample._asdict(), self._targets, size)
            if "boxes" in targets:
                targets["bboxes"] = targets.pop("boxes")  # Albumentations' name
        try:
            made = self._transform.with_targets(image, targets, key, out)
        except NOT_OF_A_SAMPLE:
            raise
        except Exception as error:
            raise failed("the transform", error) from error
        result = {"image": made["image"]} if "image" in made else made
        shapes = {name: part.shape for name, part in result.items()}
        if self._sides and shapes.get("image", ())[:2] != self._sides:
            raise ConfigError(
                f"the transform made an image of {shapes.get('image', ())[:2]}, and by transform.size"
                f" it must be {self._sides}, (height, width): end it with a crop or resize to the size that a"
                " module:function is called with"
            )
        dtypes = {name: part.dtype for name, part in result.items()}
        if not self._shapes:
            self._shapes, self._dtypes = shapes, dtypes
        if self._is_array and (shapes, dtypes) != (self._shapes, self._dtypes):
            expected = _arrays_of(self._shapes, self._dtypes)
            raise ConfigError(
                f"the transform made {_arrays_of(shapes, dtypes)}, where {expected} is "
                "expected as for the others: samples must have one dtype and as many channels, and the transform "
                "end with a crop or resize to a fixed size"
            )
        if shapes != self._shapes:
            raise ConfigError(
                f"the transform made {_sizes(shapes)} (height x width), where {_sizes(self._shapes)} is expected"
                " as for the others: end the transform with a crop or resize to a fixed size"
            )
        if "mask" in targets:
            height, width = shapes["image"][:2]
            mask = result["mask"] = made["mask"]
            if mask.dtype != np.uint8 or mask.shape != (height, width):
                raise ConfigError(
                    f"the transform made a mask of {mask.dtype} {mask.shape} for an image of {(height, width, 3)}:"
                    " expected is uint8 of the image's height and width"
                )
        if "bboxes" in targets:
            # By what is stored and not by what is seen of it, so that no epoch finds out later than another.
            num_boxes = max(len(made["bboxes"]), len(targets["bboxes"]))
            if num_boxes > self._config.max_boxes:
                raise ConfigError(
                    f"it has {num_boxes} boxes, and transform.max_boxes is {self._config.max_boxes}: raise it, or "
                    "leave the sample out"
                )
            result["boxes"] = np.asarray(made["bboxes"], np.float32).reshape(-1, 5)
        if "keypoints" in targets:
            num_keypoints = len(targets["keypoints"])
            if num_keypoints > self._config.max_keypoints:
                raise ConfigError(
                    f"it has {num_keypoints} keypoints, and transform.max_keypoints is "
                    f"{self._config.max_keypoints}: raise it, or leave the sample out"
                )
            result["keypoints"] = marked(made["keypoints"], shapes["image"])
            if len(result["keypoints"]) != num_keypoints:
                raise ConfigError(
                    f"the transform left {len(result['keypoints'])} of {num_keypoints} keypoints: it must keep all"
                )
        return result

    def _opened(self, sample: EncodedSample | Decoded) -> np.ndarray | Undecoded:
        """An image: decoded, or not yet where the transform begins with a random resized crop."""
        if isinstance(sample, Decoded):
            pixels = sample.pixels  # which may be read-only
            if self._crop_target:
                return pixels.shape[:2], lambda box: cut(pixels, box).copy()
            return pixels if pixels.flags.writeable else pixels.copy()
        if self._is_array:
            return decode_array(sample.image)
        jpeg = open_for_crop(sample.image, self._config, self._crop_target) if self._crop_target else None
        return jpeg or decode(sample.image, min_side=self._config.decode_min_side, exif=self._config.apply_exif)

    def pack(self, make: Make, num_samples: int, take: Take) -> Arrays:
        """The arrays of a micro-batch."""
        make_arrays = partial(self._arrays, num_samples)
        arrays = take(make_arrays) if self._shapes else {}
        missing = []
        for position in range(num_samples):
            out = arrays["image"][position] if "image" in arrays else None
            sample: Arrays | None = make(position, out)
            if sample is None:
                missing.append(position)
                continue
            arrays = arrays or take(make_arrays)
            for name, part in sample.items():
                if part is not out:
                    arrays[name][position, : len(part)] = part
        arrays = arrays or take(make_arrays)
        for name in self._shapes:
            arrays[name][missing] = 0
        return arrays

    def _arrays(self, num_samples: int, count: int) -> Arrays:
        """Room for so many samples of so many micro-batches, without mask and boxes."""
        for sample in () if self._shapes else self._probe():
            with contextlib.suppress(SampleError):
                self.one(sample, (0, 0))
                break
        if not self._shapes:
            raise ConfigError(
                f"{self._store_address or 'the store'} has no readable sample among its first: "
                "the size of its images cannot be told"
            )
        shape = (count, num_samples)
        arrays = reused_arrays({name: (*shape, *each) for name, each in self._shapes.items()}, self._dtypes)
        if "mask" in self._targets:
            arrays["mask"] = np.full(arrays["image"].shape[:-1], IGNORE, np.uint8)
        if "boxes" in self._targets:
            arrays["boxes"] = np.zeros((*shape, self._config.max_boxes, 5), np.float32)
            arrays["boxes"][..., 4] = NO_BOX
        if "keypoints" in self._targets:
            arrays["keypoints"] = np.zeros((*shape, self._config.max_keypoints, 3), np.float32)
            arrays["keypoints"][..., 2] = NO_BOX
        return arrays


def _sizes(shapes: dict[str, tuple[int, ...]]) -> str:
    """What was made, for an error."""
    sides = {name: "x".join(map(str, shape[:-1])) for name, shape in shapes.items()}
    return f"an image of {sides['image']}" if "image" in sides else f"views of {sides}"


def _arrays_of(shapes: dict[str, tuple[int, ...]], dtypes: dict[str, np.dtype[Any]]) -> str:
    """The same with channels and dtypes."""
    return ", ".join(f"{name} {dtypes[name]} {shape}" for name, shape in shapes.items())
