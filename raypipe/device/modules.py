"""Modules on a micro-batch: Kornia's operations, and the user's own. Knows torch, not Ray.

    step                                     gets and returns
    K.AugmentationSequential                 the image, and the mask, boxes, keypoints that its data_keys name
    K.RandomMixUpV2, RandomCutMixV2, PatchMix  the image and the target, whose other half is `Batch.mix`
    torchvision v2, a function (x, y)        the image and the target, if batches have one
    anything else                            the image

The steps of an `nn.Sequential` are its children. Weights and buffers go to the device. Kornia's random numbers
stay on the host, in the order of a call by hand, so nothing waits for the device because of them. `module_checks`
refuses what would leave a target behind.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from raypipe.config import AugmentConfig
from raypipe.device.kornia_targets import (
    KEY_OF_TARGET,
    TARGET_OF_KEY,
    from_boxes,
    kept_boxes,
    kept_keypoints,
    mosaic_labels,
    to_boxes,
)
from raypipe.device.mixing import Mix
from raypipe.device.module_checks import check_steps, kornia_class, mixes_labels
from raypipe.errors import ConfigError
from raypipe.importing import import_name, raised_at
from raypipe.transform.device_input import DeviceInput
from raypipe.transform.ending import Ending
from raypipe.transform.fields import LABEL
from raypipe.transform.process_state import process_kept, seed_process

PLAIN = AugmentConfig(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
"""The normalization of a module that is passed without a configuration: images stay in [0, 1]."""

# They make the size of the images: applied to some rows only, the rows would not fit together.
CHANGES_SIZE = {"CenterCrop", "RandomCrop", "RandomResizedCrop"}
CHANGES_SIZE |= {"LongestMaxSize", "PadTo", "Resize", "SmallestMaxSize"}

_GENERATORS = (torch._C.Generator, np.random.Generator, random.Random)
Targets = Mapping[str, torch.Tensor]
"""The target (`LABEL`), mask, boxes and keypoints of a micro-batch, as far as the stream has them."""


@dataclass(frozen=True)
class Augmented:
    """A micro-batch between two steps.

    Attributes:
        image: float (B, C, H, W).
        targets: what moves with the image.
        mix: the other half of the targets, if a step mixed them.
    """

    image: torch.Tensor
    targets: Targets
    mix: Mix | None = None


def shape_of(result: object) -> tuple[int, ...] | str:
    """Return the shape of a tensor, or the type of anything else that a user's code returned."""
    if isinstance(result, torch.Tensor):
        return tuple(result.shape)
    return type(result).__name__


def built(module: Any) -> Any:
    """Return what `augment.module` names or is: a module or a function of images.

    A name may be that of a class, or of a function without arguments that makes a module.

    Raises:
        ConfigError: it cannot be imported, made, or called.
    """
    given = module
    try:
        if isinstance(module, str):
            given = import_name(module, "augment.module", trusted=True)
        is_maker = inspect.isfunction(given) and not inspect.signature(given).parameters
        usable = given() if inspect.isclass(given) or is_maker else given
        inspect.signature(_call_of(usable))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"augment.module {_named(module)!r} cannot be used: {type(error).__name__}: {error}"
        ) from error
    return usable


def resolved(config: AugmentConfig, ending: Ending | None = None) -> AugmentConfig:
    """Return the configuration with its module as an object, and with the normalization that the module ends with.

    Args:
        ending: that of the pipeline before it, whose numbers the configuration has if it normalizes.

    Raises:
        ConfigError: see `built`; or the configuration has another normalization.
    """
    if not config.module:
        return config
    module = built(config.module)
    if (ends_with := normalization_of(module)) is None:
        return replace(config, module=module)
    mean, std = ends_with
    fitting = [ends_with]
    other = "augment.mean and augment.std are others"
    if ending and ending.normalizes:
        other = f"transform.train with {ending.steps} ({ending.described})"
    else:
        fitting += [(PLAIN.mean, PLAIN.std), (AugmentConfig.mean, AugmentConfig.std)]
    if (config.mean, config.std) not in fitting:
        raise ConfigError(
            f"augment.module {_named(config.module)!r} ends with Normalize({list(mean)}, {list(std)}), and "
            f"{other}: images are normalized once, so leave one of the two out"
        )
    return replace(config, module=module, mean=mean, std=std)


def normalization_of(module: Any) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return mean and std of the `Normalize`, Kornia's or torchvision's, at a module's end; None = it has none."""
    last = module
    while children := _children_in_order(last):
        last = children[-1]
    if type(last).__name__ != "Normalize" or not isinstance(last, nn.Module):
        return None
    values = getattr(last, "flags", None) or vars(last) | dict(last.named_buffers())
    if getattr(last, "p", 1.0) != 1.0 or not {"mean", "std"} <= values.keys():
        return None
    numbers = torch.broadcast_tensors(
        torch.as_tensor(values["mean"], dtype=torch.float64).flatten(),
        torch.as_tensor(values["std"], dtype=torch.float64).flatten(),
    )
    # one number is that of all channels
    channels = 3 if len(numbers[0]) == 1 else -1
    mean, std = (tuple(each.expand(channels).tolist()) for each in numbers)
    return mean, std


def _children_in_order(module: Any) -> list[Any]:
    """Return the steps that a module always calls one after the other; empty: it is a step, or draws them."""
    if isinstance(module, nn.Sequential):
        return [] if getattr(module, "random_apply", False) else [*module]
    is_compose = type(module).__name__ == "Compose"
    return list(getattr(module, "transforms", ())) if is_compose else []


class ChosenRows(nn.Module):
    """A policy of Kornia's, for as large a share of the rows as the strength.

    Attributes:
        chosen: bool (B,), on the host: the rows that it was applied to last.
    """

    chosen: torch.Tensor

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, image: torch.Tensor, strength: float) -> torch.Tensor:
        self.chosen = torch.rand(len(image)) < strength
        result: torch.Tensor = self.policy(image)
        if strength >= 1:
            return result
        return torch.where(_sent(self.chosen, image).view(-1, 1, 1, 1), result, image)


class _Call(NamedTuple):
    """A step, and the way to call it.

    Attributes:
        setting: the setting that it is of, for errors.
        takes_strength: whether it gets the strength, too.
        takes_target: whether it gets images and targets, if batches have them.
    """

    step: Any
    setting: str
    takes_strength: bool
    takes_target: bool


class ModuleSteps:
    """Kornia's operations and a user's module, or a function, as one operation on micro-batches.

    Args:
        module: from `built`; its weights and buffers are moved, in place, to the device; empty = none.
        device: where batches are.
        batches: facts about the batches.
        operations: those of `augment.ops`, which come first.

    Raises:
        ConfigError: a step would leave a target behind, or cannot be used, see `module_checks`.

    Attributes:
        steps: the operations, then the steps of the module, in the order of their calls.
        mixes: whether one of them mixes the targets.
        normalizes: whether they end with a `Normalize`.
    """

    def __init__(
        self,
        module: Any,
        device: torch.device,
        batches: DeviceInput,
        operations: Sequence[nn.Module],
    ) -> None:
        self._module = module
        self._setting = f"augment.module={_named(module)}"
        own = [module] if module else []
        if type(module) is nn.Sequential:
            own = [*module]
        check_steps(module, own, batches.targets, batches.has_target)
        self.steps = [*operations, *own]
        self.mixes = any(map(mixes_labels, own))
        self.normalizes = normalization_of(module) is not None
        settings = ["augment.ops"] * len(operations) + [self._setting] * len(own)
        self._calls = list[_Call]()
        self._scaled: dict[tuple[nn.Module, str], float] = {}
        for step, setting in zip(self.steps, settings, strict=True):
            takes_strength = "strength" in inspect.signature(_call_of(step)).parameters
            if not takes_strength:
                self._scaled |= _probabilities(step)
            call = _Call(step, setting, takes_strength, _takes_target(step))
            self._calls.append(call)
        self._generators = list[Any]()
        self._has_told = True
        if isinstance(module, nn.Module):
            self._has_told = not list(module.buffers())
            for child in module.modules():
                held = vars(child).values()
                self._generators += [
                    one for one in held if isinstance(one, _GENERATORS)
                ]
                # Kornia's samplers stay: they hold parameters to draw with
                if not type(child).__module__.startswith("kornia.augmentation"):
                    nn.Module._apply(child, lambda one: one.to(device), recurse=False)

    def __call__(
        self, augmented: Augmented, counts: np.ndarray, seed: int, strength: float
    ) -> Augmented:
        """Apply the module, random by torch's generators as they are now, and by others as of the seed.

        Args:
            counts: bool (B,), on the host: rows that have weight, and so may mix.
        """
        for generator in self._generators:
            if isinstance(generator, torch._C.Generator):
                generator.manual_seed(seed)
            elif isinstance(generator, np.random.Generator):
                bits = generator.bit_generator
                bits.state = type(bits)(seed).state
            else:
                generator.seed(seed)
        before = None if self._has_told else self._versions()
        with self._strengthened(strength):
            for call in self._calls:
                augmented = self._applied(call, augmented, counts, strength)
        if before is not None:
            self._has_told = True
            for name, version in self._versions().items():
                if before.get(name) != version:
                    raise ConfigError(
                        f"{self._setting} changes its own buffer {name!r}, so its images would depend on the "
                        "micro-batches before, and on the number of ranks: call module.eval() before you pass it"
                    )
        return augmented

    def _applied(
        self, call: _Call, augmented: Augmented, counts: np.ndarray, strength: float
    ) -> Augmented:
        step = call.step
        try:
            if mixes_labels(step):
                return _mixed(step, augmented, counts)
            if kornia_class(step, "AugmentationSequential"):
                return _moved(step, augmented)
            more = {"strength": strength} if call.takes_strength else {}
            if LABEL in augmented.targets and call.takes_target:
                return _replaced(step, augmented, counts, more)
            result = step(augmented.image, **more)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            libraries = ("kornia.", "torchvision.")
            if not type(step).__module__.startswith(libraries):
                # its traceback is the user's own code
                raise
            keys = ", ".join(["image", *augmented.targets])
            raise ConfigError(
                f"{call.setting}: {type(step).__name__} fails on {keys} of "
                f"{tuple(augmented.image.shape)}: {type(error).__name__}: {error} (at {raised_at(error)})"
            ) from error
        if (
            not isinstance(result, torch.Tensor)
            or result.ndim != 4
            or len(result) != len(augmented.image)
        ):
            raise ConfigError(
                f"{call.setting} returned {shape_of(result)} for images of "
                f"{tuple(augmented.image.shape)}: it must return floats (B, 3, h, w) in [0, 1]"
            )
        return replace(augmented, image=result)

    @contextlib.contextmanager
    def _strengthened(self, strength: float) -> Iterator[None]:
        """Context manager: the probabilities of Kornia's operations are scaled."""
        try:
            for (module, name), whole in self._scaled.items():
                setattr(module, name, whole * strength)
            yield
        finally:
            for (module, name), whole in self._scaled.items():
                setattr(module, name, whole)

    def _versions(self) -> dict[str, tuple[int, int]]:
        return {
            name: (id(buffer), buffer._version)
            for name, buffer in self._module.named_buffers()
        }


@contextlib.contextmanager
def all_seeded(seed: int) -> Iterator[None]:
    """Context manager: seed the generators of Python, NumPy, OpenCV and torch's CPU, then put them back."""
    with process_kept():
        seed_process(seed, 0)
        yield


def _moved(step: Any, augmented: Augmented) -> Augmented:
    """Apply an `AugmentationSequential` to the image and the targets that its keys name."""
    image = augmented.image
    targets = dict(augmented.targets)
    given: dict[str, Any] = {"image": image}
    if "mask" in targets:
        given["mask"] = targets["mask"][:, None]
    if "boxes" in targets:
        given["bbox_xyxy"] = to_boxes(targets["boxes"])
    if "keypoints" in targets:
        given["keypoints"] = targets["keypoints"][..., :2]
    if step.data_keys is None:
        results = step(given)
    else:
        if LABEL in targets:
            given["class"] = targets[LABEL]
        keys = [_GIVEN[key.name] for key in step.data_keys]
        returned = step(*(given[key] for key in keys))
        if len(keys) == 1:
            returned = [returned]
        results = dict(zip(keys, returned, strict=True))
    image = results["image"]
    height, width = image.shape[-2:]
    if "mask" in results:
        targets["mask"] = results["mask"].reshape(
            len(image), *results["mask"].shape[-2:]
        )
    if "bbox_xyxy" in results:
        labels = mosaic_labels(step, targets["boxes"][..., 4])
        targets["boxes"] = kept_boxes(
            from_boxes(results["bbox_xyxy"]), labels, height, width
        )
    if "keypoints" in results:
        targets["keypoints"] = kept_keypoints(
            results["keypoints"], targets["keypoints"][..., 2], height, width
        )
    return replace(augmented, image=image, targets=targets)


_IMAGE_KEYS = {"INPUT": "image", "IMAGE": "image"}
_GIVEN = _IMAGE_KEYS | {
    name: KEY_OF_TARGET[target] for name, target in TARGET_OF_KEY.items()
}


def _mixed(step: Any, augmented: Augmented, counts: np.ndarray) -> Augmented:
    """Apply Kornia's MixUp, CutMix or PatchMix; the shares of the targets are read from what it has drawn."""
    before = augmented.image
    image = step(before, data_keys=["input"])
    partners, shares = _drawn_partners(step, before.shape)
    own_rows = torch.arange(len(before))
    counted = torch.from_numpy(counts)
    alone = ~(counted & counted[partners])
    if alone.any():  # a row without weight is in no other
        image = torch.where(_sent(alone, image).view(-1, 1, 1, 1), before, image)
        partners = torch.where(alone, own_rows, partners)
    if LABEL not in augmented.targets:
        return replace(augmented, image=image)
    target = augmented.targets[LABEL]
    lam = torch.where(partners == own_rows, 1.0, 1 - shares.float())
    is_cutmix = not kornia_class(step, "RandomMixUpV2")
    mix = Mix(
        target.index_select(0, _sent(partners, target)), _sent(lam, target), is_cutmix
    )
    return replace(augmented, image=image, mix=mix)


def _takes_target(step: Any) -> bool:
    """True for a step that is called as (images, target), as scripts call MixUp and CutMix of torchvision."""
    if type(step).__module__.startswith("torchvision.transforms.v2."):
        return True
    given = [
        name
        for name, parameter in inspect.signature(_call_of(step)).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and parameter.default is parameter.empty
    ]
    return len(given) == 2 and "strength" not in given


def _replaced(
    step: Any, augmented: Augmented, counts: np.ndarray, more: Mapping[str, Any]
) -> Augmented:
    """Apply a step that returns images and targets to the rows with weight: no padding is mixed into them."""
    given = augmented.targets[LABEL]
    has_padding = counts.any() and not counts.all()
    if has_padding:
        rows = _sent(torch.from_numpy(np.flatnonzero(counts)), given)
        returned = step(augmented.image[rows], given[rows], **more)
    else:
        returned = step(augmented.image, given, **more)
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise ConfigError(
            f"augment.module={_named(step)} gets images and targets, and returned {shape_of(returned)}: it must "
            "return both"
        )
    image, target = returned
    if has_padding:
        image, target = (
            part.new_zeros((len(counts), *part.shape[1:])).index_copy(0, rows, part)
            for part in (image, target)
        )
    if target.dtype != given.dtype and (len(augmented.targets) > 1 or augmented.mix):
        raise ConfigError(
            f"augment.module: {_named(step)} mixes images, and another step does, too, or there are masks and the "
            "like, which do not mix: leave it out"
        )
    targets = {**augmented.targets, LABEL: target}
    return replace(augmented, image=image, targets=targets)


def _drawn_partners(step: Any, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which row each row of images (B, C, H, W) was mixed with, and that one's share in it, on the host."""
    params = step._params
    rows, _, height, width = shape
    if kornia_class(step, "RandomMixUpV2"):
        partners = params["mixup_pairs"]
        shares = params["mixup_lambdas"]
    elif kornia_class(step, "PatchMix"):
        partners = params["mix_pairs"]
        shares = torch.full((rows,), step.patch_size**2 / (height * width))
    else:
        partners = params["mix_pairs"][0]
        corners = params["crop_src"][0]
        # pixels; an empty box ends before it begins
        sides = corners[:, 2] - corners[:, 0] + 1
        shares = sides.prod(1) / (height * width)
    is_mixed = params["batch_prob"] > 0.5
    return torch.where(is_mixed, partners, torch.arange(rows)), shares


def _sent(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return tensor.to(like.device, non_blocking=True)


def _probabilities(module: Any) -> dict[tuple[nn.Module, str], float]:
    """Return the probabilities of Kornia's operations in a module that the strength scales."""
    probabilities: dict[tuple[nn.Module, str], float] = {}
    for child in module.modules() if isinstance(module, nn.Module) else ():
        if type(child).__name__ in CHANGES_SIZE | {"Normalize", "Denormalize"}:
            continue
        if kornia_class(child, "AugmentationBase2D", "MixAugmentationBaseV2"):
            name = "p_batch" if mixes_labels(child) else "p"
            probabilities[child, name] = float(getattr(child, name))
    return probabilities


def _named(module: Any) -> str:
    if isinstance(module, str):
        return module
    return getattr(module, "__name__", None) or type(module).__name__


def _call_of(module: Any) -> Callable[..., Any]:
    return module.forward if isinstance(module, nn.Module) else module
