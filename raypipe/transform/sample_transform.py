"""One sample and its key → one image; history never shows.

    SampleTransform   an image, or one of which only the crop is decoded → uint8 (H, W, 3)
    Images            B samples → image uint8 (B, H, W, 3)

Three kinds of transform are told apart by the names of their classes, so that neither torch nor
Albumentations is imported for a user who has none of it:

    kind             is given                                its randomness, set from the key
    Albumentations   image=uint8 HWC                         its own generators, shared and rewound
    torchvision      tv_tensors.Image, uint8 CHW             torch's, random's and numpy's global ones
    plain, rng=      uint8 HWC and rng=numpy Generator       the one that it is handed
    plain            uint8 HWC                               random's, numpy's and torch's global ones

A plain callable that keeps a generator of its own escapes this: let it take `rng`.
"""

from __future__ import annotations

import copy
import inspect
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import cv2
import numpy as np

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError, SampleError
from raypipe.transform.crop_decode import CropDecoder, Undecoded, cut, find_crop_first
from raypipe.transform.decode import decode
from raypipe.transform.sample_cache import Decoded

Key = tuple[int, int]
"""Two integers in [0, 2^64), from `Plan.sample_keys`."""

Kind = Literal["none", "albumentations", "torchvision", "plain"]


class EncodedSample(NamedTuple):
    """What a store holds of one sample; a target that is not asked for is None."""

    image: bytes | None
    mask: Any = None
    boxes: Any = None


class KeyedGenerator:
    """One numpy generator that is put where a fresh `Generator(Philox(key=key))` would stand.

    That costs a few microseconds a sample; making a new one costs tens.
    """

    def __init__(self) -> None:
        self._philox = np.random.Philox(0)
        self._state: Any = self._philox.state  # of a fresh generator: counter 0, buffer used up
        self.generator = np.random.Generator(self._philox)

    def rewind(self, key: Key) -> np.random.Generator:
        """The generator, as if it were new."""
        self._state["state"]["key"][:] = key
        self._philox.state = self._state
        return self.generator


class SampleTransform:
    """A transform of one image whose result depends on the pixels, the transform and the key alone.

    It holds one set of random generators and rewinds them for every sample, so an object serves one thread at a
    time. It pickles as its transform.

    Args:
        transform: see the module's table; None leaves the image as it is. An Albumentations
            transform is copied, since the generators are put into it.
    """

    def __init__(self, transform: Any) -> None:
        # One actor has one core. OpenCV's own threads, one per core of the machine in every actor, would
        # fight over them; unlike OpenMP's they know nothing of OMP_NUM_THREADS, which Ray sets.
        cv2.setNumThreads(1)
        self.kind = _kind_of(transform)
        self.transform = copy.deepcopy(transform) if self.kind == "albumentations" else transform
        self._keyed, self._random = KeyedGenerator(), random.Random()
        generators = self._keyed.generator, self._random
        rng_name = _rng_parameter(transform) if self.kind == "plain" else None
        self._rng = {rng_name: self._keyed.generator} if rng_name else {}
        if self.kind == "albumentations":
            # Not set_random_seed: it gives every child the same seed, so that two flips always agree.
            self.transform.set_random_state(*generators)
        self._crop_first = find_crop_first(self.transform, generators)

    def __reduce__(self) -> Any:
        return SampleTransform, (self.transform,)

    @property
    def crop_target(self) -> tuple[int, int] | None:
        """(height, width) to which a random resized crop at the very beginning resizes; None: there is none."""
        return self._crop_first.target if self._crop_first else None

    def __call__(self, image: np.ndarray | Undecoded, key: Key) -> np.ndarray:
        """Transform one image.

        Args:
            image: uint8 RGB of shape (H, W, 3), writable; the transform may write into it. Or one that is not
                decoded, where there is a `crop_target`: the result is the same.
            key: decides everything random.

        Returns:
            uint8 of shape (h, w, 3); it may be a view, or `image` itself.

        Raises:
            ConfigError: the transform returns anything else.
            Exception: whatever the transform, or what decodes the crop, raises.
        """
        return self.with_targets(image, {}, key)["image"]

    def with_targets(
        self, image: np.ndarray | Undecoded, targets: dict[str, Any], key: Key
    ) -> dict[str, np.ndarray]:
        """A call for an image and what goes with it, `mask` and `bboxes` as Albumentations takes them.

        Returns:
            `image`, the same as without targets, and the targets.
        """
        if self.transform is None:
            assert isinstance(image, np.ndarray)
            return {"image": image, **targets}
        self._seed(int(key[0]), int(key[1]))
        if not isinstance(image, np.ndarray):
            assert self._crop_first is not None
            made = self._crop_first(*image, **targets)
        elif self.kind == "albumentations":
            made = self.transform(image=image, **targets)
        elif self.kind == "torchvision":
            made = self._by_torchvision(image)
        else:
            made = self.transform(image, **self._rng)
        if self.kind != "albumentations":
            return {"image": _checked(made, self.kind)}
        _checked(made["image"], self.kind)
        return made

    def _seed(self, k0: int, k1: int) -> None:
        """Seed what the transform draws from: generators that it is handed (5 µs), or the global ones (15 µs)."""
        cv2.setRNGSeed(k0 & 0x7FFFFFFF)  # OpenCV's randn and kmeans
        if self.kind == "albumentations" or self._rng:
            self._keyed.rewind((k0, k1))
            self._random.seed(k0 << 64 | k1)
            return
        random.seed(k0 << 64 | k1)
        np.random.seed((k0 & 0xFFFFFFFF, k0 >> 32, k1 & 0xFFFFFFFF, k1 >> 32))
        torch = sys.modules.get("torch")  # a transform that uses torch has imported it
        if torch is not None:
            torch.default_generator.manual_seed(k0)  # not torch.manual_seed, which goes to the GPUs as well

    def _by_torchvision(self, image: np.ndarray) -> Any:
        import torch
        from torchvision import tv_tensors

        return self.transform(tv_tensors.Image(torch.from_numpy(image).permute(2, 0, 1)))


def _kind_of(transform: Any) -> Kind:
    if transform is None:
        return "none"
    if not callable(transform):
        raise ConfigError(f"the transform is a {type(transform).__name__}, which cannot be called")
    for cls in type(transform).__mro__:
        package = cls.__module__.partition(".")[0]
        if package == "albumentations" and cls.__name__ in ("BaseCompose", "BasicTransform"):
            return "albumentations"
        is_module = (package, cls.__name__) == ("torch", "Module")
        if is_module or cls.__module__.startswith("torchvision.transforms."):
            return "torchvision"
    return "plain"


def _rng_parameter(transform: Any) -> str | None:
    try:
        parameters = inspect.signature(transform).parameters
    except ValueError:  # some built-in functions have no signature
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = (name for name in ("rng", "generator") if name in parameters and parameters[name].kind in by_name)
    return next(names, None)


def _checked(result: Any, kind: Kind) -> np.ndarray:
    """What a transform of an image returned, as uint8 (h, w, 3)."""
    array, layout, channels = result, "HWC", 2
    if kind == "torchvision":
        is_tensor = isinstance(result, sys.modules["torch"].Tensor)
        array, layout, channels = result.detach().numpy() if is_tensor else None, "CHW", 0
    came = f"a {type(result).__name__}"
    if isinstance(array, np.ndarray):
        if array.dtype == np.uint8 and array.ndim == 3 and array.shape[channels] == 3 and array.size:
            return array if channels else array.transpose(1, 2, 0)
        came = f"{array.dtype} of shape {array.shape}"
    raise ConfigError(
        f"the transform returned {came}; expected is uint8 {layout} with 3 channels (normalisation and the"
        " conversion to floating point happen on the GPU: leave them out of the CPU transform)"
    )


class Images:
    """Decodes and transforms samples to images of one size: `raypipe.transform.micro_batch.Content`.

    Args:
        transform: for `SampleTransform`.
        config: how they are decoded.
        probe: samples to learn the size of the results by, should a micro-batch of nothing but padding come
            first; else the first result decides it.
        store_address: named in errors.
    """

    def __init__(
        self,
        transform: Callable[..., Any] | None,
        config: TransformConfig,
        probe: Callable[[], Iterable[EncodedSample]] = tuple,
        store_address: str = "",
    ) -> None:
        self.sample_transform = SampleTransform(transform)
        self._config, self._probe, self._store_address = config, probe, store_address
        target = self.sample_transform.crop_target
        self._crop_decoder = CropDecoder(config, target) if target and config.crop_decode != "off" else None
        self._size: tuple[int, int] | None = None

    def one(self, sample: EncodedSample | Decoded, key: Key) -> np.ndarray:
        """uint8 (H, W, 3); raises as `open` and `run` do."""
        return self.run(self.open(sample), {}, key)["image"]

    def open(self, sample: EncodedSample | Decoded) -> np.ndarray | Undecoded:
        """An image for `run`: decoded, or not yet where the transform begins with a random resized crop.

        Raises:
            SampleError: it cannot be decoded.
        """
        if isinstance(sample, Decoded):
            pixels = sample.pixels  # which may be read-only
            if self._crop_decoder:
                return pixels.shape[:2], lambda box: cut(pixels, box).copy()
            return pixels if pixels.flags.writeable else pixels.copy()
        jpeg = self._crop_decoder.open(sample.image) if self._crop_decoder else None
        return jpeg or decode(sample.image, min_side=self._config.decode_min_side, exif=self._config.exif)

    def run(self, image: np.ndarray | Undecoded, targets: dict[str, Any], key: Key) -> dict[str, np.ndarray]:
        """`SampleTransform.with_targets`, whose image is of the size of those before.

        Raises:
            SampleError: the transform raised on the sample.
            ConfigError: its result is not uint8 HWC, or of another size.
        """
        try:
            made = self.sample_transform.with_targets(image, targets, key)
        except (SampleError, ConfigError, MemoryError):
            # The decoder's own; the user's set-up, or the machine's state: not the sample's fault.
            raise
        except Exception as error:
            raise SampleError(f"the transform raised {type(error).__name__}: {error}") from error
        height, width = made["image"].shape[:2]
        self._size = self._size or (height, width)
        if self._size != (height, width):
            raise ConfigError(
                f"the transform made an image of {height}x{width} (height x width), where"
                f" {self._size[0]}x{self._size[1]} is expected as for the others: end the transform with a crop"
                " or resize to a fixed size"
            )
        return made

    def pack(self, images: Iterable[np.ndarray | None], num_samples: int) -> dict[str, np.ndarray]:
        """`image`: uint8 (B, H, W, 3), with zeros for None."""
        out: np.ndarray | None = None
        missing = []
        for position, image in enumerate(images):
            if image is None:
                missing.append(position)
                continue
            if out is None:
                out = np.empty((num_samples, *image.shape), np.uint8)
            out[position] = image
        if out is None:
            out = np.empty((num_samples, *(self._size or self._probed_size()), 3), np.uint8)
        out[missing] = 0
        return {"image": out}

    def _probed_size(self) -> tuple[int, int]:
        for sample in self._probe():
            try:
                height, width, _ = self.one(sample, (0, 0)).shape
            except SampleError:
                continue
            return height, width
        raise ConfigError(
            f"{self._store_address or 'the store'} has no readable sample among its first: "
            "the size of its images cannot be told"
        )
