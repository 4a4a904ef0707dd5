"""Encoded micro-batches → uint8 images on the device, for `transform.decode: device`. Knows torch, not Ray.

    image                                          decoded by
    JPEG of a kind that nvJPEG has, on CUDA        the GPU, all of a micro-batch in one call: nvImageCodec, which
                                                   decodes only the box that is needed, or else torchvision
    any other, all on a CPU, and those that the    `raypipe.transform.decode.rgb`, with libjpeg-turbo, in a few
    GPU refuses                                    threads

Then images of similar sizes are cut, resized and flipped together, see `raypipe.device.resize`, with the same bits
on every device. The GPU's decoder differs from libjpeg-turbo by a few levels, and between kinds of chips. It also
misses some damage that libjpeg-turbo finds.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raypipe.device.ambient import pinned
from raypipe.device.resize import resize_boxes, to_device
from raypipe.device.ring import new_event, new_stream, numbered, view
from raypipe.errors import ConfigError, SampleError
from raypipe.metrics.timing import mark
from raypipe.transform.decode.jpeg_header import is_for_nvjpeg, jpeg_orientation
from raypipe.transform.decode.rgb import decode, encode_jpeg
from raypipe.transform.encoded_map import (
    CropBox,
    axis_columns,
    box_of_map,
    sides_of_map,
)
from raypipe.transform.fields import Ragged

BoxDecoder = Callable[[list[torch.Tensor], list[CropBox]], list[torch.Tensor | None]]
"""JPEGs, each uint8 (n,) on the host, and a box of each → their pixels, uint8 (3, h, w), on the device, as stored;
None: it cannot be decoded. RuntimeError: one of them cannot, and the others must be asked for again."""

# Pixels that are decoded in one call, at most, unless a single image has more: 384 MiB of RGB.
_DECODED_PIXELS = 128 << 20
# Pixels of the images that are resized together, each as large as the largest: 200 MB of float32. On a CPU only
# small ones gain by it: at 32x32 pixels 66 us an image instead of 1,011.
_RESIZED_PIXELS = {"cuda": 16 << 20, "cpu": 1 << 16}
_MOST_THREADS = 8
_RGB = 3  # torchvision's number of the mode
_PROBE_LEVELS = 4.0


@dataclass(frozen=True)
class Decoded:
    """Images of one micro-batch, on the device.

    Attributes:
        image: uint8 (B, 3, H, W), channels_last; 0 in rows that were not wanted, or failed.
        failed: by row, why a sample could not be decoded.
        num_by_host: samples that the host decoded.
        ready: event behind the work on them, for `ring.hand_over`.
        began, ended: `metrics.mark`s around the work.
    """

    image: torch.Tensor
    failed: dict[int, str]
    num_by_host: int
    ready: Any
    began: Any
    ended: Any


class DeviceDecoder:
    """Decodes encoded micro-batches on one device, in one thread at a time, which waits for the decoder.

    Args:
        device: CUDA or CPU.
        exif: images are turned upright, which the host does.

    Attributes:
        library: what decodes JPEGs on the device; empty = the host decodes all.

    Raises:
        ConfigError: nothing decodes JPEGs on the device.
    """

    def __init__(self, device: torch.device | str, exif: bool = False) -> None:
        self.device = numbered(device)
        self._exif = exif
        self._backend: Any = torch.get_device_module(self.device)
        self._stream = new_stream(self.device)
        self._threads = ThreadPoolExecutor(
            min(_MOST_THREADS, os.cpu_count() or 1), "raypipe-decode"
        )
        self.library = ""
        if self.device.type == "cuda":
            with self._backend.stream(self._stream):
                self.library, self._decode_boxes = find_decoder(self.device)

    def __call__(
        self, data: Ragged, maps: np.ndarray, is_decoded: np.ndarray
    ) -> Decoded:
        """Decode a micro-batch, whose arrays may be read-only; see `raypipe.transform.encoded`.

        Args:
            is_decoded: bool (B,), the rows to decode.

        Raises:
            RuntimeError: the device itself fails (out of memory, a lost context); never for what a sample holds.
        """
        offsets = data.offsets.tolist()
        images = {
            row: data.values[offsets[row] : offsets[row + 1]]
            for row in np.flatnonzero(is_decoded).tolist()
        }
        on_device = {}
        running = {}
        for row, image in images.items():
            if self._is_for_device(image.tobytes()):
                on_device[row] = image
            else:
                running[row] = self._threads.submit(self._by_host, image, maps[row])
        axes = [axis_columns(maps.shape[1], axis) for axis in (0, 1)]
        height, width = (int(maps[0, columns.stop - 1]) for columns in axes)
        with pinned(self.device), torch.no_grad(), self._backend.stream(self._stream):
            began = mark(self.device)
            out = torch.zeros(
                (len(maps), height, width, 3), dtype=torch.uint8, device=self.device
            )
            for row in self._fill_by_device(on_device, maps, out):
                running[row] = self._threads.submit(
                    self._by_host, images[row], maps[row]
                )
            failed = self._fill_by_host(running, maps, out)
            ended = mark(self.device)
            ready = new_event(self.device)
            ready.record(self._stream)
        return Decoded(
            out.permute(0, 3, 1, 2), failed, len(running), ready, began, ended
        )

    def _is_for_device(self, image: bytes) -> bool:
        return (
            bool(self.library)
            and is_for_nvjpeg(image)
            and not (self._exif and jpeg_orientation(image) > 1)
        )

    def _fill_by_host(
        self,
        running: dict[int, Future[np.ndarray]],
        maps: np.ndarray,
        out: torch.Tensor,
    ) -> dict[int, str]:
        """Take the images that threads decode into rows of uint8 (B, H, W, 3); return the errors of others."""
        decoded = {}
        failed = {}
        for row, future in running.items():
            try:
                pixels = torch.from_numpy(future.result())
            except SampleError as error:
                failed[row] = str(error)
                continue
            decoded[row] = pixels.permute(2, 0, 1).to(self.device)
        self._place(decoded, maps, out)
        return failed

    def _fill_by_device(
        self, images: dict[int, np.ndarray], maps: np.ndarray, out: torch.Tensor
    ) -> Iterator[int]:
        """Decode images into rows of uint8 (B, H, W, 3), and yield the rows that the device refuses."""
        pixels = {row: math.prod(sides_of_map(maps[row])) for row in images}
        for rows in _groups(pixels, _DECODED_PIXELS):
            boxes = [box_of_map(maps[row]) for row in rows]
            decoded = self._by_device([images[row] for row in rows], boxes)
            good = {}
            for row, image in zip(rows, decoded, strict=True):
                if image is None:
                    yield row
                else:
                    good[row] = image
            self._place(good, maps, out)

    def _by_host(self, image: np.ndarray, of_map: np.ndarray) -> np.ndarray:
        """The box of an image, uint8 (h, w, 3)."""
        pixels = decode(image.data, exif=self._exif)
        if pixels.shape[:2] != (sides := sides_of_map(of_map)):
            raise SampleError(
                f"its header says {sides} (height, width), and it has {pixels.shape[:2]}"
            )
        top, left, bottom, right = box_of_map(of_map)
        return pixels[top:bottom, left:right]

    def _by_device(
        self, images: list[np.ndarray], boxes: list[CropBox]
    ) -> list[torch.Tensor | None]:
        """The boxes of images; None where the device refuses one, which costs 2 log2(n) more calls."""
        if self.device.type == "cuda":
            # nvJPEG writes without waiting for the stream that its output was allocated under, so kernels that
            # still read a block's former content would be overtaken (pytorch/vision#9606).
            self._stream.synchronize()
        try:
            decoded = self._decode_boxes([*map(view, images)], boxes)
            return [
                None
                if image is None or image.shape[1:] != (bottom - top, right - left)
                else image
                for image, (top, left, bottom, right) in zip(
                    decoded, boxes, strict=True
                )
            ]
        except (
            torch.OutOfMemoryError,
            torch.AcceleratorError,
        ):
            # the device's own; both are RuntimeErrors
            raise
        except RuntimeError:
            # it names no culprit, and gives nothing back of the others
            pass
        # Work that the call has begun may still write to memory that it has given back.
        self._backend.synchronize(self.device)
        if len(images) == 1:
            return [None]
        half = len(images) // 2
        return [
            *self._by_device(images[:half], boxes[:half]),
            *self._by_device(images[half:], boxes[half:]),
        ]

    def _place(
        self, images: dict[int, torch.Tensor], maps: np.ndarray, out: torch.Tensor
    ) -> None:
        """Resize boxes of images, uint8 (3, h, w), into rows of uint8 (B, H, W, 3)."""
        limit = _RESIZED_PIXELS[self.device.type]
        for rows in _groups(
            {row: image[0].numel() for row, image in images.items()},
            limit,
            are_padded=True,
        ):
            resized = resize_boxes([images[row] for row in rows], maps[rows])
            out[to_device(np.array(rows), self.device)] = resized


def _groups(
    pixels: Mapping[int, int], limit: int, are_padded: bool = False
) -> Iterator[list[int]]:
    """Rows by their pixels, in groups of at most so many, or of one.

    Args:
        are_padded: each counts as the largest, which has at most twice the pixels of the smallest.
    """
    group = list[int]()
    total = 0
    for row in sorted(pixels, key=pixels.__getitem__):
        num = pixels[row]
        total = (len(group) + 1) * num if are_padded else total + num
        if group and (total > limit or (are_padded and num > 2 * pixels[group[0]])):
            yield group
            group = []
            total = num
        group.append(row)
    if group:
        yield group


def _by_nvimagecodec(device: torch.device) -> BoxDecoder:
    codec: Any = importlib.import_module("nvidia.nvimgcodec")
    decoder = codec.Decoder(device_id=device.index)
    params = codec.DecodeParams(apply_exif_orientation=False)

    def decode_boxes(
        images: list[torch.Tensor], boxes: list[CropBox]
    ) -> list[torch.Tensor | None]:
        whole = [codec.CodeStream(image.numpy().tobytes()) for image in images]
        streams = [
            stream.get_sub_code_stream(region=codec.Region(*box))
            for stream, box in zip(whole, boxes, strict=True)
        ]
        stream = torch.cuda.current_stream(device).cuda_stream
        decoded = decoder.decode(streams, params=params, cuda_stream=stream)
        return [
            None if image is None else torch.from_dlpack(image).permute(2, 0, 1)
            for image in decoded
        ]

    return decode_boxes


def _by_torchvision(device: torch.device) -> BoxDecoder:
    # it loads the operator; its own function says that it is deprecated
    importlib.import_module("torchvision.io")
    operator = torch.ops.image.decode_jpegs_cuda

    def decode_boxes(
        images: list[torch.Tensor], boxes: list[CropBox]
    ) -> list[torch.Tensor | None]:
        whole = operator(images, _RGB, device)
        return [
            image[:, box[0] : box[2], box[1] : box[3]]
            for image, box in zip(whole, boxes, strict=True)
        ]

    return decode_boxes


LIBRARIES: dict[str, Callable[[torch.device], BoxDecoder]] = {
    "nvidia.nvimgcodec": _by_nvimagecodec,
    "torchvision": _by_torchvision,
}
"""By their modules, the preferred one first."""


def find_decoder(device: torch.device) -> tuple[str, BoxDecoder]:
    """The first library that decodes a JPEG on the device, which is tried once, under the current stream.

    Raises:
        ConfigError: none does; with the reason of each.
    """
    smooth = np.linspace(0, 255, 32 * 32 * 3).reshape(32, 32, 3).astype(np.uint8)
    probe = torch.frombuffer(bytearray(encode_jpeg(smooth)), dtype=torch.uint8)
    reasons = []
    for name, load in LIBRARIES.items():
        try:
            decode_boxes = load(device)
            (decoded,) = decode_boxes([probe], [(4, 8, 20, 32)])
            if decoded is None:
                raise ValueError("it decodes no JPEG")
            apart = np.abs(
                decoded.permute(1, 2, 0).cpu().numpy().astype(int)
                - decode(probe.numpy().data)[4:20, 8:32]
            )
            if apart.mean() >= _PROBE_LEVELS:
                raise ValueError(
                    f"its pixels are {apart.mean():.1f} levels from libjpeg's"
                )
        except Exception as error:  # missing, too old, built for another CUDA, …
            reasons.append(f"{name}: {error}")
            continue
        return name, decode_boxes
    raise ConfigError(
        f"nothing here decodes JPEGs on {device} ({'; '.join(reasons)}): install a torchvision built for CUDA, or "
        "nvidia-nvimgcodec, or set transform.decode='cpu'"
    )
