"""The last stage of a batch's images, where pipelines ended with it: their dtype, and normalization.

    uint8 (B, C, H, W), or crops (B, n, C, H, W) → floats of the pipeline's dtype, (x / 255 - mean) / std

With `augment`, `raypipe.device.augment` augments training batches before, and normalizes them as `config` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from raypipe.config import AugmentConfig
from raypipe.device.ambient import pinned
from raypipe.device.augment import DeviceAugment, Normalize
from raypipe.device.prefetcher import Batch
from raypipe.device.ring import numbered
from raypipe.errors import ConfigError
from raypipe.plan.places import Split
from raypipe.transform.ending import Ending, normalization
from raypipe.transform.fields import images_in


class Finish:
    """Finishes the batches of a stream.

    Args:
        endings: dtype and normalization, by split.
        augment: the user's augmentation; None = without one.
        device: where batches are.
        dtype: dtype of the results; None = that of the pipeline, or float32.

    Attributes:
        config: the augmentation, with the mean and std that hold for training.
        dtype: dtype of the training's images.

    Raises:
        ConfigError: a pipeline and `augment` both normalize, see `normalization`.
    """

    def __init__(
        self,
        endings: Mapping[Split, Ending],
        augment: AugmentConfig | None,
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._endings = dict(endings)
        self._device = numbered(device)
        self._has_augment = augment is not None
        self._dtypes = {
            split: dtype or getattr(torch, ending.dtype, torch.float32)
            for split, ending in endings.items()
        }
        self.dtype = self._dtypes.get("train", dtype or torch.float32)
        self.config = normalization(endings.get("train"), augment)
        self._normalize = dict[Split, Normalize]()
        with pinned(self._device):
            for split, ending in endings.items():
                if config := normalization(ending, augment, split):
                    self._normalize[split] = Normalize(
                        config, self._device, self._dtypes[split]
                    )

    def does(self, split: Split) -> bool:
        """Return whether a split's batches are finished here, and not by the augmentation."""
        return split in self._endings and not (self._has_augment and split == "train")

    def __call__(self, batch: Batch) -> Batch:
        """Finish the images of a batch of a split that has an ending."""
        split = batch.position.split
        ending = self._endings[split]
        with pinned(self._device):
            finished = {
                name: self._finished(image, ending, split)
                for name, image in images_in(batch.fields).items()
            }
        return batch.with_fields(finished)

    def _finished(
        self, image: torch.Tensor, ending: Ending, split: Split
    ) -> torch.Tensor:
        normalize = self._normalize.get(split)
        if not image.is_floating_point():
            assert normalize is not None, "the library makes floats"
            return normalize(image)
        check_floats(ending, split)
        if normalize is None or not ending.is_own:
            return image.to(self._dtypes[split])
        return normalize(image)

    def described(self) -> Iterator[str]:
        """Lines that say what is done, and where."""
        texts = {
            split: _line(ending, split)
            for split, ending in self._endings.items()
            if ending.is_own
        }
        endings = [*self._endings.values()]
        if len(texts) == 2 and endings[0] == endings[1]:
            yield _line(endings[0], "train and val")
        else:
            yield from texts.values()
        if len(texts) == 2 and endings[0].described != endings[1].described:
            yield "transform.train and transform.val end differently, and so each split has images of its own kind"


def check_module(ending: Ending | None, augment: DeviceAugment) -> None:
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


def check_floats(ending: Ending | None, split: str) -> None:
    """Raise ConfigError for floats of a pipeline whose ending the device does, on uint8 images."""
    if ending is not None and ending.is_own and ending.on_device:
        raise ConfigError(
            f"transform.{split} makes floats before its {ending.steps}, which raypipe does on the device, for "
            "uint8 images: let the steps before make uint8, or give the pipeline as a function of an image, whose "
            "floats are taken as they are"
        )


def _line(ending: Ending, splits: str) -> str:
    if ending.on_device:
        return f"transform.{splits}: {ending.steps} ({ending.described}) is done on the device; uint8 travels"
    return (
        f"transform.{splits}: {ending.because}, so the CPU makes float32 images, four times the bytes of uint8: "
        "with all such steps at the end of the pipeline the device does them"
    )
