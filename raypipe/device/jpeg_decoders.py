"""What decodes JPEGs on the training device: the first of LIBRARIES that does so there.

    torchcodec    0.16 or later, `torchcodec.decoders.decode_jpeg`; on CUDA by nvJPEG
    torchvision   `torchvision.io.decode_jpeg`, which is deprecated since 0.29; on CUDA by nvJPEG

Another one comes in as a function that gives a `BatchFunction`. On a CPU device both decode by libjpeg-turbo.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from raypipe.errors import ConfigError
from raypipe.lookup import to_install
from raypipe.transform.decode import encode_jpeg
from raypipe.transform.nvjpeg import without_exif

BatchFunction = Callable[[list[torch.Tensor], torch.device], list[torch.Tensor]]
"""Encoded JPEGs, each uint8 (n,) on the host, and a device → their pixels there, each uint8 RGB (3, H, W), as they
are stored and not turned upright. RuntimeError if one of them cannot be decoded."""


class JpegDecoder(Protocol):
    """Decodes JPEGs on a device, each by itself as far as errors go.

    Attributes:
        name: of the library, with its version.
    """

    name: str

    def __call__(self, encoded: list[torch.Tensor], device: torch.device) -> list[torch.Tensor | str]:
        """Pixels, uint8 RGB (3, H, W) on the device, of each JPEG, uint8 (n,) on the host; or why it is refused.

        It returns when they are decoded. What it writes to may not be in use by what the device has still to do.

        Raises:
            RuntimeError: the device itself fails (out of memory, a lost context); never for what an image holds.
        """
        ...


class BatchDecoder:
    """A library's function, which fails as a whole for one bad image: then it is called for each half."""

    def __init__(self, name: str, decode: BatchFunction) -> None:
        self.name, self._decode = name, decode

    def __call__(self, encoded: list[torch.Tensor], device: torch.device) -> list[torch.Tensor | str]:
        """As of `JpegDecoder`. A bad one of n images costs 2 log2(n) more calls; the others are decoded again."""
        try:
            return [*self._decode(encoded, device)]
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # the device's own; both are RuntimeErrors
            raise
        except RuntimeError as error:  # names no culprit, and gives nothing back of the others
            reason = str(error)
        # What the call has begun may still write to memory that it has given back.
        torch.get_device_module(device).synchronize(device)
        if len(encoded) == 1:
            return [reason]
        half = len(encoded) // 2
        return [*self(encoded[:half], device), *self(encoded[half:], device)]


def by_torchcodec() -> BatchFunction:
    """Raises ImportError where torchcodec is missing, or has no decoder of images."""
    decode_jpeg: Any = importlib.import_module("torchcodec.decoders").decode_jpeg

    def decode(encoded: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        found = [without_exif(one.numpy().data) for one in encoded]
        stored = [
            one if copy is None else torch.frombuffer(copy, dtype=torch.uint8)
            for one, copy in zip(encoded, found, strict=True)
        ]
        return decode_jpeg(stored, mode="RGB", device=device)

    return decode


def by_torchvision() -> BatchFunction:
    """Raises ImportError where torchvision is missing, or has no decoder of images."""
    io: Any = importlib.import_module("torchvision.io")  # it takes seconds

    def decode(encoded: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        return io.decode_jpeg(encoded, mode=io.ImageReadMode.RGB, device=device)

    return decode


LIBRARIES: dict[str, Callable[[], BatchFunction]] = {"torchcodec": by_torchcodec, "torchvision": by_torchvision}
"""By the names of their packages, the preferred one first."""


def find_decoder(device: torch.device) -> JpegDecoder:
    """The first library that decodes a JPEG on the device, which is tried once, under the current stream.

    Raises:
        ConfigError: none does; with the reason of each.
        RuntimeError: the device itself fails.
    """
    probe = torch.frombuffer(bytearray(encode_jpeg(np.zeros((16, 16, 3), np.uint8))), dtype=torch.uint8)
    reasons = []
    for package, found in LIBRARIES.items():
        try:
            decoder = BatchDecoder(f"{package} {importlib.metadata.version(package)}", found())
        except (ImportError, AttributeError, OSError) as error:  # missing; too old; built for another torch
            reasons.append(f"{package}: {error}")
            continue
        (pixels,) = decoder([probe], device)
        if isinstance(pixels, torch.Tensor):
            return decoder
        reasons.append(f"{decoder.name}: {pixels}")
    raise ConfigError(
        f"nothing here decodes JPEGs on {device} ({'; '.join(reasons)}): set transform.decode='cpu', or install a "
        f"torchcodec that fits this torch ({to_install('torchcodec')})"
    )
