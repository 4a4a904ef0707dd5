"""Last stage of a batch on its device: augmentation and mixing in training, and the end of the user's pipeline.

    uint8 (B, C, H, W), or crops (B, n, C, H, W) → floats of the pipeline's dtype, (x / 255 - mean) / std

With `augment`, `raypipe.device.augment` augments training batches before, and normalizes them as `config` says.
"""

from __future__ import annotations

import functools
import logging

import torch

from raypipe.config import AugmentConfig
from raypipe.device.ambient import pinned
from raypipe.device.augment import DeviceAugment, Finish, Normalize
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
        self.config = normalization(augment, endings.get("train")) if augment else None
        self._configs = {
            split: normalization(augment, ending, split)
            for split, ending in endings.items()
        }

    @functools.cached_property
    def augment(self) -> DeviceAugment | None:
        """The device augmentation, built at its first use, whose imports take a second; None = none."""
        if self.config is None:
            return None
        return DeviceAugment(
            self.config, self._device, self._train_dtype, self._batches
        )

    @functools.cached_property
    def _normalize(self) -> dict[Split, Normalize]:
        """The normalization of each split whose pipeline had an ending; one without is left out."""
        normalize = {}
        with pinned(self._device):
            for split, config in self._configs.items():
                if self.augment and not self._batches.endings[split].normalizes:
                    # a Normalize at the end of its module is that of validations, too
                    config = self.augment.config
                if config:
                    dtype = self._dtypes[split]
                    normalize[split] = Normalize(config, self._device, dtype)
        return normalize

    def __call__(self, batch: Batch, strength: float) -> Batch:
        """Finish a batch; `strength` is that of the augmentation."""
        if not self._batches.has_images:
            return batch
        split = batch.position.split
        ending = self._batches.endings.get(split)
        makes_floats = batch.image.is_floating_point() and not self._batches.is_array
        if makes_floats and ending and ending.is_own and ending.on_device:
            raise ConfigError(
                f"transform.{split} makes floats before its {ending.steps}, which raypipe does on the device, for "
                "uint8 images: let the steps before make uint8, or give the pipeline as a function of an image, "
                "whose floats are taken as they are"
            )
        if split not in self._seen and self._tells:
            if not self._seen:
                self._describe()
            if makes_floats and not (ending and ending.is_own):
                self._warn_of_floats(split, bool(ending))
        self._seen.add(split)
        finish = self._finish_of(batch, ending) if ending else None
        is_augmented = self.augment is not None and split == "train"
        is_recorded = self.augment is not None and self.augment.config.differentiable
        if finish and not is_augmented and not is_recorded:
            with pinned(self._device):
                images = images_in(batch.fields).items()
                return batch.with_fields(
                    {name: finish(image) for name, image in images}
                )
        if self.augment is not None:
            return self.augment.of_batch(batch, strength, finish)
        return batch

    def _finish_of(self, batch: Batch, ending: Ending) -> Finish:
        """What makes the model's input of the images of a batch whose pipeline had an ending."""
        split = batch.position.split
        normalize = self._normalize.get(split)
        is_done = batch.image.is_floating_point() and not ending.is_own
        if normalize is None or is_done:
            return lambda image: image.to(self._dtypes[split])
        return normalize

    def _describe(self) -> None:
        """Say what is done with the images, and where."""
        own = {
            split: ending
            for split, ending in self._batches.endings.items()
            if ending.is_own
        }
        for split, ending in own.items():
            print_progress(_logger, _line(ending, split))
        if len({ending.described for ending in own.values()}) > 1:
            print_progress(
                _logger,
                "transform.train and transform.val end differently, and so each split has images of its own kind",
            )

    def _warn_of_floats(self, split: Split, has_ending: bool) -> None:
        applied = ""
        if self.augment and not has_ending:
            applied = ", and augment.mean and augment.std apply to them"
        _logger.warning(
            "transform.%s returns float images, which are taken as they are: float32 travels, four times the "
            "bytes of uint8%s",
            split,
            applied,
        )


def _line(ending: Ending, split: Split) -> str:
    if ending.on_device:
        return f"transform.{split}: {ending.steps} ({ending.described}) is done on the device; uint8 travels"
    return (
        f"transform.{split}: {ending.because}, so the CPU makes float32 images, four times the bytes of uint8: "
        "the device does such steps if they end the pipeline, and those before make uint8 RGB"
    )
