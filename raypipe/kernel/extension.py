"""Compiled kernel: makes the images of a micro-batch in one call, with several threads (csrc/kernel.c).

    sizes    heights and widths by the headers, of its kinds of images
    run      encoded images, or pixels → uint8 (B, H, W, 3), by programs of integer operations

It is used only after it has agreed with simplejpeg and `reference` in this process. Images that it rejects are
left to the caller: `decode.decode` and `reference` make the same pixels, and decide on bad samples. Without
the extension it rejects all images.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import simplejpeg

from raypipe.kernel import reference
from raypipe.kernel.ops import LINEAR, Op

INTERFACE_VERSION = 8
"""Version of the extension's interface that this program calls; the same as in csrc/kernel.c."""

EXTRA_COLUMNS = 39
"""Of `decode_crop`: it decodes 4 more on each side, and begins at a block's edge, up to 31 before."""

DONE, SKIPPED, UNREADABLE, BAD_PARAMS, WRONG_SIZE, NO_MEMORY = range(6)
"""Statuses of an image, as csrc/image.h has them; all but DONE leave it to the caller."""

Image = bytes | bytearray | memoryview | np.ndarray | None
"""Encoded; or decoded, uint8 (H, W, 3), C-contiguous; or None: there is none."""


class Job(NamedTuple):
    """Job: one resulting image per input image.

    Attributes:
        ops: int32 (n, 2), C-contiguous: codes, and where in a row of params the `apply` of each is.
        params: int64 (B, P), C-contiguous.
        out: uint8 (B, H, W, 3), writable, C-contiguous but for its first axis.
    """

    ops: np.ndarray
    params: np.ndarray
    out: np.ndarray


def sizes(images: Sequence[Image]) -> tuple[np.ndarray, np.ndarray]:
    """Heights and widths of JPEGs, int32 (B, 2), 0, 0 of what `run` takes not; and which may be
    turned by EXIF or XMP, bool (B,)."""
    if not available():
        return np.zeros((len(images), 2), np.int32), np.zeros(len(images), bool)
    headers = np.frombuffer(_extension().sizes(images), np.int32).reshape(-1, 3)
    return headers[:, :2].copy(), headers[:, 2] != 0


def run(
    images: Sequence[Image], jobs: Sequence[Job], threads: int = 1, to_end: bool = True
) -> np.ndarray:
    """Make the images of a micro-batch.

    Args:
        images: B. With one job, a crop that comes first is all that is decoded of a JPEG.
        jobs: several of them make several views of each image.
        threads: number of threads, the caller's included; it returns when all are done.
        to_end: read JPEGs to their end, so that damage behind a crop is found.

    Returns:
        Statuses, uint8 (B,). Slots of `out` whose status is not DONE may hold anything.

    Raises:
        ValueError: ops or arrays that do not fit together.
    """
    if not available():
        return np.array(
            [SKIPPED if image is None else UNREADABLE for image in images], np.uint8
        )
    return np.frombuffer(_extension().run(images, jobs, threads, to_end), np.uint8)


def available() -> bool:
    """True if the kernel is used here; see `why_no_kernel`."""
    return not why_no_kernel()


@functools.cache
def why_no_kernel() -> str:
    """Return why the kernel is not used; empty = it is."""
    try:
        version = _extension().INTERFACE_VERSION
    except ImportError as error:
        return f"not built, or its libjpeg-turbo is missing ({error})"
    if version != INTERFACE_VERSION:
        return f"built from another version of raypipe ({version}, not {INTERFACE_VERSION})"
    return _why_other_pixels()


def _why_other_pixels() -> str:
    """Return why the kernel's pixels are not used; empty = they are simplejpeg's, and `reference`'s.

    The images are noise, which uses all coefficients. OpenCV has separate code for each processor.
    """
    noise = np.random.default_rng(0).integers(0, 256, (69, 85, 3), np.uint8)
    images: list[Image] = [noise]
    decoded = [noise]
    of_decoder = "its libjpeg-turbo gives other pixels than simplejpeg's"
    for sampling in ("444", "422", "420", "Gray"):
        data = simplejpeg.encode_jpeg(noise, 95, "RGB", sampling)
        decoded += [simplejpeg.decode_jpeg(data, "RGB")] * 2
        try:
            images += [data, to_seekable(data)]
        except ValueError:
            return of_decoder
    probes: list[tuple[Op, list[int], str]] = [(Op.CROP, [23, 42, 34, 28], of_decoder)]
    for height, width in ((20, 21), (64, 90), (111, 30)):
        of_resize = "it gives other pixels than OpenCV or NumPy"
        probes.append((Op.RESIZE, [height, width, LINEAR], of_resize))
    for op, params, reason in probes:
        expected = np.stack(
            [reference.OPERATIONS[op](image, params) for image in decoded]
        )
        ops = np.array([[op, 0]], np.int32)
        job = Job(ops, np.array([[1, *params]] * len(images)), np.zeros_like(expected))
        statuses = _extension().run(images, [job], 1, True)
        if any(statuses) or not np.array_equal(job.out, expected):
            return reason
    return ""


def to_seekable(data: bytes) -> bytes:
    """Convert a JPEG to a seekable one with the same pixels (csrc/jpeg_transcode.h). Needs the kernel.

    Raises:
        ValueError: it is unusual or damaged.
    """
    return _extension().to_seekable(data)


def decode_crop(*arguments: Any) -> int:
    """The module's function of this name; see csrc/kernel.c. There is a kernel."""
    return _extension().decode_crop(*arguments)


def _extension() -> ModuleType:
    return importlib.import_module("_raypipe_kernel")
