"""Encoded micro-batches → uint8 (B, 3, S, S) on the training device. Knows torch and torchvision, not Ray.

    sample                                      decoded by
    JPEG as nvJPEG documents it: baseline or    nvJPEG through torchvision, many to a call
    progressive, 8 bit, YCbCr or grey, whole
    any other JPEG (CMYK, RGB, 12 bit, ...),    raypipe.transform.decode on the host; the cut alone moves over
    PNG, WebP and what nvJPEG refuses           (`num_fallback`)

Then each is cut, resized with antialiasing and flipped on the device. On a CPU device torchvision's libjpeg
stands in for nvJPEG; all else is the same.

The pixels are not those of `transform.decode="cpu"`, nor the same on every kind of GPU: nvJPEG as torchvision
sets it up repeats chroma samples where libjpeg interpolates, its IDCT rounds otherwise, some GPUs decode baseline
JPEGs in hardware, and the CPU presets resize without antialiasing. Damage within a JPEG that has its end marker
may come out as garbage: nvJPEG does not report all that libjpeg warns of.

Work for the device: two launches per sample (to float, resize), about eight per micro-batch. Fewer would need a
kernel of our own, or boxes padded to one size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from raypipe.device.ring import hand_over, new_event, new_stream, numbered, view
from raypipe.errors import ConfigError, SampleError
from raypipe.transform.decode import decode, encode_jpeg
from raypipe.transform.image_header import MAX_PIXELS
from raypipe.transform.jpeg import jpeg_orientation
from raypipe.transform.sizes import Size, sides_of

CHUNK_PIXELS = 128 << 20
"""Decoded pixels per call of nvJPEG, at most, unless one image alone has more: 384 MiB of RGB on the device, which
is over 600 images of ImageNet's average 0.2 MP."""

# Luma sampling (horizontal, vertical) over chroma's 1, 1: 4:4:4, 4:2:2, 4:2:0, 4:4:0, 4:1:1 and 4:1:0, the list in
# nvJPEG's introduction. torchvision raises for the others.
_SUBSAMPLINGS = {0x11, 0x21, 0x22, 0x12, 0x41, 0x42}


@dataclass(frozen=True)
class DecodedMicroBatch:
    """One micro-batch on the device.

    Attributes:
        image: uint8 (B, 3, S, S), channels_last; 0 where a sample is padding or failed. On CUDA the stream that
            was current when it was made waits for it; it can be handed to another by `ring.hand_over`.
        failed: the reason, by row, of each sample that was ok and could not be decoded; its weight must become 0.
        num_fallback: samples that came to the host's decoder, those that failed there as well included.
    """

    image: torch.Tensor
    failed: dict[int, str]
    num_fallback: int


class DeviceDecoder:
    """Decodes, cuts, resizes and flips encoded micro-batches on one device.

    `decode` blocks its thread until the JPEGs are decoded (torchvision waits for nvJPEG): call it a micro-batch
    ahead, from a thread of its own. An object serves one thread at a time. torchvision keeps one decoder per
    process and makes a new one whenever the device changes: one device per process.

    Args:
        size: of the images that come out, pixels, where `decode` is not told another.
        device: CUDA or CPU.
        exif: boxes are of images turned upright, as `EncodedTransform(exif=True)` draws them. Images that have
            to be turned are decoded on the host.

    Attributes:
        device: with its number.
        stream: of that device, on which all is made.

    Raises:
        ConfigError: size < 1; the device is neither; or nvJPEG does not work there, which is tried once.
    """

    def __init__(self, size: Size, device: torch.device | str, exif: bool = False) -> None:
        if min(sides_of(size)) < 1:
            raise ConfigError(f"transform.size is {size}; it is at least 1 pixel")
        self.size, self.device, self.exif = size, numbered(device), exif
        self._sides = sides_of(size)
        self.stream = new_stream(self.device)
        self._backend: Any = torch.get_device_module(self.device)
        probe = torch.frombuffer(bytearray(encode_jpeg(np.zeros((16, 16, 3), np.uint8))), dtype=torch.uint8)
        try:
            with self._backend.stream(self.stream):
                self._decode_jpegs([probe])
        except _RefusedError as refused:
            raise ConfigError(
                f"nvJPEG does not work on {self.device}: {refused}; set transform.decode='cpu'"
            ) from refused

    def decode(
        self,
        data: np.ndarray,
        offsets: np.ndarray,
        crop: np.ndarray,
        flip: np.ndarray,
        ok: np.ndarray,
        size: Size | None = None,
    ) -> DecodedMicroBatch:
        """Decode one `EncodedMicroBatch`, whose arrays may be read-only, to images of a size, or the decoder's.

        Raises:
            RuntimeError: the device itself fails (out of memory, a lost context); never for what a sample holds.
        """
        self._sides = sides_of(size or self.size)
        samples = view(data).split(np.diff(offsets).tolist())
        encoded = {row: samples[row].numpy().data for row in np.flatnonzero(ok).tolist()}
        num_pixels = {row: nvjpeg_pixels(one, exif=self.exif) for row, one in encoded.items()}
        by_host = [row for row, num in num_pixels.items() if num is None]
        placed: list[torch.Tensor | None] = [None] * len(ok)
        failed: dict[int, str] = {}

        def place(row: int, image: torch.Tensor | None = None) -> None:
            """Cut an image, which the host decodes where there is none."""
            try:
                if image is None:
                    image = torch.from_numpy(decode(encoded[row], exif=self.exif)).permute(2, 0, 1)
                placed[row] = self._cut(image, *crop[row].tolist())
            except SampleError as error:
                failed[row] = str(error)

        ready = new_event(self.device)
        with self._backend.stream(self.stream):
            for rows in _chunks({row: num for row, num in num_pixels.items() if num is not None}):
                for row, image in zip(rows, self._decoded([samples[row] for row in rows]), strict=True):
                    if image is None:
                        by_host.append(row)
                    else:
                        place(row, image)
            for row in sorted(by_host):
                place(row)
            images = self._finish(placed, flip)
            ready.record(self.stream)
        hand_over(ready, [images], self.device)
        return DecodedMicroBatch(images, failed, len(by_host))

    def _decoded(self, samples: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Their images; None where the device's decoder refuses one. Each sample is uint8 (n,)."""
        try:
            return [*self._decode_jpegs(samples)]
        except _RefusedError:  # names no culprit, and gives nothing back of the others
            return [None] if len(samples) == 1 else [self._decoded([one])[0] for one in samples]

    def _decode_jpegs(self, encoded: list[torch.Tensor]) -> list[torch.Tensor]:
        from torchvision.io import ImageReadMode, decode_jpeg  # it takes seconds

        if self.device.type == "cuda":
            # nvJPEG writes without waiting for the stream that its output was allocated under, so kernels that
            # still read a block's former content would be overtaken (pytorch/vision#9606, torchcodec#1634). What
            # is allocated under this stream is read by it or handed over: to wait for it is enough, and short.
            self.stream.synchronize()
        try:
            return decode_jpeg(encoded, mode=ImageReadMode.RGB, device=self.device)
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # the device's own; both are RuntimeErrors
            raise
        except RuntimeError as error:
            raise _RefusedError(str(error)) from error

    def _cut(self, image: torch.Tensor, top: int, left: int, height: int, width: int) -> torch.Tensor:
        """Cut and resize a decoded image, uint8 (3, H, W) on the host or the device, to float (1, 3, h, w)."""
        bottom, right = top + height, left + width
        if min(top, left) < 0 or min(height, width) < 1 or bottom > image.shape[1] or right > image.shape[2]:
            box = [top, left, height, width]
            raise SampleError(f"box {box} is not in the image of {image.shape[1]}x{image.shape[2]}")
        cut = image[None, :, top:bottom, left:right].to(self.device)
        cut = cut.to(torch.float32, memory_format=torch.contiguous_format)
        return interpolate(cut, self._sides, mode="bilinear", antialias=True)

    def _finish(self, placed: list[torch.Tensor | None], flip: np.ndarray) -> torch.Tensor:
        black = torch.zeros((1, 3, *self._sides), device=self.device)
        image = torch.cat([black if one is None else one for one in placed])
        # The weights of the resize are ≥ 0 and sum to 1 only up to rounding.
        image = image.round_().clamp_(0, 255).to(torch.uint8, memory_format=torch.channels_last)
        if flip.any():
            mask = torch.from_numpy(np.array(flip, bool)).view(-1, 1, 1, 1)
            if self.device.type == "cuda":
                mask = mask.pin_memory()  # else non_blocking would block
            image = torch.where(mask.to(self.device, non_blocking=True), image.flip(3), image)
        return image.contiguous(memory_format=torch.channels_last)


class _RefusedError(Exception):
    """The device's decoder does not take one of the images, or any image at all."""


def nvjpeg_pixels(data: memoryview | bytes, *, exif: bool = False) -> int | None:
    """Pixels that a JPEG declares if it is of a kind that nvJPEG is known to decode rightly; None for any other.

    https://docs.nvidia.com/cuda/nvjpeg: Huffman coded baseline and progressive, 8 bit, 1 or 3 components. Beyond
    that, those without an end marker are left to libjpeg, which tells whether they are cut short; and so are those
    that say, by Adobe's marker or by their components' names, that they hold RGB.
    """
    if len(data) < 4 or data[:3] != b"\xff\xd8\xff" or data[-2:] != b"\xff\xd9":
        return None
    if exif and jpeg_orientation(bytes(data)) != 1:
        return None
    at, adobe, jfif = 2, None, False
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        body = data[at + 4 : at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")]
        if marker in (0xC0, 0xC2):
            return _frame_pixels(body, adobe, jfif)
        if (0xC1 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)) or marker in (0xD9, 0xDA):
            return None  # another coding, or data without a frame
        if marker == 0xE0 and body[:4] == b"JFIF":
            jfif = True
        if marker == 0xEE and body[:5] == b"Adobe" and len(body) >= 12:
            adobe = body[11]
        at += 4 + len(body)
    return None


def _frame_pixels(frame: memoryview | bytes, adobe: int | None, jfif: bool) -> int | None:
    """As `nvjpeg_pixels`, of the frame header: precision, height, width, and 3 bytes for each component."""
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


def _chunks(num_pixels: dict[int, int]) -> list[list[int]]:
    """Rows in groups of at most CHUNK_PIXELS, or of one."""
    groups: list[list[int]] = []
    total = CHUNK_PIXELS
    for row, num in num_pixels.items():
        if total + num > CHUNK_PIXELS:
            groups.append([])
            total = 0
        groups[-1].append(row)
        total += num
    return groups
