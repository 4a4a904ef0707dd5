"""What happens to whole micro-batches on the training device. Knows torch, not Ray.

    uint8 (B, 3, H, W) → [0, 1] → Kornia operations → the user's module → normalise → MixUp / CutMix

All that is random is drawn on the host from the micro-batch's seed, so the result depends on the pixels, the
configuration, the seed and the strength alone, and nothing waits for the device. Where there is neither operation
nor module, conversion and normalisation are one kernel.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from raypipe.config import AugmentConfig
from raypipe.device.mixing import Mixed, draw_mix, mix
from raypipe.device.streams import numbered
from raypipe.errors import ConfigError
from raypipe.lookup import import_name
from raypipe.plan.order import Domain


class Normalize:
    """uint8 or [0, 1] floats (B, 3, H, W) → standardised per channel, channels_last, in one kernel.

    Args:
        config: mean and std of pixels scaled to [0, 1].
        device: where batches are.
        dtype: of the result; the arithmetic is float32.
    """

    def __init__(self, config: AugmentConfig, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        mean = torch.tensor(config.mean, device=device).view(1, 3, 1, 1)
        std = torch.tensor(config.std, device=device).view(1, 3, 1, 1)
        # (x - mean) / std as one multiply and one add
        self._scale, self._shift, self._dtype = 1 / std, -mean / std, dtype
        self._uint8_scale = self._scale / 255

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        scale = self._scale if image.is_floating_point() else self._uint8_scale
        out = torch.empty(image.shape, dtype=self._dtype, device=image.device, memory_format=torch.channels_last)
        return torch.addcmul(self._shift, image, scale, out=out)


class DeviceAugment:
    """Augments, mixes and normalises micro-batches on one device.

    Args:
        config: what to do.
        device: where batches are.
        dtype: of the images that come out.
        targets: whether the batches have masks or boxes, which stay as they are: nothing may move pixels.

    Raises:
        ConfigError: an operation or the module does not exist, or refuses its parameters; or, with targets, moves,
            erases or mixes pixels. (Of a user's module that cannot be told.)
    """

    def __init__(
        self,
        config: AugmentConfig,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        targets: bool = False,
    ) -> None:
        mixing = [name for name in ("mixup_alpha", "cutmix_alpha") if getattr(config, name)]
        if targets and mixing:
            raise ConfigError(f"augment.{mixing[0]} mixes images, and neither masks nor boxes: set it to 0")
        self.config, self.device = config, numbered(device)
        self.normalize = Normalize(config, self.device, dtype)
        self._operations: list[Any] = []
        if config.ops or config.preset != "none":
            from raypipe.device.kornia_ops import build_operations  # seconds of imports

            self._operations = build_operations(config, targets)
        self._module = _user_module(config.module) if config.module else None

    def __call__(
        self,
        image: torch.Tensor,
        target: torch.Tensor,
        counts: np.ndarray,
        *,
        seed: int,
        strength: float = 1.0,
    ) -> tuple[torch.Tensor, Mixed | None]:
        """One micro-batch of a training segment; validation takes `normalize` alone.

        Args:
            image: uint8 (B, 3, H, W); left as it is.
            target: int64 (B,).
            counts: bool (B,), on the host: rows that have weight, and so may mix.
            seed: the micro-batch's, in [0, 2^63).
            strength: scales the probability of every operation and of mixing, in [0, 1].

        Returns:
            Images of `dtype` (B, 3, h, w), channels_last, and the other half of the targets where it was mixed.
        """
        if self._operations or self._module:
            image = image.float().mul_(1 / 255)
            with _seeded(seed, self.device):
                for operation in self._operations:
                    image = operation(image, strength)
                if self._module:
                    image = self._module(image, strength)
        image = self.normalize(image)
        rng = np.random.Generator(np.random.Philox(key=[seed, Domain.MIXING]))
        plan = draw_mix(self.config, rng, image.shape[2], image.shape[3], strength)
        return (image, None) if plan is None else mix(image, target, counts, plan)


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's global generators, which Kornia draws from, at a seed; as they were before afterwards.

    Args:
        seed: of all.
        device: with its number.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":  # for a user's module that draws on the device
            torch.cuda.default_generators[device.index].manual_seed(seed)
        yield


def _user_module(name: str) -> Callable[[torch.Tensor, float], torch.Tensor]:
    """The user's `module:function`, called with the strength if it takes that."""
    function = import_name(name, "augment.module")
    if inspect.isclass(function):
        function = function()
    call = function.forward if isinstance(function, torch.nn.Module) else function
    takes_strength = "strength" in inspect.signature(call).parameters

    @functools.wraps(call)
    def checked(image: torch.Tensor, strength: float) -> torch.Tensor:
        result = function(image, strength=strength) if takes_strength else function(image)
        if not isinstance(result, torch.Tensor) or result.ndim != 4 or len(result) != len(image):
            shape = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
            raise ConfigError(
                f"augment.module={name} returned {shape} for images of {tuple(image.shape)}: it must return "
                "floats (B, 3, h, w) in [0, 1]"
            )
        return result

    return checked
