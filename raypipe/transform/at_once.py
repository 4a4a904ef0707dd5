"""Images of a micro-batch, made by programs in one call where possible.

    JPEGs that the kernel takes        decoded and transformed by it
    other encoded images               decoded here, some at a time, and transformed by it; or, where there is
                                       no kernel, by the reference

A row that neither can make (damaged, or too small for a crop) is left to the loop over samples, which raises
the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from raypipe import kernel
from raypipe.config import TransformConfig
from raypipe.errors import ConfigError, SampleError
from raypipe.kernel import DONE, Job, Op
from raypipe.plan.order import mix64
from raypipe.plan.places import Sides
from raypipe.transform.decode import decode
from raypipe.transform.fields import IMAGE, VIEW, chroma_of
from raypipe.transform.jpeg import scaled_boxes
from raypipe.transform.jpeg_header import jpeg_orientation
from raypipe.transform.sample_transform import SampleTransform
from raypipe.transform.samples import Samples
from raypipe.transform.views import view_key

_MAX_DECODED = 32 << 20  # bytes of pixels that are decoded before a call


@dataclass(frozen=True)
class Crop:
    """Image that is made of each sample: its only image, or one of a view.

    Attributes:
        field: the image's field.
        transform: makes it.
        number: its number among several of the field; None = it is the only one.
        part: uint64 (2,), mixed with the samples' keys; None = the keys are used as they are.
    """

    field: str
    transform: SampleTransform
    number: int | None = None
    part: np.ndarray | None = None

    def keys(self, keys: np.ndarray) -> np.ndarray:
        """Derive its keys, uint64 (…, 2), from those of the samples."""
        return keys if self.part is None else mix64(self.part ^ keys)


def crops_of(
    transform: Any, arrays: bool = False, targets: Collection[str] = ()
) -> list[Crop]:
    """The crops that a transform makes, which is from `build_transform`; for the rest see `SampleTransform`."""
    if not isinstance(transform, Mapping):
        return [Crop(IMAGE, SampleTransform(transform, arrays, targets))]
    crops = []
    for name, view in transform.items():
        transforms = [SampleTransform(each, arrays) for each in view.transforms]
        for i in range(view.count):
            number = i if view.count > 1 else None
            crops.append(
                Crop(
                    f"{VIEW}.{name}",
                    transforms[i % len(transforms)],
                    number,
                    view_key(name, i),
                )
            )
    return crops


def by_field(
    crops: Sequence[Crop], images: Iterable[np.ndarray]
) -> dict[str, np.ndarray]:
    """Join the images of crops: of each field (h, w, 3), or (n, h, w, 3).

    Raises:
        ConfigError: crops of one field differ in size or dtype.
    """
    parts = dict[str, list[np.ndarray]]()
    for crop, image in zip(crops, images, strict=True):
        parts.setdefault(crop.field, []).append(image)
    for field, of_field in parts.items():
        if len({image.shape for image in of_field}) > 1:
            sizes = ", ".join(
                sorted({f"{image.shape[0]}x{image.shape[1]}" for image in of_field})
            )
            raise ConfigError(
                f"the crops of {field} differ in size, {sizes} (height x width): end their transforms with a "
                "crop or resize to a fixed size"
            )
        if len(dtypes := {str(image.dtype) for image in of_field}) > 1:
            raise ConfigError(
                f"the crops of {field} differ in dtype, {', '.join(sorted(dtypes))}"
            )
    return {
        field: np.stack(images) if len(images) > 1 else images[0]
        for field, images in parts.items()
    }


def sizes_by_header(
    images: Sequence[bytes | memoryview | None], exif: bool
) -> np.ndarray:
    """(height, width), int32 (B, 2), of those that the kernel decodes; zeros of others.

    Those are also others that `exif` turns upright.
    """
    sizes, has_metadata = kernel.sizes(images)
    if exif:
        for row in np.flatnonzero(has_metadata).tolist():
            if jpeg_orientation(bytes(images[row] or b"")) > 1:
                sizes[row] = 0
    return sizes


class Finished(NamedTuple):
    """Rows of a micro-batch whose images are made, and the draws for the first image of each.

    Attributes:
        rows: int64 (n,).
        params: int64 (n, P), see `Program.draw`.
        sizes: (height, width) of the images before, int (n, 2).
    """

    rows: np.ndarray
    params: np.ndarray
    sizes: np.ndarray


class ProgramsAtOnce:
    """Makes the images of micro-batches.

    Args:
        crops: of each sample; all begin with a program.
        config: how images are decoded.
        threads: that the kernel uses.
    """

    def __init__(
        self, crops: Sequence[Crop], config: TransformConfig, threads: int
    ) -> None:
        self._crops = crops
        self._config = config
        self._threads = threads
        if config.crop_decode == "scaled":
            self._target = crops[0].transform.crop_target
        else:
            self._target = None

    def make(
        self,
        samples: Samples,
        wanted: np.ndarray,
        keys: np.ndarray,
        arrays: Mapping[str, np.ndarray],
    ) -> Iterator[Finished]:
        """Make the images of B samples, and yield the rows that are made; slots of others may hold anything.

        Args:
            wanted: bool (B,), the rows that are.
            keys: uint64 (B, 2).
            arrays: by field, (B, …).
        """
        sizes = sizes_by_header(samples.images, self._config.apply_exif)
        sizes[~wanted] = 0
        wanted = wanted.copy()
        if sizes.any():
            finished = self._run(samples.images, sizes, keys, arrays, self._target)
            wanted[finished.rows] = False
            yield finished
        for decoded in self._decoded(samples, wanted):
            sizes = np.array(
                [(0, 0) if image is None else image.shape[:2] for image in decoded]
            )
            yield self._run(decoded, sizes, keys, arrays)

    def _run(
        self,
        images: Sequence[Any],
        sizes: np.ndarray,
        keys: np.ndarray,
        arrays: Mapping[str, np.ndarray],
        target: Sides | None = None,
    ) -> Finished:
        """Make the images of the rows that have sizes.

        Args:
            target: decode crops at a reduced scale, not below this (height, width).
        """
        (rows,) = np.nonzero(sizes[:, 0])
        if len(rows) < len(images):
            is_run = (sizes[:, 0] > 0).tolist()
            images = [
                image if wanted else None
                for image, wanted in zip(images, is_run, strict=True)
            ]
        jobs = [_job_of(crop, rows, sizes, keys, arrays) for crop in self._crops]
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
            if crop.transform.has_rest:
                _finish(
                    crop, job.out, job._replace(**_results(crop, arrays)), keys, done
                )
        (rows,) = np.nonzero(done)
        return Finished(rows, jobs[0].params[rows], sizes[rows])

    def _decoded(
        self, samples: Samples, wanted: np.ndarray
    ) -> Iterator[list[np.ndarray | None]]:
        """The pixels of the rows that are wanted, where they can be had, by row; not too many at a time."""
        images: list[np.ndarray | None] = [None] * len(samples)
        num_bytes = 0
        for row in np.flatnonzero(wanted).tolist():
            pixels = self._pixels(samples.images[row])
            if pixels is None:
                continue
            images[row], num_bytes = pixels, num_bytes + pixels.nbytes
            if num_bytes > _MAX_DECODED:
                yield images
                images = [None] * len(samples)
                num_bytes = 0
        if num_bytes:
            yield images

    def _pixels(self, image: bytes | memoryview | None) -> np.ndarray | None:
        if not image or (self._target and image[:3] == b"\xff\xd8\xff"):
            return None  # a target gives a crop's scale by its box: `one` decodes it
        try:
            return decode(image, exif=self._config.apply_exif)
        except SampleError:
            return None


def _job_of(
    crop: Crop,
    rows: np.ndarray,
    sizes: np.ndarray,
    keys: np.ndarray,
    arrays: Mapping[str, np.ndarray],
) -> Job:
    """The job of a crop, of which these rows, int (n,), have draws; before steps of the library, in new memory."""
    program = crop.transform.program
    assert program is not None
    params = np.zeros((len(keys), program.num_params), np.int64)
    params[rows], _ = program.draw(crop.keys(keys[rows]), sizes[rows])
    if crop.transform.has_rest:
        return Job(
            program.ops,
            params,
            np.empty((len(keys), *(program.size or ()), 3), np.uint8),
        )
    return Job(program.ops, params, **_results(crop, arrays))


def _results(crop: Crop, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return where the images of a crop are put, in the arrays of a micro-batch by field; see `Job`."""
    places = {"out": arrays[crop.field], "chroma": arrays.get(chroma_of(crop.field))}
    if crop.number is None:
        return places
    return {
        name: None if array is None else array[:, crop.number]
        for name, array in places.items()
    }


def _scaled(job: Job, sizes: np.ndarray, target: Sides) -> Job:
    """A job that begins with a crop, by which the crop is decoded at a scale."""
    applies = job.params[:, :1]
    boxes = job.params[:, 1:5]
    others = job.params[:, 5:]
    boxes, eighths = scaled_boxes(boxes, sizes, target)
    ops = job.ops + np.array([0, 1], np.int32)
    ops[0] = Op.CROP_SCALED, 0
    return job._replace(
        ops=ops, params=np.column_stack([applies, boxes, eighths, others])
    )


def _whole(job: Job) -> Job:
    """A job by which images are decoded as a whole: before its crop it has a turn that never applies."""
    ops = np.vstack([np.array([[Op.TURN, job.params.shape[1]]], np.int32), job.ops])
    return job._replace(
        ops=ops,
        params=np.hstack([job.params, np.zeros((len(job.params), 2), np.int64)]),
    )


def _by_reference(image: np.ndarray, jobs: Sequence[Job], row: int) -> bool:
    try:
        for job in jobs:
            job.put(row, kernel.apply_all(image, job.ops, job.params[row]))
    except ValueError:
        return False
    return True


def _finish(
    crop: Crop, images: np.ndarray, job: Job, keys: np.ndarray, done: np.ndarray
) -> None:
    """Have the library do the rest of the steps, sample by sample."""
    own_keys = crop.keys(keys).tolist()
    for row in np.flatnonzero(done).tolist():
        try:
            image = crop.transform.finish(images[row], {}, own_keys[row])["image"]
        except Exception:  # the straight loop meets it again, and says what it is
            done[row] = False
            continue
        is_like = image.dtype == job.out.dtype
        # else nothing was written
        done[row] = is_like and image.shape[:2] == job.out.shape[1:3]
        if done[row]:
            job.put(row, image)
