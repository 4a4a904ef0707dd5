"""Makes the fields of samples: an image and its targets, or its views; label and columns.

    fast    many samples at once, as far as the kernel can
    slow    any sample; it has the last word on what is bad, and says why


With `transform.decode: array`, images and views have the dtype and the channels C that the transform gives
them, all alike: (B, H, W, C). With `transform.decode: device` there are encoded images instead, see
`raypipe.transform.encoded`.

Excluded rows are black, and their targets are what `raypipe.transform.targets` fills them with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError, SampleError
from raypipe.kernel import Program, follow
from raypipe.plan.places import Sides
from raypipe.stores.base import Columns
from raypipe.transform.at_once import KernelImages, join_crops, view_images
from raypipe.transform.columns import NO_COLUMNS, ColumnMaker, SampleColumns
from raypipe.transform.decode.array import decoder_of
from raypipe.transform.decode.jpeg import Undecoded, open_for_crop
from raypipe.transform.decode.rgb import (
    image_size,
    stored_bytes,
    stored_orientation,
)
from raypipe.transform.encoded import EncodedImages
from raypipe.transform.encoded_map import DATA, MAP
from raypipe.transform.fields import (
    IMAGE,
    LABEL,
    Arrays,
    BatchFields,
    Field,
    Rows,
    SampleFields,
    Shape,
    images_in,
    learn,
)
from raypipe.transform.keys import Key
from raypipe.transform.presets import build_transform
from raypipe.transform.sample_transform import SampleTransform
from raypipe.transform.samples import NO_LABEL, WRONG_LABEL
from raypipe.transform.sizes import Size
from raypipe.transform.targets import TARGETS, decode_targets
from raypipe.transform.transform_steps import brief
from raypipe.transform.user_code import failing


def stream_fields(
    config: TransformConfig, columns: SampleColumns = NO_COLUMNS
) -> dict[str, Field]:
    """The fields of a stream's samples, by name; a transform of views has these instead of an image."""
    targets = {name: TARGETS[name].field(config) for name in config.target_columns}
    if config.decode == "device":
        images = {DATA: Field("bytes"), MAP: Field()}
    else:
        images = {IMAGE: Field()}
    return {**images, **targets, **columns.fields()}


class SampleMaker:
    """Makes the fields of samples: an image of one size and its targets, or views; label and columns.

    Args:
        transform: a value of `transform.train`, or a callable.
        config: settings of the decode and the targets.
        columns: the stream's columns.
        size: size of the images; None = the config's last.
        sides: (height, width) required of results; None = those of the first.
        threads: number of threads that make the images of a micro-batch by programs.

    Attributes:
        fields: fields of a sample, by name; the first sample sets unknown shapes.
        has_user_code: whether it runs code of the user's.

    Raises:
        ConfigError: a setting is wrong, or does not fit the kind of transform.
    """

    def __init__(
        self,
        transform: Any,
        config: TransformConfig,
        columns: SampleColumns = NO_COLUMNS,
        size: Size | None = None,
        sides: Sides | None = None,
        threads: int = 1,
    ) -> None:
        self.fields = stream_fields(config, columns)
        self._config = config
        self._sides = sides
        self._targets = config.target_columns
        are_rgb = config.decode != "array"
        built = build_transform(
            transform, size or config.final_size, by_library=not are_rgb
        )
        self._views = view_images(built, are_rgb, tuple(self._targets))
        self._transforms = [view.transform for view in self._views]
        self._has_views = self._views[0].field != IMAGE
        self._columns = ColumnMaker(columns) if columns else None
        self.has_user_code = columns.function is not None or any(
            transform.has_user_code for transform in self._transforms
        )
        self._decode = decoder_of(config)
        # Crops are taken of undecoded JPEGs; views share one decoding of the whole image.
        self._crops_first = self._transforms[0].crops_first and not self._has_views
        self._at_once: KernelImages | EncodedImages | None = None
        self._encoded: EncodedImages | None = None
        if config.decode == "device":
            only = None if self._has_views else self._transforms[0]
            self._encoded = EncodedImages(only, brief(transform), config.apply_exif)
            self._at_once = self._encoded
            self.fields[MAP] = self._encoded.field
        elif are_rgb:
            self._use_kernel(threads)

    @property
    def draws_globally(self) -> bool:
        """True if it draws from generators that all threads share, as a first call may show."""
        if self._columns is not None and self._columns.draws_globally:
            return True
        return any(transform.draws_globally for transform in self._transforms)

    def _use_kernel(self, threads: int) -> None:
        """Have the kernel make the images, if all of them begin with a program."""
        has_rest = any(transform.has_rest for transform in self._transforms)
        programs = [transform.program for transform in self._transforms]
        if None in programs or (self._targets and has_rest):
            return
        self._at_once = KernelImages(
            self._views, self._config.apply_exif, self._decode, threads
        )
        if not has_rest:  # sizes are known before the first sample
            sizes = [program.size or () for program in programs if program]
            blanks = [np.empty((*size, 3), np.uint8) for size in sizes]
            self._check(join_crops(self._views, blanks))

    def make(self, samples: Columns, keys: np.ndarray) -> Rows:
        """Make a micro-batch of samples, of which none is bad: for measurements.

        Args:
            keys: uint64 (B, 2).

        Raises:
            SampleError, ConfigError: see `slow`.
        """
        num = len(keys)
        out = Rows(self.fields, num)
        everything = np.ones(num, bool)
        is_made = self.fast(samples, np.arange(num), keys, everything, out)
        for row in np.flatnonzero(~is_made).tolist():
            out.put(row, row, self.slow(samples, row, keys[row].tolist()))
        return out

    def finish(self, out: Rows, rows: slice, key: Key) -> BatchFields:
        """Return the fields of a micro-batch whose rows are made; nothing is drawn under its key."""
        return out.finish(rows)

    @property
    def transforms(self) -> list[tuple[str, SampleTransform]]:
        """The transform of each image, with its field."""
        return [(view.field, view.transform) for view in self._views]

    def drawn(
        self, samples: Columns, keys: np.ndarray
    ) -> Iterator[tuple[str, Program, np.ndarray, np.ndarray]]:
        """Yield the numbers that programs draw for samples, for each image of a sample that begins with one.

        Args:
            keys: uint64 (B, 2).

        Yields:
            The image's field; its program; int64 (B, P), see `Program.draw`; and bool (B,), the rows whose images
            have a size, without which nothing is drawn.
        """
        sizes = np.zeros((len(keys), 2), np.int64)
        for row, image in enumerate(samples.images):
            with contextlib.suppress(SampleError):
                sizes[row] = image_size(image, exif=self._config.apply_exif)
        is_known = sizes[:, 0] > 0
        for view in self._views:
            program = view.transform.program
            if program is not None:
                params, _ = program.draw(view.keys(keys), np.maximum(sizes, 1))
                yield view.field, program, params, is_known

    def weaken(self, strength: float) -> None:
        """Scale the chances and magnitudes of its programs by a strength in [0, 1], from now on."""
        for transform in self._transforms:
            transform.weaken(strength)

    def slow(self, samples: Columns, row: int, key: Key) -> SampleFields:
        """Make the fields of one of some samples, see `raypipe.transform.fields`.

        Raises:
            SampleError: any part of it cannot be decoded or does not fit its image; or label or columns are wrong.
            TransformError: the transform failed on it.
            ConfigError: the transform's result has a wrong kind or size, or too many boxes.
        """
        # first: they cost less than an image
        other_fields = self._others(samples, row, key)
        if self._encoded:
            encoded, drawn, size = self._encoded.fields_of(samples.images[row], key)
            return encoded | self._followers(samples, row, drawn, size) | other_fields
        encoded_image = stored_bytes(samples.images[row])
        image: np.ndarray | Undecoded | None = None
        if self._crops_first:
            image = open_for_crop(encoded_image, self._config.apply_exif)
        if image is None:
            image = self._decode(encoded_image)
        size = image.shape[:2] if isinstance(image, np.ndarray) else image[0]
        targets = self._decoded_targets(samples, row, size)
        with failing("the transform"):
            made = self._transformed(image, _by_keyword(targets), key)
        fields = images_in(made)
        self._check(fields)
        if targets:
            fields |= self._finished(made, targets, made[IMAGE].shape)
        return fields | other_fields

    def fast(
        self,
        samples: Columns,
        indices: np.ndarray,
        keys: np.ndarray,
        is_wanted: np.ndarray,
        out: Rows,
        first: int = 0,
    ) -> np.ndarray:
        """Make rows of a micro-batch as far as the kernel can; `slow` makes or rejects the others.

        Args:
            indices: int64 (B,), of the samples.
            keys: uint64 (B, 2).
            is_wanted: bool (B,), the rows to make.
            out: the memory to fill, from row number `first` on.

        Returns:
            bool (B,): the rows that it made.
        """
        is_made = np.zeros(len(indices), bool)
        if self._at_once is None or not out.arrays:
            return is_made
        is_wanted = is_wanted & (samples.labels != NO_LABEL)
        rows = slice(first, first + len(indices))
        arrays = {name: array[rows] for name, array in out.arrays.items()}
        for made in self._at_once.make(samples, is_wanted, keys, arrays):
            if not self._targets and self._columns is None and made.fields is None:
                out.put_labels(
                    first + made.rows, indices[made.rows], samples.labels[made.rows]
                )
                is_made[made.rows] = True
                continue
            for number, row in enumerate(made.rows.tolist()):
                with contextlib.suppress(SampleError, ConfigError):
                    # `slow` meets it again
                    height, width = made.sizes[number].tolist()
                    fields = self._others(samples, row, keys[row].tolist())
                    fields |= self._followers(
                        samples, row, made.params[number], (height, width)
                    )
                    if made.fields is not None:
                        fields |= made.fields[number]
                    out.put(first + row, int(indices[row]), fields)
                    is_made[row] = True
        return is_made

    @property
    def image_shape(self) -> Shape:
        """(H, W, C) of the images, also where the device makes them; empty: not known yet, or of views."""
        if self._encoded:
            return self._encoded.image_shape
        return self.fields.get(IMAGE, Field()).shape or ()

    def _others(self, samples: Columns, row: int, key: Key) -> SampleFields:
        """Label and columns of a sample."""
        label = int(samples.labels[row])
        if label == NO_LABEL:
            raise SampleError(WRONG_LABEL)
        columns = self._columns.one(samples.row(row), key) if self._columns else {}
        return {LABEL: label, **columns}

    def _transformed(
        self, image: np.ndarray | Undecoded, targets: SampleFields, key: Key
    ) -> SampleFields:
        """The images that are made of a sample's, and its targets."""
        if not self._has_views:
            return self._transforms[0].with_targets(image, targets, key)
        assert isinstance(image, np.ndarray), "there is no crop target"
        crops = []
        for view in self._views:
            crop_key = view.keys(np.array(key, np.uint64)).tolist()
            # A transform may write into what it is given, and all are given the same image.
            result = view.transform.with_targets(image.copy(), {}, crop_key)
            if IMAGE not in result:
                raise ConfigError(
                    f"a transform of {view.field} made several images, and a view is one"
                )
            crops.append(result[IMAGE])
        return join_crops(self._views, crops)

    def _followers(
        self, samples: Columns, row: int, params: np.ndarray, size: Sides
    ) -> Arrays:
        """The fields of targets that follow an image of this size through the program."""
        if not self._targets:
            return {}
        program = self._transforms[0].program
        assert program is not None and program.size is not None
        targets = self._decoded_targets(samples, row, size)
        return self._finished(
            follow(program.applied(params), size, _by_keyword(targets)),
            targets,
            program.size,
        )

    def _decoded_targets(self, samples: Columns, row: int, size: Sides) -> Arrays:
        """Targets of an image of this size; an error says so where the image is one that metadata turns."""
        try:
            columns = samples.row(row) if self._targets else {}
            form = self._config.boxes_format
            return decode_targets(columns, self._targets, size, form)
        except SampleError as error:
            orientation = 1
            if self._config.decode != "array":
                orientation = stored_orientation(stored_bytes(samples.images[row]))
            if orientation == 1:
                raise
            hint = "off: set it if targets are those of the upright image"
            if self._config.apply_exif:
                hint = "on: targets must be those of the upright image"
            raise SampleError(
                f"{error}; the photo says that it is turned (EXIF orientation {orientation}), and "
                f"transform.apply_exif is {hint}"
            ) from error

    def _finished(
        self,
        transformed: Arrays,
        targets: Arrays,
        shape: Shape,
    ) -> Arrays:
        """The fields of targets behind the transform; `shape` is that of the image."""
        limit = self._config.max_targets
        return {
            name: TARGETS[name].finish(
                transformed[TARGETS[name].keyword], value, shape, limit
            )
            for name, value in targets.items()
        }

    def _check(self, images: Arrays) -> None:
        """Raise ConfigError unless an image, or views, have the size that is asked for, and are as the first."""
        sides = images[IMAGE].shape[:2] if IMAGE in images else ()
        if self._sides and sides != self._sides:
            raise ConfigError(
                f"the transform made an image of {sides}, and by transform.size"
                f" it must be {self._sides}, (height, width): end it with a crop or resize to the size that a"
                " module:function is called with"
            )
        expected = images_in(self.fields)
        fields = {
            name: Field("array", image.dtype.name, image.shape)
            for name, image in images.items()
        }
        if any(field.shape is None for field in expected.values()):
            learn(self.fields, images)
        elif fields != expected:
            raise ConfigError(
                f"the transform made {_in_words(fields)}, where {_in_words(expected)} is expected as for the "
                "others: samples must have one dtype and as many channels, and the transform end with a crop or "
                "resize to a fixed size"
            )


def _by_keyword(targets: Arrays) -> Arrays:
    return {TARGETS[name].keyword: value for name, value in targets.items()}


def _in_words(images: dict[str, Field]) -> str:
    return ", ".join(
        f"{name} {field.dtype} {field.shape}" for name, field in images.items()
    )
