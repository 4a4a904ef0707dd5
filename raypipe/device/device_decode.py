"""Encoded micro-batches → uint8 (B, 3, S, S) on the training device. Knows torch, not Ray.

    sample                                      decoded by
    JPEG that nvJPEG is known to decode         the device, many to a call, see raypipe.device.jpeg_decoders
    other images, and those it rejects          raypipe.transform.decode on the host; only the cut moves over
                                                (`num_fallback`)

The first two are cut, resized with antialiasing and flipped on the device. On a CPU device libjpeg replaces
nvJPEG; the rest is the same.

The pixels are not those of `transform.decode="cpu"`, nor the same on every kind of GPU: nvJPEG as it is set up
repeats chroma samples where libjpeg interpolates, its IDCT rounds otherwise, some GPUs decode baseline JPEGs in
hardware, and the CPU presets resize without antialiasing. A damaged JPEG that has its end marker may decode to
garbage: nvJPEG misses some damage that libjpeg reports.

Work for the device: two launches per sample (to float, resize), about eight per micro-batch. Fewer would need a
    custom kernel, or boxes padded to one size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from raypipe.device.jpeg_decoders import find_decoder, nvjpeg_pixels
from raypipe.device.ring import hand_over, new_event, new_stream, numbered, view
from raypipe.errors import ConfigError, SampleError
from raypipe.transform.decode import decode
from raypipe.transform.sizes import Sides, Size, sides_of

CHUNK_PIXELS = 128 << 20
"""Decoded pixels per call of nvJPEG, at most, unless one image alone has more: 384 MiB of RGB on the device, which
is over 600 images of ImageNet's average 0.2 MP."""


@dataclass(frozen=True)
class DecodedMicroBatch:
    """Images of one micro-batch, on the device.

    Attributes:
        image: uint8 (B, 3, S, S), channels_last; 0 where a sample is padding or failed. On CUDA the stream that
            was current when it was made waits for it; it can be handed to another by `ring.hand_over`.
        failed: by row, why a sample could not be decoded; its weight must become 0.
        num_fallback: samples passed to the host's decoder, including those that failed there.
    """

    image: torch.Tensor
    failed: dict[int, str]
    num_fallback: int


class DeviceDecoder:
    """Decodes, cuts, resizes and flips encoded micro-batches on one device.

    `decode` blocks its thread until the JPEGs are decoded (libraries wait for nvJPEG): call it a micro-batch
    ahead, from a separate thread. An object serves one thread at a time. torchvision keeps one decoder per
    process and makes a new one whenever the device changes: one device per process.

    Args:
        size: side of the resulting images, pixels, unless `decode` gets another.
        device: CUDA or CPU.
        exif: boxes refer to upright images, as `EncodedTransform(exif=True)` draws them. Images that must be
            turned are decoded on the host.

    Attributes:
        device: the device, with its number.
        stream: stream of that device for all of the work.
        library: decoding library, with its version.

    Raises:
        ConfigError: size < 1; the device is neither; or no library decodes there, which is tried once.
    """

    def __init__(self, size: Size, device: torch.device | str, exif: bool = False) -> None:
        if min(sides_of(size)) < 1:
            raise ConfigError(f"transform.size is {size}; it is at least 1 pixel")
        self.size, self.device, self.exif = size, numbered(device), exif
        self.stream = new_stream(self.device)
        self._backend: Any = torch.get_device_module(self.device)
        with self._backend.stream(self.stream):
            self._decode_each = find_decoder(self.device)
        self.library = self._decode_each.name

    def decode(
        self,
        data: np.ndarray,
        offsets: np.ndarray,
        crop: np.ndarray,
        flip: np.ndarray,
        ok: np.ndarray,
        size: Size | None = None,
    ) -> DecodedMicroBatch:
        """Decode one micro-batch, whose arrays may be read-only, to images of a size, or the decoder's.

        Args:
            data, offsets: encoded images; sample b is data[offsets[b] : offsets[b + 1]].
            crop: int32 (B, 4), the boxes that are cut.
            flip: bool (B,), which images are mirrored.
            ok: bool (B,); False for padding and for bad samples.

        Raises:
            RuntimeError: the device itself fails (out of memory, a lost context); never for what a sample holds.
        """
        sides = sides_of(size or self.size)
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
                placed[row] = self._cut(image, sides, *crop[row].tolist())
            except SampleError as error:
                failed[row] = str(error)

        ready = new_event(self.device)
        with self._backend.stream(self.stream):
            for rows in _chunks({row: num for row, num in num_pixels.items() if num is not None}):
                for row, image in zip(rows, self._decoded([samples[row] for row in rows]), strict=True):
                    if isinstance(image, str):
                        by_host.append(row)
                    else:
                        place(row, image)
            for row in sorted(by_host):
                place(row)
            images = self._finish(placed, flip, sides)
            ready.record(self.stream)
        hand_over(ready, [images], self.device)
        return DecodedMicroBatch(images, failed, len(by_host))

    def _decoded(self, samples: list[torch.Tensor]) -> list[torch.Tensor | str]:
        """Their images, or why the device's decoder refuses one. Each sample is uint8 (n,)."""
        if self.device.type == "cuda":
            # nvJPEG writes without waiting for the stream that its output was allocated under, so kernels that
            # still read a block's former content would be overtaken (pytorch/vision#9606, torchcodec#1634). What
            # is allocated under this stream is read by it or handed over: to wait for it is enough, and short.
            self.stream.synchronize()
        return self._decode_each(samples, self.device)

    def _cut(
        self, image: torch.Tensor, sides: Sides, top: int, left: int, height: int, width: int
    ) -> torch.Tensor:
        """Cut and resize a decoded image, uint8 (3, H, W) on the host or the device, to float (1, 3, h, w)."""
        bottom, right = top + height, left + width
        if min(top, left) < 0 or min(height, width) < 1 or bottom > image.shape[1] or right > image.shape[2]:
            box = [top, left, height, width]
            raise SampleError(f"box {box} is not in the image of {image.shape[1]}x{image.shape[2]}")
        cut = image[None, :, top:bottom, left:right].to(self.device)
        cut = cut.to(torch.float32, memory_format=torch.contiguous_format)
        return interpolate(cut, sides, mode="bilinear", antialias=True)

    def _finish(self, placed: list[torch.Tensor | None], flip: np.ndarray, sides: Sides) -> torch.Tensor:
        black = torch.zeros((1, 3, *sides), device=self.device)
        image = torch.cat([black if one is None else one for one in placed])
        # The weights of the resize are ≥ 0 and sum to about 1: rounding leaves a small error.
        image = image.round_().clamp_(0, 255).to(torch.uint8, memory_format=torch.channels_last)
        if flip.any():
            mask = torch.from_numpy(np.array(flip, bool)).view(-1, 1, 1, 1)
            if self.device.type == "cuda":
                mask = mask.pin_memory()  # pageable memory would make non_blocking block
            image = torch.where(mask.to(self.device, non_blocking=True), image.flip(3), image)
        return image.contiguous(memory_format=torch.channels_last)


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
