"""Contents of samples for the model: an image and its targets, or its views.

With `transform.decode_as: array`, images and views have the dtype and the channels C that the transform gives
them, all alike: (B, H, W, C). With `transform.wire: yuv420` the images that are made become planes.

Excluded rows are black, and their targets are what `raypipe.transform.targets` fills them with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError
from raypipe.plan.places import Sides
from raypipe.transform import kernel
from raypipe.transform.at_once import Crop, ProgramsAtOnce, shapes_of
from raypipe.transform.batch import Content
from raypipe.transform.columns import NO_COLUMNS, SampleColumns
from raypipe.transform.decode import decode, stored_bytes
from raypipe.transform.decode_array import decode_array
from raypipe.transform.draws import Key
from raypipe.transform.fields import IMAGE, Drawn, Field, MadeAtOnce, chroma_of, learn
from raypipe.transform.follow import follow
from raypipe.transform.jpeg import open_for_crop
from raypipe.transform.presets import build_transform
from raypipe.transform.sample_transform import SampleTransform
from raypipe.transform.samples import EncodedSample, Samples
from raypipe.transform.sizes import Size, Undecoded
from raypipe.transform.targets import TARGETS, decode_targets
from raypipe.transform.user_code import NOT_OF_A_SAMPLE, failed
from raypipe.transform.views import View
from raypipe.transform.views_transform import ViewsTransform


def stream_fields(config: TransformConfig, columns: SampleColumns = NO_COLUMNS) -> dict[str, Field]:
    """The fields of a stream's samples, by name; a transform of views has these instead of an image."""
    targets = {name: TARGETS[name].field(config) for name in config.target_columns}
    return {IMAGE: Field(), **targets, **columns.fields()}


def build_content(
    transform: Any,
    config: TransformConfig,
    columns: SampleColumns = NO_COLUMNS,
    size: Size | None = None,
    sides: Sides | None = None,
    threads: int = 1,
) -> Content:
    """Build the contents that a transform makes.

    Args:
        transform: a value of `transform.train`, or a callable.
        size: size of the images; None = the config's last.
        sides, threads: see `Images`.

    Raises:
        ConfigError: a setting is wrong, or does not fit the kind of transform.
    """
    fields = stream_fields(config, columns)
    built = build_transform(transform, size or config.final_size, by_library=config.decode_as == "array")
    return Images(built, config, fields, sides, threads)


class Images:
    """Decodes and transforms samples to images of one size, with their targets, or to views.

    Args:
        transform: from `build_transform`; with targets, for `target_pipeline`.
        config: settings of the decode and the targets.
        fields: the stream's fields; None = by the config.
        sides: (height, width) required of results; None = those of the first.
        threads: number of threads that make the images of a micro-batch by programs.
    """

    def __init__(
        self,
        transform: Callable[..., Any] | dict[str, View] | None,
        config: TransformConfig,
        fields: dict[str, Field] | None = None,
        sides: Sides | None = None,
        threads: int = 1,
    ) -> None:
        self.fields = fields or stream_fields(config)
        self._targets = config.target_columns
        self.makes_images_alone = not self._targets
        self._transform: SampleTransform | ViewsTransform
        arrays = self._is_array = config.decode_as == "array"
        if isinstance(transform, dict):
            self._transform = ViewsTransform(transform, arrays)
        else:
            self._transform = SampleTransform(transform, arrays, tuple(self._targets))
        self.draws_globally = self._transform.draws_globally
        self._crop_target = self._transform.crop_target if config.crop_decode != "off" else None
        self._config, self._sides, self._has_planes = config, sides, config.wire == "yuv420"
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, np.dtype[Any]] = {}
        crops = [] if arrays else _crops_of(self._transform, bool(self._targets))
        self._at_once = ProgramsAtOnce(crops, config, threads) if crops else None
        if not any(crop.finish for crop in crops):  # sizes are known before the first sample
            self._learn({name: np.empty(shape, np.uint8) for name, shape in shapes_of(crops).items()})

    def one(self, sample: EncodedSample, key: Key, out: np.ndarray | None = None) -> dict[str, Any]:
        """Decode and transform one sample; its image may be put into `out`, uint8 (H, W, 3), or as arrays are.

        Returns:
            `image`, uint8 (H, W, 3), and the targets, or views; or their planes; see `raypipe.transform.fields`.

        Raises:
            SampleError: any part of it cannot be decoded or does not fit its image.
            TransformError: the transform failed on it.
            ConfigError: the transform's result has a wrong kind or size, or too many boxes.
        """
        image = self._opened(sample)
        targets: dict[str, np.ndarray] = {}
        if self._targets:
            size = image.shape[:2] if isinstance(image, np.ndarray) else image[0]
            targets = decode_targets(sample.columns, self._targets, size)
        given = _by_keyword(targets)
        try:
            made = self._transform.with_targets(image, given, key, None if self._has_planes else out)
        except NOT_OF_A_SAMPLE:
            raise
        except Exception as error:
            raise failed("the transform", error) from error
        images = {IMAGE: made[IMAGE]} if IMAGE in made else made
        self._check(images)
        result = self._on_wire(images)
        if targets:
            result = result | self._finished(made, targets, images[IMAGE].shape)
        if not self._shapes:
            self._learn(images)
            learn(self.fields, result)
        return result

    def at_once(
        self, samples: Samples, wanted: np.ndarray, keys: np.ndarray, arrays: dict[str, np.ndarray]
    ) -> MadeAtOnce:
        """Make the images of a micro-batch in one call, as far as programs can; see `ProgramsAtOnce.make`."""
        if self._at_once is None:
            return MadeAtOnce.nothing(len(samples))
        return self._at_once.make(samples, wanted, keys, arrays)

    def following(self, sample: EncodedSample, drawn: Drawn) -> dict[str, Any]:
        """Return the other fields of an image that `at_once` has made."""
        if not self._targets:
            return {}
        assert isinstance(self._transform, SampleTransform)
        program = self._transform.program
        assert program is not None and program.size is not None
        targets = decode_targets(sample.columns, self._targets, drawn.size)
        made = follow(program, drawn.params, drawn.size, _by_keyword(targets))
        return self._finished(made, targets, program.size)

    def _finished(
        self, made: dict[str, np.ndarray], targets: dict[str, np.ndarray], shape: tuple[int, ...]
    ) -> dict[str, np.ndarray]:
        """The fields of targets behind the transform; `shape` is that of the image."""
        return {
            name: TARGETS[name].finish(made[TARGETS[name].keyword], value, shape, self.fields[name])
            for name, value in targets.items()
        }

    def _learn(self, images: dict[str, np.ndarray]) -> None:
        """Note the shapes of an image, or of views, that all others must have."""
        if not images:
            return
        self._shapes = {name: part.shape for name, part in images.items()}
        self._dtypes = {name: part.dtype for name, part in images.items()}
        self._check(images)
        learn(self.fields, self._on_wire(images))

    def _on_wire(self, images: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The fields of images, or of views, as they travel."""
        if not self._has_planes:
            return images
        fields = dict[str, np.ndarray]()
        for name, image in images.items():
            fields[name], fields[chroma_of(name)] = kernel.planes(image)
        return fields

    def _check(self, made: dict[str, np.ndarray]) -> None:
        """Raise ConfigError unless an image, or views, have the size that is asked for, and that of the others."""
        shapes = {name: part.shape for name, part in made.items()}
        if self._sides and shapes.get(IMAGE, ())[:2] != self._sides:
            raise ConfigError(
                f"the transform made an image of {shapes.get(IMAGE, ())[:2]}, and by transform.size"
                f" it must be {self._sides}, (height, width): end it with a crop or resize to the size that a"
                " module:function is called with"
            )
        if not self._shapes:
            return
        if self._is_array:
            dtypes = {name: part.dtype for name, part in made.items()}
            if (shapes, dtypes) != (self._shapes, self._dtypes):
                expected = _arrays_of(self._shapes, self._dtypes)
                raise ConfigError(
                    f"the transform made {_arrays_of(shapes, dtypes)}, where {expected} is "
                    "expected as for the others: samples must have one dtype and as many channels, and the "
                    "transform end with a crop or resize to a fixed size"
                )
        if shapes != self._shapes:
            raise ConfigError(
                f"the transform made {_sizes(shapes)} (height x width), where {_sizes(self._shapes)} is expected"
                " as for the others: end the transform with a crop or resize to a fixed size"
            )

    def _opened(self, sample: EncodedSample) -> np.ndarray | Undecoded:
        """An image: decoded, or not yet where the transform begins with a random resized crop."""
        encoded = stored_bytes(sample.image)
        if self._is_array:
            return decode_array(encoded)
        jpeg = open_for_crop(encoded, self._config, self._crop_target) if self._crop_target else None
        return jpeg or decode(encoded, exif=self._config.apply_exif)


def _crops_of(transform: SampleTransform | ViewsTransform, has_targets: bool) -> list[Crop]:
    """The images that programs make of each sample; none where a part of them is made in another way."""
    if isinstance(transform, SampleTransform):
        crops = [_crop_of(IMAGE, transform)]
        if has_targets and transform.has_rest:
            return []  # the library does the rest with both at a time
    else:
        parts = iter(transform.parts)
        crops = [
            _crop_of(field, each, number if len(transforms) > 1 else None, next(parts))
            for field, transforms in transform.crops.items()
            for number, each in enumerate(transforms)
        ]
    known = [crop for crop in crops if crop is not None]
    return known if len(known) == len(crops) else []


def _crop_of(
    field: str, transform: SampleTransform, number: int | None = None, part: np.ndarray | None = None
) -> Crop | None:
    if transform.program is None:
        return None
    return Crop(field, transform.program, transform.finish if transform.has_rest else None, number, part)


def _by_keyword(targets: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {TARGETS[name].keyword: value for name, value in targets.items()}


def _sizes(shapes: dict[str, tuple[int, ...]]) -> str:
    """Sizes of an image or of views, for an error."""
    sides = {name: "x".join(map(str, shape[:-1])) for name, shape in shapes.items()}
    return f"an image of {sides[IMAGE]}" if IMAGE in sides else f"views of {sides}"


def _arrays_of(shapes: dict[str, tuple[int, ...]], dtypes: dict[str, np.dtype[Any]]) -> str:
    """Return the fields with channels and dtypes."""
    return ", ".join(f"{name} {dtypes[name]} {shape}" for name, shape in shapes.items())
