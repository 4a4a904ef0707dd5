"""One image and its key → one image; history never shows.

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
from collections.abc import Callable
from typing import Any, Literal

import cv2
import numpy as np

from raypipe.errors import ConfigError
from raypipe.transform.crop_first import AlbumentationsCropFirst, DecodeBox, find_crop_first

Key = tuple[int, int]
"""Two integers in [0, 2^64), from `Plan.sample_keys`."""


class SampleTransform:
    """A transform of one image whose result depends on the pixels, the transform and the key alone.

    It holds one set of random generators and rewinds them for every sample, which costs a few
    microseconds; making new ones costs tens. So an object serves one thread at a time. It pickles as
    its transform.

    Args:
        transform: see the module's table; None leaves the image as it is. An Albumentations
            transform is copied, since the generators are put into it.
    """

    def __init__(self, transform: Callable[..., Any] | None) -> None:
        # One actor has one core. OpenCV's own threads, one per core of the machine in every actor, would
        # fight over them; unlike OpenMP's they know nothing of OMP_NUM_THREADS, which Ray sets.
        cv2.setNumThreads(1)
        self.kind = _kind_of(transform)
        self.transform = copy.deepcopy(transform) if self.kind == "albumentations" else transform
        self._philox = np.random.Philox(0)
        self._philox_state: Any = self._philox.state  # of a fresh generator: counter 0, buffer used up
        self._generator = np.random.Generator(self._philox)
        self._random = random.Random()
        self._rng_name = _rng_parameter(transform) if self.kind == "plain" else None
        if self.kind == "albumentations":
            # Not set_random_seed: it gives every child the same seed, so that two flips always agree.
            self.transform.set_random_state(self._generator, self._random)  # type: ignore[union-attr]
        self._crop_first = find_crop_first(self.transform, (self._generator, self._random))

    def __getstate__(self) -> Any:
        return {"transform": self.transform}

    def __setstate__(self, state: Any) -> None:
        self.__init__(state["transform"])  # type: ignore[misc]

    def __call__(self, image: np.ndarray, key: Key) -> np.ndarray:
        """Transform one image.

        Args:
            image: uint8 RGB of shape (H, W, 3), writable; the transform may write into it.
            key: decides everything random.

        Returns:
            uint8 of shape (h, w, 3); it may be a view, or `image` itself.

        Raises:
            ConfigError: the transform returns anything else.
            Exception: whatever the transform raises.
        """
        if self.transform is None:
            return image
        k0, k1 = int(key[0]), int(key[1])
        if self.kind == "albumentations":
            self._rewind(k0, k1)
            return _checked(self.transform(image=image)["image"], "HWC")
        if self._rng_name is not None:
            self._rewind(k0, k1)
            return _checked(self.transform(image, **{self._rng_name: self._generator}), "HWC")
        _seed_globals(k0, k1)
        if self.kind == "torchvision":
            return self._call_torchvision(image)
        return _checked(self.transform(image), "HWC")

    @property
    def crop_target(self) -> tuple[int, int] | None:
        """(height, width) to which a random resized crop at the very beginning resizes; None: there is none."""
        return self._crop_first.target if self._crop_first else None

    def on_crop(self, size: tuple[int, int], decode_box: DecodeBox, key: Key) -> np.ndarray:
        """Transform one image of which only the crop is decoded that the transform begins with.

        Args:
            size: (height, width) of the whole image, pixels.
            decode_box: gives the pixels of a box of it.
            key: decides everything random.

        Returns:
            What `self(image, key)` returns for the whole image.

        Raises:
            Exception: as `self(image, key)`, and whatever `decode_box` raises.
        """
        assert self._crop_first is not None
        k0, k1 = int(key[0]), int(key[1])
        if self.kind == "albumentations":
            self._rewind(k0, k1)
            return _checked(self._crop_first(size, decode_box)["image"], "HWC")
        _seed_globals(k0, k1)
        return _checked_tensor(self._crop_first(size, decode_box))

    def with_targets(
        self, image: np.ndarray | tuple[tuple[int, int], DecodeBox], targets: dict[str, Any], key: Key
    ) -> dict[str, np.ndarray]:
        """Transform one image and what goes with it, by a pipeline of `raypipe.transform.targets.target_pipeline`.

        Args:
            image: uint8 RGB of shape (H, W, 3); or size and decoder of one of which only the crop is decoded.
            targets: `mask`, `bboxes`, as Albumentations takes them.
            key: decides everything random.

        Returns:
            `image`, the same as without targets, and the targets.

        Raises:
            Exception: as `self(image, key)`, and whatever the decoder raises.
        """
        self._rewind(int(key[0]), int(key[1]))
        if isinstance(image, tuple):
            assert isinstance(self._crop_first, AlbumentationsCropFirst)
            result = self._crop_first(*image, **targets)
        else:
            result = self.transform(image=image, **targets) if self.transform else {"image": image, **targets}
        _checked(result["image"], "HWC")
        return result

    def _rewind(self, k0: int, k1: int) -> None:
        """Put both generators where a fresh Philox(key=[k0, k1]) and Random(k0 << 64 | k1) would stand."""
        key = self._philox_state["state"]["key"]
        key[0], key[1] = k0, k1
        self._philox.state = self._philox_state
        self._random.seed(k0 << 64 | k1)
        cv2.setRNGSeed(k0 & 0x7FFFFFFF)  # OpenCV's randn and kmeans

    def _call_torchvision(self, image: np.ndarray) -> np.ndarray:
        import torch
        from torchvision import tv_tensors

        tensor = tv_tensors.Image(torch.from_numpy(image).permute(2, 0, 1))
        return _checked_tensor(self.transform(tensor))  # type: ignore[misc]


def _kind_of(transform: Any) -> Literal["none", "albumentations", "torchvision", "plain"]:
    if transform is None:
        return "none"
    if not callable(transform):
        raise ConfigError(f"the transform is a {type(transform).__name__}, which cannot be called")
    for cls in type(transform).__mro__:
        package = cls.__module__.partition(".")[0]
        if package == "albumentations" and cls.__name__ in ("BaseCompose", "BasicTransform"):
            return "albumentations"
        if cls.__module__.startswith("torchvision.transforms.") or (package, cls.__name__) == (
            "torch",
            "Module",
        ):
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


def _seed_globals(k0: int, k1: int) -> None:
    """Seed what a transform may draw from without being handed anything; about 15 µs."""
    random.seed(k0 << 64 | k1)
    np.random.seed((k0 & 0xFFFFFFFF, k0 >> 32, k1 & 0xFFFFFFFF, k1 >> 32))
    cv2.setRNGSeed(k0 & 0x7FFFFFFF)
    torch = sys.modules.get("torch")  # a transform that uses torch has imported it
    if torch is not None:
        torch.default_generator.manual_seed(k0)  # not torch.manual_seed, which goes to the GPUs as well


def _checked(result: Any, layout: Literal["HWC", "CHW"]) -> np.ndarray:
    if not isinstance(result, np.ndarray):
        raise ConfigError(_wrong_result(f"a {type(result).__name__}", layout))
    shape = result.shape
    channels = 2 if layout == "HWC" else 0
    if result.dtype != np.uint8 or len(shape) != 3 or shape[channels] != 3 or 0 in shape:
        raise ConfigError(_wrong_result(f"{result.dtype} of shape {shape}", layout))
    return result


def _checked_tensor(result: Any) -> np.ndarray:
    import torch

    if not isinstance(result, torch.Tensor):
        raise ConfigError(_wrong_result(f"a {type(result).__name__}", "CHW"))
    return _checked(result.detach().numpy(), "CHW").transpose(1, 2, 0)


def _wrong_result(came: str, layout: str) -> str:
    return (
        f"the transform returned {came}; expected is uint8 {layout} with 3 channels (normalisation and the"
        " conversion to floating point happen on the GPU: leave them out of the CPU transform)"
    )
