"""Images of a micro-batch, made by programs in one call where possible.

    JPEGs that the kernel takes        decoded and transformed by it
    other encoded images               decoded here, some at a time, and transformed by it; or, where there is
                                       no kernel, by the reference

A row that neither can make (damaged, or too small for a crop) is left to the loop over samples, which raises
the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from raypipe import kernel
from raypipe.config import TransformConfig
from raypipe.errors import ConfigError, SampleError
from raypipe.kernel import DONE, Job, Op
from raypipe.plan.order import mix64
from raypipe.plan.places import Sides
from raypipe.transform.decode.jpeg import scaled_boxes
from raypipe.transform.decode.jpeg_header import jpeg_orientation
from raypipe.transform.decode.rgb import decode
from raypipe.transform.fields import IMAGE, VIEW
from raypipe.transform.planes import outputs
from raypipe.transform.sample_transform import SampleTransform
from raypipe.transform.samples import Samples
from raypipe.transform.views import view_key

_NO_RESULTS = np.empty((0, 0, 0, 3), np.uint8)
_MAX_DECODED = 32 << 20  # bytes of pixels that are decoded before a call


Views = dict[str, list[SampleTransform]]
"""By the name of their field: what makes the one image of it, or each of several."""


def views_of(
    transform: Any, arrays: bool = False, targets: Collection[str] = ()
) -> Views:
    """The images that a transform makes of a sample, which is from `build_transform`; see `SampleTransform`."""
    if not isinstance(transform, Mapping):
        return {IMAGE: [SampleTransform(transform, arrays, targets)]}
    views = {}
    for name, view in transform.items():
        transforms = [
            SampleTransform(view_transform, arrays)
            for view_transform in view.transforms
        ]
        views[f"{VIEW}.{name}"] = [
            transforms[number % len(transforms)] for number in range(view.count)
        ]
    return views


def image_keys(field: str, number: int, keys: np.ndarray) -> np.ndarray:
    """Derive the keys of a view's image, uint64 (…, 2), from those of the samples; the only image has theirs."""
    if field == IMAGE:
        return keys
    return mix64(view_key(field.removeprefix(f"{VIEW}."), number) ^ keys)


def joined_images(field: str, images: Sequence[np.ndarray]) -> np.ndarray:
    """Join the images of a field: (h, w, 3), or (n, h, w, 3).

    Raises:
        ConfigError: they differ in size or dtype.
    """
    if len(images) == 1:
        return images[0]
    if len({image.shape for image in images}) > 1:
        sizes = sorted({f"{image.shape[0]}x{image.shape[1]}" for image in images})
        raise ConfigError(
            f"the crops of {field} differ in size, {', '.join(sizes)} (height x width): end their transforms with "
            "a crop or resize to a fixed size"
        )
    dtypes = sorted({str(image.dtype) for image in images})
    if len(dtypes) > 1:
        raise ConfigError(f"the crops of {field} differ in dtype, {', '.join(dtypes)}")
    return np.stack(images)


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


class KernelImages:
    """Makes the images of micro-batches by the kernel.

    Args:
        views: the images of each sample; all begin with a program.
        config: how images are decoded.
        threads: that the kernel uses.
    """

    def __init__(self, views: Views, config: TransformConfig, threads: int) -> None:
        self._images = [
            (field, number, transform)
            for field, transforms in views.items()
            for number, transform in enumerate(transforms)
        ]
        self._config = config
        self._threads = threads
        if config.crop_decode == "scaled":
            self._target = self._images[0][2].crop_target
        else:
            self._target = None

    def make(
        self,
        samples: Samples,
        is_wanted: np.ndarray,
        keys: np.ndarray,
        arrays: Mapping[str, np.ndarray],
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Make the images of B samples; slots of those that are not made may hold anything.

        Args:
            is_wanted: bool (B,), the rows that are.
            keys: uint64 (B, 2).
            arrays: by field, (B, …).

        Yields:
            Some of the rows that are made, int64 (n,); for the first image of each its parameters, int64 (n, P),
            see `Program.draw`; and its (height, width) before, int (n, 2).
        """
        sizes = sizes_by_header(samples.images, self._config.apply_exif)
        sizes[~is_wanted] = 0
        is_wanted = is_wanted.copy()
        if sizes.any():
            finished = self._run(samples.images, sizes, keys, arrays, self._target)
            is_wanted[finished[0]] = False
            yield finished
        for decoded in self._decoded(samples, is_wanted):
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
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Make the images of the rows that have sizes; returns as `make` yields.

        Args:
            target: decode crops at a reduced scale, not below this (height, width).
        """
        (rows,) = np.nonzero(sizes[:, 0])
        if len(rows) < len(images):
            is_run = (sizes[:, 0] > 0).tolist()
            images = [
                image if is_wanted else None
                for image, is_wanted in zip(images, is_run, strict=True)
            ]
        jobs = []
        results = []
        for field, number, transform in self._images:
            own_keys = image_keys(field, number, keys)
            job = _job_of(transform, rows, sizes, own_keys)
            result = self._result(job, field, number, arrays)
            results.append(result)
            if transform.has_rest:  # before steps of the library, in new memory
                pixels = np.empty((len(keys), *_size_of(transform), 3), np.uint8)
                jobs.append(job._replace(out=pixels))
            else:
                jobs.append(result)
        called = jobs
        if target:
            called = [_scaled(job, sizes, target) for job in jobs]
        elif self._config.crop_decode == "off":
            called = list(map(_whole, jobs))
        done = kernel.run(images, called, self._threads) == DONE
        for row in rows[~done[rows]].tolist():
            if isinstance(images[row], np.ndarray):
                done[row] = _by_reference(images[row], jobs, row)
        for image, job, result in zip(self._images, jobs, results, strict=True):
            field, number, transform = image
            if transform.has_rest:
                own_keys = image_keys(field, number, keys)
                _finish(transform, job.out, result, own_keys, done)
        (rows,) = np.nonzero(done)
        return rows, jobs[0].params[rows], sizes[rows]

    def _result(
        self, job: Job, field: str, number: int, arrays: Mapping[str, np.ndarray]
    ) -> Job:
        """The job that puts its images into the arrays of a micro-batch, by field."""
        out, chroma = outputs(arrays, field)
        is_one_of_several = (field, 1) in {image[:2] for image in self._images}
        if is_one_of_several:
            out = out[:, number]
            if chroma is not None:
                chroma = chroma[:, number]
        return job._replace(out=out, chroma=chroma)

    def _decoded(
        self, samples: Samples, is_wanted: np.ndarray
    ) -> Iterator[list[np.ndarray | None]]:
        """The pixels of the rows that are wanted, where they can be had, by row; not too many at a time."""
        images: list[np.ndarray | None] = [None] * len(samples)
        num_bytes = 0
        for row in np.flatnonzero(is_wanted).tolist():
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
            return None  # a target gives a crop's scale by its box: `slow` decodes it
        try:
            return decode(image, exif=self._config.apply_exif)
        except SampleError:
            return None


def _size_of(transform: SampleTransform) -> tuple[int, ...]:
    assert transform.program is not None
    return transform.program.size or ()


def _job_of(
    transform: SampleTransform, rows: np.ndarray, sizes: np.ndarray, keys: np.ndarray
) -> Job:
    """The job of a program, of which these rows, int (n,), have draws; it has no results yet."""
    program = transform.program
    assert program is not None
    params = np.zeros((len(keys), program.num_params), np.int64)
    params[rows], _ = program.draw(keys[rows], sizes[rows])
    return Job(program.ops, params, _NO_RESULTS)


def _scaled(job: Job, sizes: np.ndarray, target: Sides) -> Job:
    """A job that begins with a crop, by which the crop is decoded at a scale."""
    applies = job.params[:, :1]
    boxes = job.params[:, 1:5]
    other_params = job.params[:, 5:]
    boxes, eighths = scaled_boxes(boxes, sizes, target)
    ops = job.ops + np.array([0, 1], np.int32)
    ops[0] = Op.CROP_SCALED, 0
    return job._replace(
        ops=ops, params=np.column_stack([applies, boxes, eighths, other_params])
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
    transform: SampleTransform,
    images: np.ndarray,
    job: Job,
    keys: np.ndarray,
    done: np.ndarray,
) -> None:
    """Have the library do the rest of the steps, sample by sample, and put its images into a job's results."""
    row_keys = keys.tolist()
    for row in np.flatnonzero(done).tolist():
        try:
            image = transform.finish(images[row], {}, row_keys[row])["image"]
        except Exception:  # the straight loop meets it again, and says what it is
            done[row] = False
            continue
        is_like = image.dtype == job.out.dtype
        # else nothing was written
        done[row] = is_like and image.shape[:2] == job.out.shape[1:3]
        if done[row]:
            job.put(row, image)
