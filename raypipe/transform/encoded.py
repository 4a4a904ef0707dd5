"""Encoded samples and what is to be cut from each, packed into one row: the host half of `transform.decode="gpu"`.

    EncodedTransform   encoded bytes and a key → a box in the image and whether it is flipped
    pack               B (bytes, box, flip) → EncodedMicroBatch, for `raypipe.device.device_decode.DeviceDecoder`

Of an image only the header is read here, so that nearly all of its cost is left to the GPU. The boxes:

    preset    box                                                        flip
    light     RandomResizedCrop: area 8 to 100 %, sides 3:4 to 4:3       half of them
    center    what the CPU preset's resize and centre crop would show    never
    resize    the whole image                                            never

Boxes are whole pixels, so "center" shows the CPU preset's view to half a pixel of the source at each edge.
"light" draws by the same rule as the CPU preset but from another generator (this one's stream is numpy's and does
not hang on the order in which Albumentations draws): the same key gives another crop there.

Knows neither Ray nor torch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np

from raypipe.errors import ConfigError, SampleError
from raypipe.transform.crop_first import Box
from raypipe.transform.decode import decode, jpeg_orientation
from raypipe.transform.image_header import image_kind, jpeg_size, open_pillow, plain_size
from raypipe.transform.sample_transform import Key

EncodedSample = tuple[bytes, Box, bool]
"""(encoded image, box, whether the cut is mirrored left to right)."""

PRESETS = ("light", "center", "resize")
_SCALE = (0.08, 1.0)  # of the image's area; Szegedy et al. 2014, as torchvision and Albumentations have it
_RATIO = (3 / 4, 4 / 3)  # width to height, likewise
_LOG_RATIO = (math.log(_RATIO[0]), math.log(_RATIO[1]))
_NUM_DRAWS = 10  # likewise


class EncodedMicroBatch(TypedDict):
    """B encoded samples, in the arrays of one row.

    Attributes:
        data: uint8 (n,), the bytes of all samples end to end.
        offsets: int64 (B + 1,); sample b is data[offsets[b] : offsets[b + 1]], nothing for padding.
        crop: int32 (B, 4), the boxes; 0 for padding.
        flip: bool (B,).
        ok: bool (B,); False for padding and for bad samples.
    """

    data: np.ndarray
    offsets: np.ndarray
    crop: np.ndarray
    flip: np.ndarray
    ok: np.ndarray


class EncodedTransform:
    """What a preset cuts from encoded images, as a pure function of the bytes and the key.

    It rewinds one generator for every sample, as `SampleTransform` does and for the same reason, so an object
    serves one thread at a time. It pickles as its settings.

    Args:
        preset: "light", "center" or "resize".
        size: side of the images that the decoder makes, pixels; "center" needs it for its proportion.
        exif: boxes are of the image turned upright; the `DeviceDecoder` is to be told the same.

    Raises:
        ConfigError: another preset, or size < 1.
    """

    def __init__(self, preset: str, size: int, exif: bool = False) -> None:
        if preset not in PRESETS:
            raise ConfigError(
                f"the transform {preset!r} needs pixels; transform.decode='gpu' can do"
                f" {', '.join(PRESETS)}: choose one of them, or decode='cpu'"
            )
        if size < 1:
            raise ConfigError(f"transform.size is {size}; it is at least 1 pixel")
        self.preset, self.size, self.exif = preset, size, exif
        self._philox = np.random.Philox(0)
        self._philox_state: Any = self._philox.state  # of a fresh generator: counter 0, buffer used up
        self._generator = np.random.Generator(self._philox)

    def __getstate__(self) -> Any:
        return self.preset, self.size, self.exif

    def __setstate__(self, state: Any) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def describe(self, data: bytes | bytearray | memoryview | None, key: Key) -> tuple[Box, bool]:
        """What to cut from one encoded image.

        Args:
            data: the encoded image; None is a missing value.
            key: decides everything random: the draws are those of a fresh `Generator(Philox(key=key))`.

        Returns:
            The box and whether it is flipped.

        Raises:
            SampleError: as `decode.decode` does, for no image, a header that cannot be read, a JPEG that
                is cut short, or what is over a limit of `image_header`. Damage further in is found by
                nobody before the device.
        """
        height, width = image_size(data, exif=self.exif)
        state_key = self._philox_state["state"]["key"]
        state_key[0], state_key[1] = int(key[0]), int(key[1])
        self._philox.state = self._philox_state
        if self.preset == "light":
            return random_resized_crop(height, width, self._generator), bool(self._generator.random() < 0.5)
        return center_box(height, width, self.size) if self.preset == "center" else (0, 0, height, width), False

    def run(
        self, images: Sequence[bytes | None], keys: np.ndarray
    ) -> tuple[EncodedMicroBatch, dict[int, SampleError]]:
        """Describe and pack B samples; what is done about bad ones is the caller's policy.

        Args:
            images: B encoded images; None for padding.
            keys: uint64 (B, 2).

        Returns:
            The micro-batch, where bad samples and padding are not ok, and the bad samples' errors by position.
        """
        samples: list[EncodedSample | None] = []
        errors: dict[int, SampleError] = {}
        for position, (data, key) in enumerate(zip(images, keys.tolist(), strict=True)):
            samples.append(None)
            if data is None:
                continue
            try:
                samples[position] = (data, *self.describe(data, key))
            except SampleError as error:
                errors[position] = error
        return pack(samples), errors


def pack(samples: Sequence[EncodedSample | None]) -> EncodedMicroBatch:
    """Lay B samples end to end; None is padding, or a bad sample that is left out."""
    lengths = [0 if sample is None else len(sample[0]) for sample in samples]
    offsets = np.zeros(len(samples) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    present = [sample for sample in samples if sample is not None]
    crop = np.zeros((len(samples), 4), np.int32)
    flip = np.zeros(len(samples), bool)
    ok = np.array([sample is not None for sample in samples], bool)
    if present:
        crop[ok] = [box for _, box, _ in present]
        flip[ok] = [flipped for _, _, flipped in present]
    data = np.frombuffer(b"".join(data for data, _, _ in present), np.uint8)
    return EncodedMicroBatch(data=data, offsets=offsets, crop=crop, flip=flip, ok=ok)


def image_size(data: bytes | bytearray | memoryview | None, *, exif: bool = False) -> tuple[int, int]:
    """(height, width) that `raypipe.transform.decode.decode` would give, from the header.

    The few JPEGs that do not end with their end marker are decoded once, since that alone tells those cut short,
    for which a substitute can be read at this place only, from those with something behind the end.

    Raises:
        SampleError: see `EncodedTransform.describe`.
    """
    encoded = bytes(data) if isinstance(data, bytearray | memoryview) else data
    kind = image_kind(encoded) if isinstance(encoded, bytes) else None
    if kind is None or encoded is None:
        return _decoded_size(data, exif)  # which says what the value is instead of an image
    if kind == "JPEG":
        if not encoded.endswith(b"\xff\xd9"):
            return _decoded_size(encoded, exif)
        size = jpeg_size(encoded)
        if size is None:  # a rare kind of subsampling, which Pillow reads, or damage, which it does not
            return _decoded_size(encoded, exif)
        height, width = size
        if exif and b"Exif\0\0" in encoded and jpeg_orientation(encoded) >= 5:  # 5 to 8 lie on their side
            return width, height
        return height, width
    if exif and kind in ("PNG", "WebP"):  # their orientation may stand behind the pixels
        return _decoded_size(encoded, exif)
    size = plain_size(encoded, kind)
    if size is not None:
        return size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd metadata
        try:
            image = open_pillow(encoded, kind)
        except SampleError:
            raise
        except Exception as error:  # Pillow's plugins raise a dozen types on bad bytes
            reason = f"damaged {kind}: {type(error).__name__}: {error} ({len(encoded)} bytes)"
            raise SampleError(reason) from error
    return image.height, image.width


def _decoded_size(data: bytes | bytearray | memoryview | None, exif: bool) -> tuple[int, int]:
    height, width, _ = decode(data, exif=exif).shape
    return height, width


def random_resized_crop(height: int, width: int, rng: np.random.Generator) -> Box:
    """The box of Inception's random crop, by torchvision's `RandomResizedCrop.get_params`.

    Ten times an area and a ratio of the sides are drawn, the ratio evenly in its logarithm, until such a box fits
    into the image; failing that it is the largest centred box within the ratios.
    """
    for _ in range(_NUM_DRAWS):
        area = height * width * rng.uniform(*_SCALE)
        ratio = math.exp(rng.uniform(*_LOG_RATIO))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w
    w = min(width, round(height * _RATIO[1]))
    h = min(height, round(width / _RATIO[0]))
    return (height - h) // 2, (width - w) // 2, h, w


def center_box(height: int, width: int, size: int) -> Box:
    """The source pixels behind preset "center": SmallestMaxSize(size × 256/224), CenterCrop(size)."""
    scale = round(size * 256 / 224) / min(height, width)
    (top, h), (left, w) = (_center_span(side, round(side * scale), size) for side in (height, width))
    return top, left, h, w


def _center_span(side: int, resized: int, size: int) -> tuple[int, int]:
    """(start, length) in `side` source pixels of the centred `size` of `resized` pixels."""
    start = (resized - size) // 2  # CenterCrop's rounding
    first, end = round(start * side / resized), round((start + size) * side / resized)
    first = min(first, side - 1)  # of an image of few pixels the rounded box may be empty
    return first, max(1, end - first)
