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
from raypipe.device.augment import DeviceAugment, Finish, Normalize, finished
from raypipe.device.prefetcher import Batch
from raypipe.device.ring import numbered
from raypipe.errors import ConfigError
from raypipe.plan.places import Split
from raypipe.progress import print_progress
from raypipe.transform.device_input import DeviceInput
from raypipe.transform.ending import normalization

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
        self._dtype = dtype
        self._batches = batches
        self._tells = tells
        self._seen = set[Split]()
        splits: tuple[Split, ...] = ("train", "val")
        self._configs = {
            split: normalization(augment, batches.endings.get(split), split)
            for split in splits
        }
        self.config = augment and self._configs["train"]

    def _dtype_of(self, split: Split) -> torch.dtype:
        """The dtype of a split's images: as given, or that of its pipeline, or of the training's."""
        endings = self._batches.endings
        ending = endings.get(split) or endings.get("train")
        if self._dtype or not ending:
            return self._dtype or torch.float32
        return getattr(torch, ending.dtype, torch.float32)

    @functools.cached_property
    def augment(self) -> DeviceAugment | None:
        """The device augmentation, built at its first use, whose imports take a second; None = none."""
        if self.config is None:
            return None
        return DeviceAugment(
            self.config, self._device, self._dtype_of("train"), self._batches
        )

    @functools.cached_property
    def _normalize(self) -> dict[Split, Normalize]:
        """The normalization of each split; one whose images stay as they come is left out."""
        normalize = {}
        with pinned(self._device):
            for split, config in self._configs.items():
                ending = self._batches.endings.get(split)
                if self.augment and not (ending and ending.normalizes):
                    # a Normalize at the end of its module is that of validations, too
                    config = self.augment.config
                if config:
                    dtype = self._dtype_of(split)
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
                applied = ", and augment.mean and augment.std apply to them"
                _logger.warning(
                    "transform.%s returns float images, which are taken as they are: float32 travels, four times "
                    "the bytes of uint8%s",
                    split,
                    applied if self.augment and not ending else "",
                )
        self._seen.add(split)
        finish: Finish | None = self._normalize.get(split)
        if ending and (finish is None or (makes_floats and not ending.is_own)):
            finish = functools.partial(torch.Tensor.to, dtype=self._dtype_of(split))
        if self.augment is not None:
            return self.augment.of_batch(batch, strength, finish)
        if finish is None:
            return batch
        with pinned(self._device):
            return finished(batch, finish)

    def _describe(self) -> None:
        """Say what is done with the images, and where."""
        own = {
            split: ending
            for split, ending in self._batches.endings.items()
            if ending.is_own
        }
        for split, ending in own.items():
            line = f"{ending.steps} ({ending.described}) is done on the device; uint8 travels"
            if not ending.on_device:
                line = (
                    f"{ending.because}, so the CPU makes float32 images, four times the bytes of uint8: the "
                    "device does such steps if they end the pipeline, and those before make uint8 RGB"
                )
            print_progress(_logger, f"transform.{split}: {line}")
        if len({ending.described for ending in own.values()}) > 1:
            print_progress(
                _logger,
                "transform.train and transform.val end differently, and so each split has images of its own kind",
            )
