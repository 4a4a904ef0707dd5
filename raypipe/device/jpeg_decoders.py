"""JPEGs that the training device decodes, and the library that does it: the first of LIBRARIES that works.

    image                                                    decoded by
    JPEG as nvJPEG documents it: Huffman coded, baseline     the GPU
    or progressive, 8 bit, YCbCr or grey, with an end
    any other JPEG: CMYK, RGB, 12 bit, lossless,             the CPU
    arithmetic, rare subsampling, cut short
    a JPEG that `transform.apply_exif` has to turn           the CPU
    PNG, WebP, TIFF, …                                       the CPU

That depends only on the bytes, not on the library; `without_exif` removes the libraries' differences.

    torchcodec    0.16 or later, `torchcodec.decoders.decode_jpeg`; on CUDA by nvJPEG
    torchvision   `torchvision.io.decode_jpeg`, which is deprecated since 0.29; on CUDA by nvJPEG

Add another as a function that returns a `BatchFunction`. On a CPU device both use libjpeg-turbo.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from raypipe.errors import ConfigError
from raypipe.lookup import to_install
from raypipe.transform.decode import encode_jpeg
from raypipe.transform.jpeg import jpeg_orientation
from raypipe.transform.limits import MAX_PIXELS

# Luma sampling (horizontal, vertical) over chroma's 1, 1: 4:4:4, 4:2:2, 4:2:0, 4:4:0, 4:1:1 and 4:1:0, the list in
# nvJPEG's introduction. torchvision raises for the others.
_SUBSAMPLINGS = {0x11, 0x21, 0x22, 0x12, 0x41, 0x42}
_APP0, _APP1, _APP14, _EOI, _SOS = 0xE0, 0xE1, 0xEE, 0xD9, 0xDA
_EXIF = b"Exif\0\0"

BatchFunction = Callable[[list[torch.Tensor], torch.device], list[torch.Tensor]]
"""Encoded JPEGs, each uint8 (n,) on the host, and a device → their pixels there, each uint8 RGB (3, H, W), as they
are stored and not turned upright. RuntimeError if one of them cannot be decoded."""


def nvjpeg_pixels(data: memoryview | bytes, *, exif: bool = False) -> int | None:
    """Return the pixels that a JPEG declares if nvJPEG is known to decode its kind correctly, else None.

    https://docs.nvidia.com/cuda/nvjpeg: Huffman coded baseline and progressive, 8 bit, 1 or 3 components.
    libjpeg also gets JPEGs without an end marker, to see if they are cut short, and those that hold RGB by
    Adobe's marker or their components' names.

    Args:
        exif: turn images upright, which the CPU does.
    """
    if len(data) < 4 or data[:3] != b"\xff\xd8\xff" or data[-2:] != b"\xff\xd9":
        return None
    if exif and jpeg_orientation(bytes(data)) != 1:
        return None
    adobe, jfif = None, False
    for marker, at, end in _segments(data):
        body = data[at:end]
        if marker in (0xC0, 0xC2):
            return _frame_pixels(body, adobe, jfif)
        if (0xC1 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)) or marker in (_EOI, _SOS):
            return None  # another coding, or data without a frame
        if marker == _APP0 and body[:4] == b"JFIF":
            jfif = True
        if marker == _APP14 and body[:5] == b"Adobe" and len(body) >= 12:
            adobe = body[11]
    return None


def _segments(data: memoryview | bytes) -> Iterator[tuple[int, int, int]]:
    """Yield each segment from the second marker on: its marker, and where its body begins and ends in the data."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        end = min(at + 2 + int.from_bytes(data[at + 2 : at + 4], "big"), len(data))
        yield marker, at + 4, end
        at = max(end, at + 4)


def _frame_pixels(frame: memoryview | bytes, adobe: int | None, jfif: bool) -> int | None:
    """Like `nvjpeg_pixels`, for a frame header: precision, height, width, and 3 bytes per component."""
    if len(frame) < 6 or frame[0] != 8 or frame[5] not in (1, 3) or len(frame) != 6 + 3 * frame[5]:
        return None
    samplings = [frame[at] for at in range(7, len(frame), 3)]
    names = [frame[at] for at in range(6, len(frame), 3)]
    if frame[5] == 1:
        known = samplings == [0x11]
    else:
        rgb = adobe == 0 or (adobe is None and not jfif and names == [*b"RGB"])
        known = not rgb and samplings[0] in _SUBSAMPLINGS and samplings[1:] == [0x11, 0x11]
    num_pixels = int.from_bytes(frame[1:3], "big") * int.from_bytes(frame[3:5], "big")
    return num_pixels if known and 0 < num_pixels <= MAX_PIXELS else None


def without_exif(data: memoryview | bytes) -> bytearray | None:
    """A copy of a JPEG whose EXIF is blank; None: it has none.

    torchcodec turns every image upright, and cannot be told otherwise.
    """
    bodies = []
    for marker, at, end in _segments(data):
        if marker in (_EOI, _SOS):
            break
        if marker == _APP1 and data[at : min(end, at + len(_EXIF))] == _EXIF:
            bodies.append((at, end))
    if not bodies:
        return None
    copy = bytearray(data)
    for at, end in bodies:  # all of it: torchcodec's decoder for CPUs does not ask whether it begins with "Exif"
        copy[at:end] = bytes(end - at)
    return copy


class BatchDecoder:
    """A library's function, which fails as a whole for one bad image: then it is called for each half.

    Attributes:
        name: name and version of the library.
    """

    def __init__(self, name: str, decode: BatchFunction) -> None:
        self.name, self._decode = name, decode

    def __call__(self, encoded: list[torch.Tensor], device: torch.device) -> list[torch.Tensor | str]:
        """Decode each JPEG, uint8 (n,) on the host, to uint8 RGB (3, H, W) on the device, or to a reason.

        It returns when they are decoded. No pending work of the device may use the memory that it writes to. A
        bad image among n costs 2 log2(n) more calls; the others are decoded again.

        Raises:
            RuntimeError: the device itself fails (out of memory, a lost context); never for an image's content.
        """
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
        copies = [without_exif(one.numpy().data) for one in encoded]
        stored = [
            one if copy is None else torch.frombuffer(copy, dtype=torch.uint8)
            for one, copy in zip(encoded, copies, strict=True)
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


def find_decoder(device: torch.device) -> BatchDecoder:
    """The first library that decodes a JPEG on the device, which is tried once, under the current stream.

    Raises:
        ConfigError: none does; with the reason of each.
        RuntimeError: the device itself fails.
    """
    probe = torch.frombuffer(bytearray(encode_jpeg(np.zeros((16, 16, 3), np.uint8))), dtype=torch.uint8)
    reasons = []
    for package, load in LIBRARIES.items():
        try:
            decoder = BatchDecoder(f"{package} {importlib.metadata.version(package)}", load())
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
