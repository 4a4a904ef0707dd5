"""Images that are made of samples: the only one, whose field is `image`, or the crops of views.

Those of a micro-batch are made by programs, in one call where possible:

    JPEGs that the kernel takes        decoded and transformed by it
    other encoded images               decoded here, some at a time, and transformed by it; or, where there is
                                       no kernel, by the reference

A row that neither can make (damaged, or too small for a crop) is left to the loop over samples, which raises
the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raypipe import kernel
from raypipe.errors import ConfigError, SampleError
from raypipe.kernel import DONE, Job
from raypipe.plan.order import mix64
from raypipe.stores.base import Columns
from raypipe.transform.decode.jpeg import sizes_by_header
from raypipe.transform.decode.rgb import stored_bytes
from raypipe.transform.fields import IMAGE, VIEW, Arrays, MadeRows
from raypipe.transform.sample_transform import SampleTransform
from raypipe.transform.views import view_key

_MAX_DECODED = 32 << 20  # bytes of pixels that are decoded before a call


@dataclass(frozen=True)
class ViewImage:
    """An image that is made of a sample.

    Attributes:
        field: the name of its field.
        transform: the transform that makes it.
        crop: its number among the crops of a view; None = the field has no other.
        key: two words that no other crop of a view has; None = the image has the sample's key itself.
    """

    field: str
    transform: SampleTransform
    crop: int | None = None
    key: np.ndarray | None = None

    def keys(self, keys: np.ndarray) -> np.ndarray:
        """Derive its keys, uint64 (…, 2), from those of the samples."""
        if self.key is None:
            return keys
        return mix64(self.key ^ keys)

    def output(self, arrays: Arrays) -> np.ndarray:
        """The memory of this image of B samples among the arrays of a micro-batch."""
        out = arrays[self.field]
        return out if self.crop is None else out[:, self.crop]


def view_images(
    transform: Any, are_rgb: bool = True, targets: Collection[str] = ()
) -> list[ViewImage]:
    """The images that a transform makes of a sample, which is from `build_transform`; see `SampleTransform`."""
    if not isinstance(transform, Mapping):
        return [ViewImage(IMAGE, SampleTransform(transform, are_rgb, targets))]
    images = []
    for name, view in transform.items():
        transforms = [
            SampleTransform(view_transform, are_rgb)
            for view_transform in view.transforms
        ]
        for number in range(view.count):
            images.append(
                ViewImage(
                    f"{VIEW}.{name}",
                    transforms[number % len(transforms)],
                    number if view.count > 1 else None,
                    view_key(name, number),
                )
            )
    return images


def join_crops(views: Sequence[ViewImage], images: Sequence[np.ndarray]) -> Arrays:
    """Join images, each made by one of `views`, by field: (h, w, 3), or (n, h, w, 3) for n crops.

    Raises:
        ConfigError: the crops of a field differ in size or dtype.
    """
    crops = dict[str, list[np.ndarray]]()
    for view, image in zip(views, images, strict=True):
        crops.setdefault(view.field, []).append(image)
    joined = Arrays()
    for field, of_field in crops.items():
        kinds = sorted({f"{image.dtype} {image.shape}" for image in of_field})
        if len(kinds) > 1:
            raise ConfigError(
                f"the crops of {field} differ, {', '.join(kinds)}: end their transforms with a crop or resize to "
                "a fixed size, and in one dtype"
            )
        joined[field] = np.stack(of_field) if len(of_field) > 1 else of_field[0]
    return joined


class KernelImages:
    """Makes the images of micro-batches by the kernel.

    Args:
        views: the images of each sample; all begin with a program.
        exif: whether images are turned upright.
        decode: decodes images that the kernel does not.
        threads: that the kernel uses.
    """

    def __init__(
        self,
        views: Sequence[ViewImage],
        exif: bool,
        decode: Callable[[bytes], np.ndarray],
        threads: int,
    ) -> None:
        self._views = views
        self._exif = exif
        self._decode = decode
        self._threads = threads

    def make(
        self,
        samples: Columns,
        is_wanted: np.ndarray,
        keys: np.ndarray,
        arrays: Arrays,
    ) -> Iterator[MadeRows]:
        """Make the images of B samples, some rows at a time; slots of those that are not made may hold anything.

        Args:
            is_wanted: bool (B,), the rows that are.
            keys: uint64 (B, 2).
            arrays: by field, (B, …).
        """
        sizes = sizes_by_header(samples.images, self._exif)
        sizes[~is_wanted] = 0
        is_wanted = is_wanted.copy()
        if sizes.any():
            finished = self._run(samples.images, sizes, keys, arrays)
            is_wanted[finished.rows] = False
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
        arrays: Arrays,
    ) -> MadeRows:
        """Make the images of the rows that have sizes."""
        (rows,) = np.nonzero(sizes[:, 0])
        heights = sizes[:, 0].tolist()
        images = [
            image if height else None
            for image, height in zip(images, heights, strict=True)
        ]
        jobs = [_job_of(view, rows, sizes, keys, arrays) for view in self._views]
        done = kernel.run(images, jobs, self._threads) == DONE
        for row in rows[~done[rows]].tolist():
            if isinstance(images[row], np.ndarray):
                done[row] = _by_reference(images[row], jobs, row)
        for view, job in zip(self._views, jobs, strict=True):
            if view.transform.has_rest:
                _finish(view, job.out, arrays, keys, done)
        (rows,) = np.nonzero(done)
        return MadeRows(rows, jobs[0].params[rows], sizes[rows])

    def _decoded(
        self, samples: Columns, is_wanted: np.ndarray
    ) -> Iterator[list[np.ndarray | None]]:
        """The pixels of the rows that are wanted, where they can be had, by row; not too many at a time."""
        images: list[np.ndarray | None] = [None] * len(is_wanted)
        num_bytes = 0
        for row in np.flatnonzero(is_wanted).tolist():
            with contextlib.suppress(SampleError):  # the straight loop says why
                pixels = self._decode(stored_bytes(samples.images[row]))
                images[row] = pixels
                num_bytes += pixels.nbytes
            if num_bytes > _MAX_DECODED:
                yield images
                images = [None] * len(is_wanted)
                num_bytes = 0
        if num_bytes:
            yield images


def _job_of(
    view: ViewImage,
    rows: np.ndarray,
    sizes: np.ndarray,
    keys: np.ndarray,
    arrays: Arrays,
) -> Job:
    """The job that makes a view's images by its program, of which these rows, int (n,), have draws.

    It fills the arrays of a micro-batch, or new memory where steps of the library follow.
    """
    program = view.transform.program
    assert program is not None
    params = np.zeros((len(keys), program.num_params), np.int64)
    params[rows], _ = program.draw(view.keys(keys)[rows], sizes[rows])
    if view.transform.has_rest:
        out = np.empty((len(keys), *(program.size or ()), 3), np.uint8)
        return Job(program.ops, params, out)
    return Job(program.ops, params, view.output(arrays))


def _by_reference(image: np.ndarray, jobs: Sequence[Job], row: int) -> bool:
    try:
        for job in jobs:
            job.out[row] = kernel.apply_all(image, job.ops, job.params[row])
    except ValueError:
        return False
    return True


def _finish(
    view: ViewImage,
    images: np.ndarray,
    arrays: Arrays,
    keys: np.ndarray,
    done: np.ndarray,
) -> None:
    """Have the library do the rest of the steps, sample by sample, and put its images into a micro-batch's arrays.

    Args:
        images: made by the program, (B, H, W, 3).
        done: bool (B,), the rows that are made; those that fail here are cleared.
    """
    out = view.output(arrays)
    row_keys = view.keys(keys).tolist()
    for row in np.flatnonzero(done).tolist():
        try:
            image = view.transform.finish(images[row], {}, row_keys[row])[IMAGE]
        except Exception:  # the straight loop meets it again, and says what it is
            done[row] = False
            continue
        # a row of another form stays unwritten
        done[row] = image.dtype == out.dtype and image.shape[:2] == out.shape[1:3]
        if done[row]:
            out[row] = image
