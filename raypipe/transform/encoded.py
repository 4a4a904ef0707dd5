"""Encoded images for the training device to decode, and the boxes to cut: `transform.decode="gpu"`.

For the device, only the header of an image is read, so the GPU has nearly all of the work. A sample is
bad when its header cannot be read, a JPEG is cut short, or the checksum of a seekable one is wrong; other damage
shows on the device. The boxes:

    preset    box                                                        flip
    light     RandomResizedCrop: area 8 to 100 %, sides 3:4 to 4:3       half of them
    center    the view of the CPU preset's resize and center crop        never
    resize    the whole image                                            never

Boxes are whole pixels, so "center" shows the CPU preset's view to half a pixel of the source at each edge.
"light" draws by the same rule as the CPU preset but from another generator (numpy's stream, independent of the
order of Albumentations' draws): the same key gives a different crop there.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError
from raypipe.transform.decode import image_size
from raypipe.transform.draws import Key, KeyedGenerator
from raypipe.transform.fields import Field, MadeAtOnce
from raypipe.transform.samples import Decoded, EncodedSample, Samples
from raypipe.transform.seekable import check_checksum
from raypipe.transform.sizes import Box, Size, sides_of

DATA, CROP, FLIP = "encoded.data", "encoded.crop", "encoded.flip"
ENCODED_FIELDS = {
    DATA: Field("bytes"),
    CROP: Field("array", "int32", (4,)),
    FLIP: Field("array", "bool", ()),
}
"""The encoded image; the box (top, left, height, width) that is cut from it, pixels; whether it is mirrored."""

PRESETS = ("light", "center", "resize")
_SCALE = (0.08, 1.0)  # share of the image's area; Szegedy et al. 2014, as in torchvision and Albumentations
_RATIO = (3 / 4, 4 / 3)  # width to height, as above
_LOG_RATIO = (math.log(_RATIO[0]), math.log(_RATIO[1]))
_NUM_DRAWS = 10  # as above


class EncodedTransform:
    """Cuts of a preset from encoded images: a pure function of the bytes and the key.

    An object serves one thread at a time.

    Args:
        transform: one of PRESETS.
        config: with `exif`, boxes refer to the upright image; set it in the decoder too.
        size: size of the decoder's images, whose proportions the presets need; None = the config's.
        fields: the stream's fields; None = only these.

    Raises:
        ConfigError: it cannot be done on the device.
    """

    def __init__(
        self,
        transform: Any,
        config: TransformConfig,
        size: Size | None = None,
        fields: dict[str, Field] | None = None,
    ) -> None:
        if config.decode_min_side:
            raise ConfigError(
                "transform.decode_min_side belongs to the CPU's decoder: leave it out with decode='gpu'"
            )
        if not isinstance(transform, str) or transform not in PRESETS:
            what = f"preset {transform!r}" if isinstance(transform, str) else "pipeline of steps, or callable,"
            raise ConfigError(
                f"the {what} needs pixels; transform.decode='gpu' knows the presets {', '.join(PRESETS)} only: "
                "choose one of them, or decode='cpu'"
            )
        self.fields, self.draws_globally = fields or dict(ENCODED_FIELDS), False
        self.makes_images_alone = False
        self._preset, self._size, self._exif = transform, sides_of(size or config.final_size), config.apply_exif
        self._keyed = KeyedGenerator()

    def at_once(self, samples: Samples, *_: Any) -> MadeAtOnce:
        """Nothing: the device makes the images."""
        return MadeAtOnce.nothing(len(samples))

    def following(self, *_: Any) -> dict[str, Any]:
        """Return no targets: there are no images yet that they could follow."""
        return {}

    def one(self, sample: EncodedSample | Decoded, key: Key, out: np.ndarray | None = None) -> dict[str, Any]:
        """The encoded fields of one image; raises SampleError as `image_size` and `check_checksum` do."""
        assert isinstance(sample, EncodedSample)
        check_checksum(sample.image or b"")
        height, width = image_size(sample.image, exif=self._exif)
        box: Box = (0, 0, height, width)
        flip = False
        if self._preset == "light":
            generator = self._keyed.rewind(key)
            box = random_resized_crop(height, width, generator, self._size[1] / self._size[0])
            flip = bool(generator.random() < 0.5)
        elif self._preset == "center":
            box = center_box(height, width, self._size)
        return {DATA: sample.image, CROP: box, FLIP: flip}


def random_resized_crop(height: int, width: int, rng: np.random.Generator, aspect: float = 1.0) -> Box:
    """The box of Inception's random crop, by torchvision's `RandomResizedCrop.get_params`.

    Ten times an area and a ratio of the sides are drawn, the ratio evenly in its logarithm, until such a box fits
    into the image; failing that it is the largest centred box within the ratios.

    Args:
        aspect: width to height, about which the ratios of the boxes are.
    """
    for _ in range(_NUM_DRAWS):
        area = height * width * rng.uniform(*_SCALE)
        ratio = math.exp(rng.uniform(*_LOG_RATIO)) * aspect
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w
    w = min(width, round(height * _RATIO[1] * aspect))
    h = min(height, round(width / (_RATIO[0] * aspect)))
    return (height - h) // 2, (width - w) // 2, h, w


def center_box(height: int, width: int, size: Size) -> Box:
    """The source pixels behind preset "center": SmallestMaxSize(size × 256/224), CenterCrop(size)."""
    both = list(zip((height, width), sides_of(size), strict=True))
    scale = max(round(target * 256 / 224) / side for side, target in both)
    (top, h), (left, w) = (_center_span(side, round(side * scale), target) for side, target in both)
    return top, left, h, w


def _center_span(side: int, resized: int, size: int) -> tuple[int, int]:
    """(start, length) in `side` source pixels of the centred `size` of `resized` pixels."""
    start = (resized - size) // 2  # CenterCrop's rounding
    first, end = round(start * side / resized), round((start + size) * side / resized)
    first = min(first, side - 1)  # the rounded box of a tiny image may be empty
    return first, max(1, end - first)
