"""Images of a micro-batch, made by programs in one call where possible.

    JPEGs that the kernel takes        decoded and transformed by it
    other encoded images, and those    decoded here, some at a time, and transformed by it; or, where there is
    from a cache                       no kernel, by the reference

A row that neither can make (damaged, or too small for a crop) is left to the loop over samples, which raises
the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from raypipe.config import TransformConfig
from raypipe.errors import SampleError
from raypipe.plan.order import mix64
from raypipe.plan.places import Sides
from raypipe.transform import kernel, reference
from raypipe.transform.decode import decode
from raypipe.transform.draws import Key
from raypipe.transform.fields import MadeAtOnce, chroma_of
from raypipe.transform.jpeg import jpeg_orientation, scaled_boxes
from raypipe.transform.kernel import DONE, Job
from raypipe.transform.ops import Op
from raypipe.transform.program import Program
from raypipe.transform.samples import Decoded, Samples

_MAX_DECODED = 32 << 20  # bytes of pixels that are decoded before a call


class Slots(NamedTuple):
    """Where images are put: uint8 (B, h, w, 3); or luma (B, h, w, 1), and chroma (B, h/2, w/2, 2)."""

    pixels: np.ndarray
    chroma: np.ndarray | None = None

    def put(self, row: int, image: np.ndarray) -> None:
        """Fill a slot with an image, uint8 (h, w, 3)."""
        if self.chroma is None:
            self.pixels[row] = image
        else:
            self.pixels[row], self.chroma[row] = kernel.planes(image)


@dataclass(frozen=True)
class Crop:
    """Image that a program makes of each sample: its only image, or one of a view.

    Attributes:
        field: the image's field.
        program: program that makes it.
        finish: step after the program, on an image, its targets and the key; None = no step.
        number: its number among several of the field.
        part: uint64 (2,), mixed with the samples' keys; None = the keys are used as they are.
    """

    field: str
    program: Program
    finish: Callable[[np.ndarray, dict[str, Any], Key], dict[str, np.ndarray]] | None = None
    number: int | None = None
    part: np.ndarray | None = None

    def keys(self, keys: np.ndarray) -> np.ndarray:
        """Derive its keys, uint64 (B, 2), from those of the samples."""
        return keys if self.part is None else mix64(self.part ^ keys)

    def slots(self, arrays: Mapping[str, np.ndarray]) -> Slots:
        """Where its images are put, in the arrays of a micro-batch by field."""
        parts = (arrays.get(name) for name in (self.field, chroma_of(self.field)))
        pixels, chroma = (part if part is None or self.number is None else part[:, self.number] for part in parts)
        assert pixels is not None
        return Slots(pixels, chroma)


def shapes_of(crops: Sequence[Crop]) -> dict[str, tuple[int, ...]]:
    """The shapes of a sample's fields, of which these are the images."""
    shapes = dict[str, tuple[int, ...]]()
    for crop in crops:
        several = () if crop.number is None else (crop.number + 1,)
        shapes[crop.field] = *several, *(crop.program.size or ()), 3
    return shapes


class ProgramsAtOnce:
    """Makes the images of micro-batches.

    Args:
        crops: of each sample.
        config: how images are decoded.
        threads: that the kernel uses.
    """

    def __init__(self, crops: Sequence[Crop], config: TransformConfig, threads: int) -> None:
        self._crops, self._config, self._threads = crops, config, threads
        self._target = crops[0].program.crop_target if config.crop_decode == "scaled" else None

    def make(
        self,
        samples: Samples,
        wanted: np.ndarray,
        keys: np.ndarray,
        arrays: Mapping[str, np.ndarray],
        cached: Callable[[int], Decoded | None] | None = None,
    ) -> MadeAtOnce:
        """Make the images of B samples.

        Args:
            wanted: bool (B,), the rows that are.
            keys: uint64 (B, 2).
            arrays: by field, (B, …).
            cached: decodes the sample of a row, to keep it.

        Returns:
            Which are made. Slots of others may hold anything.
        """
        first = self._crops[0].program
        made = MadeAtOnce(
            np.zeros(len(samples), bool),
            np.zeros((len(samples), first.num_params), np.int64),
            np.zeros((len(samples), 2), np.int32),
        )
        if cached is None:
            sizes = self._sizes(samples.images)
            sizes[~wanted] = 0
            self._run(samples.images, sizes, keys, arrays, made, self._target)
        for decoded in self._decoded(samples, wanted & ~made.rows, cached):
            sizes = np.array([(0, 0) if image is None else image.shape[:2] for image in decoded])
            self._run(decoded, sizes, keys, arrays, made)
        return made

    def _sizes(self, images: Sequence[bytes | memoryview | np.ndarray | None]) -> np.ndarray:
        """(height, width), int32 (B, 2), of those that the kernel decodes; zeros of others.

        Those are also others that are turned upright, and pixels.
        """
        sizes, has_exif = kernel.sizes(images)
        if self._config.apply_exif:
            for row in np.flatnonzero(has_exif).tolist():
                if 2 <= jpeg_orientation(bytes(images[row] or b"")) <= 8:
                    sizes[row] = 0
        return sizes

    def _run(
        self,
        images: Sequence[Any],
        sizes: np.ndarray,
        keys: np.ndarray,
        arrays: Mapping[str, np.ndarray],
        made: MadeAtOnce,
        target: Sides | None = None,
    ) -> None:
        """Make the images of the rows that have sizes, and note them.

        Args:
            target: decode crops at a reduced scale, not below this (height, width).
        """
        (rows,) = np.nonzero(sizes[:, 0])
        if not rows.size:
            return
        if len(rows) < len(images):
            is_run = (sizes[:, 0] > 0).tolist()
            images = [image if wanted else None for image, wanted in zip(images, is_run, strict=True)]
        jobs = []
        for crop in self._crops:
            drawn, _ = crop.program.draw(crop.keys(keys[rows]), sizes[rows])
            params = drawn
            if len(rows) < len(images):
                params = np.zeros((len(images), drawn.shape[1]), np.int64)
                params[rows] = drawn
            slots = crop.slots(arrays)
            if crop.finish:
                slots = Slots(np.empty((len(images), *(crop.program.size or ()), 3), np.uint8))
            jobs.append(Job(crop.program.ops, params, *slots))
        called = jobs
        if target:
            called = [_scaled(job, sizes, target) for job in jobs]
        elif self._config.crop_decode == "off":
            called = list(map(_whole, jobs))
        done = kernel.run(images, called, self._threads) == DONE
        for row in rows[~done[rows]].tolist():
            if isinstance(images[row], np.ndarray):
                done[row] = _by_reference(images[row], jobs, row)
        for crop, job in zip(self._crops, jobs, strict=True):
            if crop.finish:
                _finish(crop, job.out, keys, arrays, rows, done)
        made.rows[done] = True
        made.params[done], made.sizes[done] = jobs[0].params[done], sizes[done]

    def _decoded(
        self,
        samples: Samples,
        wanted: np.ndarray,
        cached: Callable[[int], Decoded | None] | None,
    ) -> Iterator[list[np.ndarray | None]]:
        """The pixels of the rows that are wanted, where they can be had, by row; not too many at a time."""
        images: list[np.ndarray | None] = [None] * len(samples)
        num_bytes = 0
        for row in np.flatnonzero(wanted).tolist():
            pixels = self._pixels(samples.images[row], row, cached)
            if pixels is None:
                continue
            images[row], num_bytes = pixels, num_bytes + pixels.nbytes
            if num_bytes > _MAX_DECODED:
                yield images
                images, num_bytes = [None] * len(samples), 0
        if num_bytes:
            yield images

    def _pixels(
        self,
        image: bytes | memoryview | np.ndarray | None,
        row: int,
        cached: Callable[[int], Decoded | None] | None,
    ) -> np.ndarray | None:
        if isinstance(image, np.ndarray):
            return image
        if cached is not None and (decoded := cached(row)):
            return decoded.pixels
        if not image or (self._target and image[:3] == b"\xff\xd8\xff"):
            return None  # a target gives a crop's scale by its box: `one` decodes it
        try:
            return decode(image, exif=self._config.apply_exif)
        except SampleError:
            return None


def _scaled(job: Job, sizes: np.ndarray, target: Sides) -> Job:
    """A job that begins with a crop, by which the crop is decoded at a scale."""
    applies, boxes, others = job.params[:, :1], job.params[:, 1:5], job.params[:, 5:]
    boxes, eighths = scaled_boxes(boxes, sizes, target)
    ops = job.ops + np.array([0, 1], np.int32)
    ops[0] = Op.CROP_SCALED, 0
    return job._replace(ops=ops, params=np.column_stack([applies, boxes, eighths, others]))


def _whole(job: Job) -> Job:
    """A job by which images are decoded as a whole: before its crop it has a turn that never applies."""
    ops = np.vstack([np.array([[Op.TURN, job.params.shape[1]]], np.int32), job.ops])
    return job._replace(ops=ops, params=np.hstack([job.params, np.zeros((len(job.params), 2), np.int64)]))


def _by_reference(image: np.ndarray, jobs: Sequence[Job], row: int) -> bool:
    try:
        for job in jobs:
            Slots(job.out, job.chroma).put(row, reference.apply_all(image, job.ops, job.params[row]))
    except ValueError:
        return False
    return True


def _finish(
    crop: Crop,
    images: np.ndarray,
    keys: np.ndarray,
    arrays: Mapping[str, np.ndarray],
    rows: np.ndarray,
    done: np.ndarray,
) -> None:
    """Have the library do the rest of the steps, sample by sample."""
    assert crop.finish is not None
    slots, own_keys = crop.slots(arrays), crop.keys(keys).tolist()
    for row in rows[done[rows]].tolist():
        try:
            image = crop.finish(images[row], {}, own_keys[row])["image"]
        except Exception:  # the straight loop meets it again, and says what it is
            done[row] = False
            continue
        done[row] = image.shape[:2] == slots.pixels.shape[1:3]  # else nothing was written
        if done[row]:
            slots.put(row, image)
