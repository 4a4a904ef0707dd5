"""Last stage of a batch on its device: augmentation and mixing in training, and the end of the user's pipeline.

    uint8 (B, C, H, W), or crops (B, n, C, H, W) → floats of the pipeline's dtype, (x / 255 - mean) / std

With `augment`, `raypipe.device.augment` augments training batches before, and normalizes them as `config` says.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping

import torch

from raypipe.config import AugmentConfig
from raypipe.device.ambient import pinned
from raypipe.device.augment import DeviceAugment, Normalize
from raypipe.device.prefetcher import Batch
from raypipe.device.ring import numbered
from raypipe.errors import ConfigError
from raypipe.plan.places import Split
from raypipe.progress import print_progress
from raypipe.transform.device_input import DeviceInput
from raypipe.transform.ending import Ending, normalization
from raypipe.transform.fields import images_in

_logger = logging.getLogger(__name__)


class DeviceStage:
    """Finishes the batches of one rank.

    Args:
        augment: the user's augmentation; None = none.
        device: where batches are.
        dtype: dtype of the images; None = that of the pipeline, or float32.
        batches: facts about the batches that arrive.
        tells: whether it says what it does; rank 0 does.

    Attributes:
        config: the augmentation, with the mean and std that hold for training; None = none.

    Raises:
        ConfigError: the settings contradict one another.
    """

    def __init__(
        self,
        augment: AugmentConfig | None,
        device: torch.device,
        dtype: torch.dtype | None,
        batches: DeviceInput,
        tells: bool,
    ) -> None:
        self._device = numbered(device)
        self._batches = batches
        self._tells = tells
        self._seen = set[Split]()
        endings = batches.endings
        self._dtypes = {
            split: dtype or getattr(torch, ending.dtype, torch.float32)
            for split, ending in endings.items()
        }
        self._train_dtype = self._dtypes.get("train", dtype or torch.float32)
        of_train = normalization(augment, endings.get("train"))
        self.config = of_train if augment else None
        self._normalize = dict[Split, Normalize]()
        with pinned(self._device):
            for split, ending in endings.items():
                if config := normalization(augment, ending, split):
                    self._normalize[split] = Normalize(
                        config, self._device, self._dtypes[split]
                    )

    @functools.cached_property
    def augment(self) -> DeviceAugment | None:
        """The device augmentation, built at its first use, whose imports take a second; None = none."""
        if self.config is None:
            return None
        batches = self._batches
        augment = DeviceAugment(
            self.config,
            self._device,
            self._train_dtype,
            batches.targets,
            batches.has_views,
            batches.has_target,
            batches.target,
        )
        _check_module(batches.endings.get("train"), augment)
        return augment

    def __call__(self, batch: Batch, strength: float) -> Batch:
        """Finish a batch; `strength` is that of the augmentation."""
        split = batch.position.split
        if split not in self._seen:
            if not self._seen:
                self._describe()
            self._seen.add(split)
            self._check_first(batch)
        ending = self._batches.endings.get(split)
        is_augmented = self.config is not None and split == "train"
        is_recorded = self.augment is not None and self.augment.config.differentiable
        if ending and not is_augmented and not is_recorded:
            return self._finished(batch, ending)
        if self.augment is not None:
            return self.augment.of_batch(batch, strength)
        return batch

    def _finished(self, batch: Batch, ending: Ending) -> Batch:
        """Finish the images of a batch whose pipeline had an ending."""
        split = batch.position.split
        with pinned(self._device):
            finished = {
                name: self._finished_image(image, ending, split)
                for name, image in images_in(batch.fields).items()
            }
        return batch.with_fields(finished)

    def _finished_image(
        self, image: torch.Tensor, ending: Ending, split: Split
    ) -> torch.Tensor:
        normalize = self._normalize.get(split)
        if not image.is_floating_point():
            assert normalize is not None, "the library makes floats"
            return normalize(image)
        _check_floats(ending, split)
        if normalize is None or not ending.is_own:
            return image.to(self._dtypes[split])
        return normalize(image)

    def _describe(self) -> None:
        """Say what is done with the images, and where."""
        if self._tells:
            for line in _described(self._batches.endings):
                print_progress(_logger, line)

    def _check_first(self, batch: Batch) -> None:
        """Check the dtype of a split's first images, and say where floats travel."""
        if not batch.image.is_floating_point() or self._batches.is_array:
            return
        split = batch.position.split
        ending = self._batches.endings.get(split)
        _check_floats(ending, split)
        if not self._tells or (ending and ending.is_own):
            return
        if self.augment and not ending:
            applied = ", and augment.mean and augment.std apply to them"
        else:
            applied = ""
        _logger.warning(
            "transform.%s returns float images, which are taken as they are: float32 travels, four times the "
            "bytes of uint8%s",
            split,
            applied,
        )


def _check_module(ending: Ending | None, augment: DeviceAugment) -> None:
    """Raise ConfigError if a pipeline and the module of `augment` end with different normalizations."""
    config = augment.config
    if (
        ending
        and ending.normalizes
        and augment.normalizes
        and (ending.mean, ending.std) != (config.mean, config.std)
    ):
        raise ConfigError(
            f"transform.train ends with {ending.steps}, {ending.described}, and augment.module with another "
            "Normalize: images are normalized once, so leave one of them out"
        )


def _check_floats(ending: Ending | None, split: str) -> None:
    """Raise ConfigError for floats of a pipeline whose ending the device does, on uint8 images."""
    if ending is not None and ending.is_own and ending.on_device:
        raise ConfigError(
            f"transform.{split} makes floats before its {ending.steps}, which raypipe does on the device, for "
            "uint8 images: let the steps before make uint8, or give the pipeline as a function of an image, whose "
            "floats are taken as they are"
        )


def _described(endings: Mapping[Split, Ending]) -> Iterator[str]:
    """Lines that say what is done with each split's images, and where."""
    lines = {
        split: _line(ending, split)
        for split, ending in endings.items()
        if ending.is_own
    }
    every = list(endings.values())
    if len(lines) == 2 and every[0] == every[1]:
        yield _line(every[0], "train and val")
    else:
        yield from lines.values()
    if len(lines) == 2 and every[0].described != every[1].described:
        yield "transform.train and transform.val end differently, and so each split has images of its own kind"


def _line(ending: Ending, splits: str) -> str:
    if ending.on_device:
        return f"transform.{splits}: {ending.steps} ({ending.described}) is done on the device; uint8 travels"
    return (
        f"transform.{splits}: {ending.because}, so the CPU makes float32 images, four times the bytes of uint8: "
        "the device does such steps if they end the pipeline, and those before make uint8 RGB"
    )
