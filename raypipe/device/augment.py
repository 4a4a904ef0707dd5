"""Augmentation of whole micro-batches on the training device. Imports torch, not Ray.

    uint8 (B, 3, H, W) → the preset → [0, 1] → Kornia operations → the user's module → normalize → MixUp/CutMix

A module that ends with a `Normalize` has done that step (`raypipe.device.modules`).

Arrays (`transform.decode: array`) have any dtype and channels C: whole numbers are scaled to [0, 1] by the
largest of their dtype, floats are as they are. Operations of color need three channels.

Each crop of a view is augmented by itself, with its own seed and without mixing.

All random numbers are drawn on the host from the micro-batch's seed, and `raypipe.device.ambient` pins torch's own
settings, so the result depends only on the pixels, the configuration, the seed and the strength, and nothing waits
for the device. Without operations and module,
conversion and normalization are one kernel. `raypipe.device.fused` implements the presets.

A configuration lists operations in order, each as `{op: NAME, parameter: value, …}`, where NAME is a 2D
augmentation of `kornia.augmentation` or a policy of `kornia.augmentation.auto`. A policy chooses its operations
once per micro-batch, for all of its rows, as Kornia's do. Kornia takes seconds to import, so it is imported
where it is used.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from torch import nn

from raypipe.config import AugmentConfig
from raypipe.device.ambient import pinned
from raypipe.device.fused import (
    PRESETS,
    Fused,
    FusedParams,
    addcmul,
    apply,
    draw_params,
    pack,
)
from raypipe.device.mixing import (
    Mix,
    draw_mix,
    mix,
    mixing_setting,
)
from raypipe.device.module_checks import moves_pixels
from raypipe.device.modules import (
    Augmented,
    ChosenRows,
    ModuleSteps,
    all_seeded,
    resolved,
)
from raypipe.device.prefetcher import Batch
from raypipe.device.ring import hand_over, new_event, new_stream, numbered
from raypipe.errors import ConfigError
from raypipe.mistakes import did_you_mean
from raypipe.packages import how_to_get
from raypipe.plan.order import Domain
from raypipe.transform.device_input import IMAGES, DeviceInput
from raypipe.transform.fields import IMAGE, LABEL, VIEW, images_in
from raypipe.transform.views import view_key

Finish = Callable[[torch.Tensor], torch.Tensor]
"""Makes the model's input of images that are not augmented."""

_SHOWN_CHARACTERS = 2000  # a record of a run has so many of a module's text


def scaled(image: torch.Tensor) -> torch.Tensor:
    """Whole numbers as float32, 1 = the largest of their dtype; floats as they are, in float32."""
    if image.is_floating_point():
        return image.float()
    return image.float().mul_(1 / torch.iinfo(image.dtype).max)


class Normalize:
    """Standardize uint8 or [0, 1] floats (B, C, H, W), or crops (B, n, C, H, W), per channel in one kernel.

    The result is channels_last. Other integer dtypes take a second kernel, since few operations support them.

    The arithmetic is float32 for any `dtype` of the result.
    """

    def __init__(
        self,
        config: AugmentConfig,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        mean = torch.tensor(config.mean, device=device).view(1, -1, 1, 1)
        std = torch.tensor(config.std, device=device).view(1, -1, 1, 1)
        # (x - mean) / std as one multiply and one add
        self._scale = 1 / std
        self._shift = -mean / std
        self._dtype = dtype
        self._uint8_scale = self._scale / 255
        self._is_identity = not any(config.mean) and all(
            number == 1 for number in config.std
        )

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        if image.ndim == 5:
            return self(image.flatten(0, 1)).unflatten(0, image.shape[:2])
        if self._is_identity:
            return self.cast(image)
        if image.shape[1] != self._scale.shape[1]:
            raise ConfigError(
                f"images have {image.shape[1]} channels, and augment.mean and augment.std are of "
                f"{self._scale.shape[1]}: give a number for each channel"
            )
        if image.dtype != torch.uint8:
            image = scaled(image)
        if image.is_floating_point():
            scale = self._scale
        else:
            scale = self._uint8_scale
        return addcmul(self._shift, image, scale, self._dtype)

    def cast(self, image: torch.Tensor) -> torch.Tensor:
        """Return images as floating point; only whole numbers are scaled, to [0, 1]."""
        return scaled(image).to(self._dtype, memory_format=torch.channels_last)


class DeviceAugment:
    """Augments, mixes and normalizes micro-batches on one device.

    Args:
        config: operations, mixing and normalization.
        device: where batches are.
        dtype: dtype of the resulting images.
        batches: facts about the batches: only a module may move pixels of those with masks, boxes or keypoints,
            together with them; and views cannot be mixed.

    Raises:
        ConfigError: an operation or the module does not exist, or refuses its parameters; or, with targets, moves,
            erases or mixes pixels, or mixes views; or mixes targets that have no mixture. (A user's own module is
            not checked.)

    Attributes:
        config: with the module as an object, and the normalization that it ends with.
        normalize: normalization, which is all that validations get.
        mixes: whether batches have two targets, see `Batch.mix`.
        normalizes: whether the module normalizes, and nothing behind it.
        preset: the operations of the preset; None = it has none.
        drawn: the preset's draws for the last batch, or for each crop of its views.
        modules: Kornia's operations that follow it, and the user's module.
    """

    def __init__(
        self,
        config: AugmentConfig,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        batches: DeviceInput = IMAGES,
    ) -> None:
        targets = batches.targets
        check_mixable(config, batches)
        self._mixing = mixing_setting(config)
        self.device = numbered(device)
        with pinned(self.device):
            with _seeded(0, self.device):
                # weights of a user's class may be drawn
                self.config = config = resolved(config, batches.endings.get("train"))
            self.normalize = Normalize(config, self.device, dtype)
            self.preset = _fitting_preset(config, bool(targets))
            operations = [
                build_operation(entry, bool(targets), len(config.mean))
                for entry in config.ops
            ]
            self.modules = ModuleSteps(config.module, self.device, batches, operations)
        self.drawn: list[FusedParams] = []
        self._stream: Any = None  # made when the first batch has come from a ring
        # weights and buffers, or what a function keeps: the loop may be writing them in another stream
        state: list[Any] = [config.module] if config.module else []
        if isinstance(config.module, nn.Module):
            state = [*config.module.parameters(), *config.module.buffers()]
        self._runs_apart = not config.differentiable and not state
        self._targets = (*targets, LABEL) if batches.has_target else targets
        if self.modules.mixes and self._mixing:
            raise ConfigError(
                f"augment.module mixes images, and {self._mixing} does, too: set that to 0"
            )
        self.mixes = self.modules.mixes or bool(self._mixing)
        self.normalizes = self.modules.normalizes
        if batches.has_views:
            self._check_views()

    def __call__(
        self,
        image: torch.Tensor,
        target: torch.Tensor,
        counts: np.ndarray,
        *,
        seed: int,
        strength: float = 1.0,
    ) -> tuple[torch.Tensor, Mix | None]:
        """Augment one micro-batch of a training segment; validation only calls `normalize`.

        Args:
            image: uint8 (B, 3, H, W), or an array's (B, C, H, W); left as it is.
            target: (B, …); for the types that can be mixed, see `check_mixable`.
            counts: bool (B,), on the host: rows that have weight, and so may mix.
            seed: the micro-batch's, in [0, 2^63).
            strength: scales the probability of every operation and of mixing, in [0, 1].

        Returns:
            Images of `dtype` (B, 3, h, w), channels_last, and the other half of the targets where it was mixed.
        """
        with pinned(self.device):
            augmented = self._mixed(
                Augmented(image, {LABEL: target}), counts, seed, strength
            )
            return augmented.image, augmented.mix

    def _mixed(
        self, augmented: Augmented, counts: np.ndarray, seed: int, strength: float
    ) -> Augmented:
        augmented = self._augmented(augmented, counts, seed, strength)
        rng = np.random.Generator(np.random.Philox(key=[seed, Domain.MIXING]))
        height, width = augmented.image.shape[2:]
        plan = draw_mix(self.config, rng, height, width, strength)
        if plan is None:
            return augmented
        image, mixed = mix(augmented.image, augmented.targets[LABEL], counts, plan)
        return Augmented(image, augmented.targets, mixed)

    def _views(
        self, views: Mapping[str, torch.Tensor], seed: int, strength: float
    ) -> dict[str, torch.Tensor]:
        """Augment views, uint8 (B, 3, H, W) or (B, n, 3, H, W), by name: each crop as an image, without mixing.

        The seed of a crop is hashed of the micro-batch's, the view's name and the crop's number.
        """
        self._check_views()
        if not (self.preset or self.modules.steps):
            return {name: self.normalize(view) for name, view in views.items()}
        augmented = {}
        for name, view in views.items():
            crops = [view] if view.ndim == 4 else view.unbind(1)
            counts = np.ones(len(view), bool)
            of_view = []
            for number, crop in enumerate(crops):
                key = view_key(name, number, Domain.VIEW_ON_DEVICE, seed)
                of_crop = int(key[0]) >> 1
                made = self._augmented(Augmented(crop, {}), counts, of_crop, strength)
                of_view.append(made.image)
            augmented[name] = of_view[0] if view.ndim == 4 else torch.stack(of_view, 1)
        return augmented

    def of_batch(
        self, batch: Batch, strength: float, finish: Finish | None = None
    ) -> Batch:
        """Augment a training batch, or normalize a validation batch; by `finish`, or else by `normalize`.

        With `augment.differentiable` the batch has its `pixels`, of which its image is made, and `augment`.

        A batch from a ring is augmented in a separate CUDA stream, as soon as it is there, while the model
        computes with the last one. The current stream then waits for the result.
        """
        if batch.copied is None or not self._runs_apart:
            return self._of_batch(batch, strength, finish)
        if self._stream is None:
            self._stream = new_stream(self.device)
            self._stream.wait_stream(
                torch.get_device_module(self.device).current_stream(self.device)
            )
        with torch.get_device_module(self.device).stream(self._stream):
            batch.copied.wait(self._stream)
            augmented = self._of_batch(batch, strength, finish)
            done = new_event(self.device)
            done.record(self._stream)
        made = [*augmented.fields.values()]
        if augmented.mix is not None:
            made += [augmented.mix.target, augmented.mix.lam]
        tensors = [value for value in made if isinstance(value, torch.Tensor)]
        hand_over(done, tensors, self.device)
        return augmented

    def _of_batch(self, batch: Batch, strength: float, finish: Finish | None) -> Batch:
        is_recorded = torch.is_grad_enabled() and self.config.differentiable
        with pinned(self.device), torch.set_grad_enabled(is_recorded):
            if not self.config.differentiable:
                return self._batch(batch, strength, finish)

            def made_of(pixels: torch.Tensor) -> Batch:
                """Return the batch made of other pixels, by the same draws."""
                given = batch.with_fields({IMAGE: pixels})
                with pinned(self.device):
                    return self._batch(given, strength, finish)

            pixels = scaled(batch.image).requires_grad_(is_recorded)
            augmented = made_of(pixels)
            return augmented.with_fields(
                {}, pixels=pixels, augment=lambda pixels: made_of(pixels).image
            )

    def _batch(self, batch: Batch, strength: float, finish: Finish | None) -> Batch:
        self.drawn = []
        if batch.position.split != "train":
            return finished(batch, finish or self.normalize)
        if batch.views:
            views = self._views(batch.views, batch.seed, strength)
            return batch.with_fields(
                {f"{VIEW}.{name}": view for name, view in views.items()}
            )
        targets = {
            name: batch.fields[name] for name in self._targets if name in batch.fields
        }
        augmented = self._mixed(
            Augmented(batch.image, targets), batch.index >= 0, batch.seed, strength
        )
        return batch.with_fields(
            {**augmented.targets, IMAGE: augmented.image}, mix=augmented.mix
        )

    def _check_views(self) -> None:
        if self.mixes:
            name = self._mixing or "augment.module"
            raise ConfigError(f"{name} mixes images, and no views: set it to 0")
        if self.config.differentiable:
            raise ConfigError(
                "augment.differentiable is for images, and not for views: leave it out"
            )

    def _augmented(
        self, augmented: Augmented, counts: np.ndarray, seed: int, strength: float
    ) -> Augmented:
        """Augment and normalize, without mixing by the configuration."""
        image = augmented.image
        if image.dtype != torch.uint8 and (self.preset or self.modules.steps):
            image = scaled(image)
        if self.preset:
            rows, _, height, width = image.shape
            rng = np.random.Generator(np.random.Philox(key=[seed, Domain.AUGMENT]))
            params = draw_params(self.preset, rng, rows, height, width, strength)
            self.drawn.append(params)
            packed = torch.from_numpy(pack(self.preset, params, height, width))
            image = apply(
                self.preset, image, packed.to(image.device, non_blocking=True)
            )
        if not self.modules.steps:
            return Augmented(self.normalize(image), augmented.targets)
        if not image.is_floating_point():
            image = scaled(image)
        # Kornia draws from torch's generator only
        of_user = all_seeded(seed) if self.config.module else contextlib.nullcontext()
        with of_user, _seeded(seed, self.device):
            augmented = self.modules(
                Augmented(image, augmented.targets), counts, seed, strength
            )
        if self.normalizes:
            image = self.normalize.cast(augmented.image)
        else:
            image = self.normalize(augmented.image)
        return Augmented(image, augmented.targets, augmented.mix)


def finished(batch: Batch, finish: Finish) -> Batch:
    """Return a batch whose images are not augmented, as the model gets them."""
    images = images_in(batch.fields).items()
    return batch.with_fields({name: finish(image) for name, image in images})


def check_mixable(config: AugmentConfig, batches: DeviceInput) -> None:
    """Raise ConfigError if MixUp or CutMix is on and cannot mix these batches and their targets."""
    setting = mixing_setting(config)
    if not setting:
        return
    if batches.targets:
        raise ConfigError(
            f"{setting} mixes images, not masks and the like: set it to 0"
        )
    if not batches.has_target:
        raise ConfigError(
            f"{setting} mixes targets, and batches have none: set it to 0, or name store.target_column"
        )
    target = batches.target
    if target is None or target.dtype.startswith("float"):
        return
    if not target.shape or target.dtype not in ("bool", "uint8"):
        raise ConfigError(
            f"{setting} mixes targets, and two that are {target.dtype} {target.shape} have no mixture: set it to "
            "0, or declare another dtype of the target's column, float32, or uint8 for vectors of 0 and 1"
        )


def _fitting_preset(config: AugmentConfig, targets: bool) -> Fused | None:
    """Return the operations of the preset; raise ConfigError if they do not fit the channels or targets."""
    preset = PRESETS[config.preset]
    channels = len(config.mean)
    if channels != 3 and preset and preset.changes_color:
        raise ConfigError(
            f"augment.preset={config.preset!r} changes red, green and blue, and augment.mean has "
            f"{channels} channels: use none or light, and augment.ops that take {channels}"
        )
    if targets and preset:
        raise _moves(f"the preset {config.preset}")
    return preset


def settings_of_device(config: AugmentConfig) -> dict[str, Any]:
    """Return the settings by their whole names, as plain values, for the record of a run; a module as text."""
    settings = {f"augment.{name}": value for name, value in vars(config).items()}
    if not isinstance(config.module, str):
        text = " ".join(repr(config.module).split())
        settings["augment.module"] = text[:_SHOWN_CHARACTERS]
    return settings


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Context manager: seed torch's global generators, which Kornia draws from, and restore them at the end."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":  # a user's module may draw on the device
            torch.cuda.default_generators[device.index].manual_seed(seed)
        yield


def _moves(operation: str) -> ConfigError:
    return ConfigError(
        f"augment: {operation} moves or erases pixels on the device, where masks and the like stay as they are: "
        "use transform.train for geometry, and augment.ops for operations of color alone"
    )


def build_operation(
    entry: dict[str, Any], targets: bool = False, channels: int = 3
) -> nn.Module:
    """Build one configured operation on images with this many channels; raises ConfigError as
    `DeviceAugment`."""
    module = _tried_module(_operation_class(entry["op"], channels), entry, channels)
    # a policy has geometric operations among its own
    if targets and moves_pixels(module):
        raise _moves(entry["op"])
    from kornia.augmentation.auto.base import PolicyAugmentBase

    return ChosenRows(module) if isinstance(module, PolicyAugmentBase) else module


def _operation_class(op: str, channels: int) -> Any:
    """Return Kornia's class of a name; raise ConfigError if it does not fit the channels."""
    try:
        import kornia.augmentation
        import kornia.augmentation.auto
    except ImportError as error:
        raise ConfigError(
            f"augment.ops are Kornia's: {error}{how_to_get('kornia')}"
        ) from error
    from kornia.augmentation.auto.base import PolicyAugmentBase

    kinds = kornia.augmentation.AugmentationBase2D, PolicyAugmentBase
    named = vars(kornia.augmentation.auto) | vars(kornia.augmentation)
    operations = {
        name: value
        for name, value in named.items()
        if inspect.isclass(value) and issubclass(value, kinds)
    }
    operation: Any = operations.get(op)
    if operation is None:
        near = did_you_mean(map(repr, get_close_matches(op, operations, 1)))
        raise ConfigError(
            f"augment.ops: {op!r} is not a 2D operation of kornia.augmentation or kornia.augmentation.auto "
            f"(mixing has its own settings: augment.mixup_alpha and augment.cutmix_alpha){near}"
        )
    if op == "Normalize":
        raise ConfigError(
            "augment.ops: images are normalized behind the operations, and those of validations as well: set "
            "augment.mean and augment.std instead of Normalize"
        )
    # Operations of color are among a policy's, and one of them lets any channels pass.
    if channels != 3 and (
        issubclass(operation, PolicyAugmentBase) or op == "RandomGrayscale"
    ):
        raise ConfigError(
            f"augment.ops: {op} needs red, green and blue, and augment.mean has {channels} channels"
        )
    return operation


def _tried_module(operation: Any, entry: dict[str, Any], channels: int) -> Any:
    """Make a configured module, and apply it once; raise ConfigError if that fails."""
    parameters = {
        key: tuple(v) if isinstance(v, list) else v
        for key, v in entry.items()
        if key != "op"
    }
    try:
        module: Any = operation(**parameters)  # type: ignore[arg-type]
        probability = float(getattr(module, "p", 1.0))
        module.p = 1.0
        # Applying it shows whether its parameters and these channels are valid. A crop, or a wide blur, may need
        # larger images, for which others would take seconds.
        with torch.random.fork_rng([]):
            try:
                result = module(torch.full((2, channels, 32, 32), 0.5))
            except Exception:
                result = module(torch.full((2, channels, 1024, 1024), 0.5))
        module.p = probability
    except Exception as error:
        if channels == 3:
            of = ""
        else:
            of = f" on {channels} channels, of which augment.mean is"
        raise ConfigError(
            f"augment.ops: {entry}{of}: {type(error).__name__}: {error}"
        ) from error
    if (
        not isinstance(result, torch.Tensor)
        or result.ndim != 4
        or result.shape[:2] != (2, channels)
    ):
        raise ConfigError(f"augment.ops: {entry} does not make images of images")
    return module
