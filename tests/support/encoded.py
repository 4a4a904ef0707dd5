"""Micro-batches of encoded images, as `transform.decode: device` has them, and photos to encode."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
import torch
from micro_batches import run, samples_of, transform_of
from PIL import Image

from raypipe.config import TransformConfig
from raypipe.device.decoders import BoxDecoder, Decoded, DeviceDecoder
from raypipe.device.ring import hand_over
from raypipe.errors import SampleError
from raypipe.transform.decode.rgb import decode
from raypipe.transform.encoded_map import DATA, MAP, CropBox
from raypipe.transform.fields import MicroBatch, Ragged


def smooth(seed: int, height: int = 240, width: int = 320) -> np.ndarray:
    """An image whose color changes by a few levels per pixel, for which lawful decoders differ little."""
    return cv2.resize(
        np.random.default_rng(seed).integers(0, 256, (5, 6, 3), np.uint8),
        (width, height),
    )


def saved(
    seed: int,
    format: str = "JPEG",
    mode: str = "RGB",
    *,
    sides: Sequence[int] = (),
    **options: Any,
) -> bytes:
    """A smooth image in a file's format."""
    file = io.BytesIO()
    Image.fromarray(smooth(seed, *sides)).convert(mode).save(file, format, **options)
    return file.getvalue()


def keys_of(num: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2**64, (num, 2), np.uint64)


def encoded(
    images: Sequence[bytes | None],
    transform: Any = "light",
    padding: int = 0,
    **settings: Any,
) -> MicroBatch:
    """The micro-batch that an actor makes; settings are those of the transform."""
    config = TransformConfig(**{"size": 96, "decode": "device", **settings})
    return run(
        transform_of(transform, config),
        samples_of(images),
        keys_of(len(images) + padding),
        padding=padding,
    )[0]


def by_libjpeg(device: torch.device) -> BoxDecoder:
    """A library of a pretended device: fails as a whole for a damaged JPEG, as torchvision does."""

    def decode_boxes(
        images: list[torch.Tensor], boxes: list[CropBox]
    ) -> list[torch.Tensor | None]:
        try:
            whole = [decode(image.numpy().data) for image in images]
        except SampleError as error:
            raise RuntimeError(str(error)) from error
        parts = [
            image[box[0] : box[2], box[1] : box[3]]
            for image, box in zip(whole, boxes, strict=True)
        ]
        return [
            torch.from_numpy(part.copy()).permute(2, 0, 1).to(device) for part in parts
        ]

    return decode_boxes


def decoded(batch: MicroBatch, device: Any = "cpu", exif: bool = False) -> Decoded:
    """The same on a device."""
    data = batch.fields[DATA]
    assert isinstance(data, Ragged)
    made = DeviceDecoder(device, exif)(data, batch[MAP], batch.weight > 0)
    hand_over(made.ready, [made.image], made.image.device)
    return made
