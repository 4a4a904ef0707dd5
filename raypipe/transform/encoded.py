"""Encoded images for the training device to decode, and where their pixels go: `transform.decode: device`.

See `raypipe.transform.encoded_map` for the fields.

An actor reads no more of an image than its header. Crops and flips are drawn by the same program, under the same
keys, as with `decode: cpu`, so they are the same. A program qualifies if all of its steps move pixels along rows
and columns: crops, resizes, borders of one color, flips and quarter turns. `raypipe.device.decoders` does them.

A sample is bad here if its header cannot be read, the image is too small for its crop, or a JPEG's end is missing
and it cannot be decoded. Other damage shows where it is decoded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from raypipe.errors import ConfigError, SampleError
from raypipe.kernel import CUBIC, LINEAR, Op, Pad, Program
from raypipe.plan.places import Sides
from raypipe.stores.base import Columns
from raypipe.transform.albumentations import why_no_program
from raypipe.transform.decode.jpeg import check_checksum, sizes_by_header
from raypipe.transform.decode.rgb import decode, image_size, stored_bytes
from raypipe.transform.encoded_map import (
    AXES,
    DATA,
    MAP,
    NUM_RESIZE,
    RESIZES,
    axis_columns,
)
from raypipe.transform.fields import Arrays, Field, MadeRows, SampleFields
from raypipe.transform.keys import Key
from raypipe.transform.sample_transform import SampleTransform
from raypipe.transform.user_code import failed

_MOVES = {Op.CROP, Op.RESIZE, Op.PAD, Op.TURN}
_CONSTANT = 0  # OpenCV's number of the border
_JPEG = b"\xff\xd8\xff"
_END_OF_IMAGE = b"\xff\xd9"


class EncodedImages:
    """Maps of images by a program that only moves pixels.

    Args:
        transform: makes a sample's only image; None = the transform makes views.
        given: the name of the transform, for messages.
        exif: whether images are turned upright.

    Attributes:
        field: the maps' field. Its filling has the size of the results, so padding has it too.

    Raises:
        ConfigError: the transform does more than to move pixels along rows and columns.
    """

    def __init__(
        self, transform: SampleTransform | None, given: str, exif: bool = False
    ) -> None:
        self._exif = exif
        self._transform, program = _qualified(transform, given)
        self._steps = [(step, op) for step in program.steps for op in step.ops]
        num_resizes = max(1, sum(op == Op.RESIZE for _, op in self._steps))
        fills = {step.color for step, _ in self._steps if isinstance(step, Pad)}
        if len(fills) > 1:
            raise _refused(f"{given}: borders of several colors")
        (self._fill,) = fills or {(0, 0, 0)}
        self.image_shape = (*(program.size or ()), 3)
        num_columns = AXES + 2 * (RESIZES + NUM_RESIZE * num_resizes)
        blank = [0] * num_columns
        for axis, side in enumerate(program.size or ()):
            blank[axis_columns(num_columns, axis).stop - 1] = side
        self.field = Field("array", "int32", (num_columns,), tuple(blank))

    def maps(
        self, keys: np.ndarray, sizes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw the maps of B images, by the program at the strength of now.

        Args:
            keys: uint64 (B, 2).
            sizes: (height, width) of the images, int (B, 2).

        Returns:
            The parameters, see `Program.draw`; the maps, int32 (B, n); and which images are large enough for their
            crops, bool (B,).
        """
        program = self._transform.program
        assert program is not None
        params, _ = program.draw(keys, sizes)
        axes = _MovedAxes(sizes)
        columns = program.ops[:, 1].tolist()
        for (made_by, op), column in zip(self._steps, columns, strict=True):
            numbers = params[:, column + 1 :]
            if op == Op.CROP:
                axes.crop(numbers)
            elif op == Op.PAD:
                axes.pad(numbers)
            elif op == Op.TURN:
                axes.turn(numbers[:, 0] * params[:, column])
            else:
                interpolation = getattr(made_by, "interpolation", LINEAR)
                axes.resize(numbers[:, :2].T, interpolation)
        return params, axes.maps(self._fill), axes.fits

    def make(
        self,
        samples: Columns,
        is_wanted: np.ndarray,
        keys: np.ndarray,
        arrays: Arrays,
    ) -> Iterator[MadeRows]:
        """Make the fields of those of B samples whose images need no more than their header here.

        Args:
            is_wanted: bool (B,), the rows that are.
            keys: uint64 (B, 2).
            arrays: stay as they are.
        """
        sizes = sizes_by_header(samples.images, self._exif)
        (rows,) = np.nonzero(is_wanted & (sizes[:, 0] > 0))
        params, maps, fits = self.maps(keys[rows], sizes[rows])
        whole = []
        fields = []
        for number in np.flatnonzero(fits).tolist():
            image = samples.images[rows[number]]
            with contextlib.suppress(SampleError):  # the slow road meets it again
                _check_whole(image, self._exif)
                fields.append({DATA: stored_bytes(image), MAP: maps[number]})
                whole.append(number)
        yield MadeRows(rows[whole], params[whole], sizes[rows[whole]], fields)

    def fields_of(self, image: Any, key: Key) -> tuple[SampleFields, np.ndarray, Sides]:
        """The encoded fields of one image, its parameters by the program, and its (height, width).

        Raises:
            SampleError: it is bad.
        """
        size = image_size(image, exif=self._exif)
        _check_whole(image, self._exif)
        keys = np.array([key], np.uint64)
        (params,), (of_image,), (fits,) = self.maps(keys, np.array([size]))
        if not fits:
            raise failed(
                "the transform",
                ValueError(f"crop exceeds image dimensions: {size} (height, width)"),
            )
        return {DATA: stored_bytes(image), MAP: of_image}, params, size


def _check_whole(image: Any, exif: bool) -> None:
    """Raise SampleError for a JPEG that is cut short, as most damaged files are, or fails its checksum."""
    check_checksum(image)
    if bytes(image[:3]) == _JPEG and bytes(image[-2:]) != _END_OF_IMAGE:
        decode(stored_bytes(image), exif=exif)


class _MovedAxes:
    """Rows (0) and columns (1) of B images, as the steps of a program move them.

    Pixel i of an axis is pixel start + step * i of the image, or of the last resize; `length` pixels are left.

    Args:
        sizes: (height, width) of the images, int (B, 2).

    Attributes:
        fits: bool (B,), images that are large enough for their crops.
    """

    def __init__(self, sizes: np.ndarray) -> None:
        self._length = sizes.T.astype(np.int64)
        self._start = np.zeros_like(self._length)
        self._step = np.ones_like(self._length)
        # those of a map, of both axes, as far as they are known: the image's sides first
        self._columns = [self._length.copy()]
        self._turned = np.zeros(len(sizes), np.int64)
        self.fits = np.ones(len(sizes), bool)

    def crop(self, boxes: np.ndarray) -> None:
        """Keep a box: (top, left, height, width)."""
        sides = boxes[:, 2:4].T
        self.fits &= (self._length >= sides).all(axis=0)
        self._start = self._start + self._step * boxes[:, :2].T
        self._length = sides.copy()

    def pad(self, borders: np.ndarray) -> None:
        """Add borders: (top, bottom, left, right)."""
        before = borders[:, [0, 2]].T
        behind = borders[:, [1, 3]].T
        self._start = self._start - self._step * before
        self._length = self._length + before + behind

    def turn(self, codes: np.ndarray) -> None:
        """Transpose images (4), then reverse their rows (2) and columns (1)."""
        swapped = (codes & 4) > 0
        for array in (*self._columns, *self._span):
            array[:, swapped] = array[::-1][:, swapped]
        self._turned ^= swapped
        flipped = np.stack([codes & 2, codes & 1]) > 0
        last = self._start + self._step * (self._length - 1)
        self._start = np.where(flipped, last, self._start)
        self._step = np.where(flipped, -self._step, self._step)

    def resize(self, sides: np.ndarray, interpolation: int) -> None:
        """Resize the pixels that are left to sides, int (2, B)."""
        if len(self._columns) == 1:
            # a span of the image is read forwards, and turned around behind the resize
            is_reversed = self._step < 0
            first = np.where(is_reversed, self._start - (self._length - 1), self._start)
            self._columns += [first, self._length]
            self._start = np.where(is_reversed, sides - 1, 0)
        else:
            self._columns += self._span
            self._start = np.zeros_like(self._start)
            self._step = np.ones_like(self._step)
        self._columns += [np.full_like(self._length, interpolation), sides.copy()]
        self._length = sides.copy()

    @property
    def _span(self) -> list[np.ndarray]:
        """The columns of the pixels that are left of the last resize."""
        return [self._start, self._step, self._length]

    def maps(self, fill: tuple[int, ...]) -> np.ndarray:
        """The maps, int32 (B, n), with a color beyond the edges."""
        if len(self._columns) == 1:  # a resize that leaves the pixels as they are
            self.resize(self._length, LINEAR)
        rows, columns = np.stack([*self._columns, *self._span], axis=-1)
        colors = np.tile(fill, (len(self._turned), 1))
        head = np.column_stack([self._turned, colors])
        return np.hstack([head, rows, columns]).astype(np.int32)


def _qualified(
    transform: SampleTransform | None, given: str
) -> tuple[SampleTransform, Program]:
    if transform is None:
        raise _refused(f"{given}: several views")
    program = transform.program
    if program is None or transform.has_rest:
        why = "its images have their own sizes: end with a crop or resize to one"
        if transform.transform is not None:
            why = why_no_program(transform.transform)
        raise _refused(f"{given}: {why}")
    for step in program.steps:
        name = type(step).__name__
        if not {*step.ops} <= _MOVES:
            raise _refused(f"{given}: the step {name}")
        if isinstance(step, Pad) and step.border_mode != _CONSTANT:
            raise _refused(f"{given}: {name} with border_mode={step.border_mode}")
        interpolation = getattr(step, "interpolation", LINEAR)
        if interpolation not in (LINEAR, CUBIC):
            raise _refused(f"{given}: {name} with interpolation={interpolation}")
    return transform, program


def _refused(why: str) -> ConfigError:
    return ConfigError(
        f"{why}: transform.decode='device' has the presets light, center, resize and flip-crop, and steps that "
        "crop, resize (linear, cubic), pad with a color, flip, or turn by 90 degrees. Move the others to "
        "`augment` (augment.preset, augment.ops, augment.module), or set transform.decode='cpu'"
    )
