"""Last stage of a batch on its device: augmentation and mixing in training, and the end of the user's pipeline."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from raypipe.config import AugmentConfig, TransformConfig
from raypipe.device.augment import DeviceAugment
from raypipe.device.finish import Finish, check_floats, check_module
from raypipe.device.mixing import check_mixable
from raypipe.device.prefetcher import Batch
from raypipe.plan.places import Split
from raypipe.progress import print_progress
from raypipe.streaming.spec import UserTransform
from raypipe.transform.columns import SampleColumns
from raypipe.transform.ending import Ending
from raypipe.transform.views import makes_views

_logger = logging.getLogger(__name__)


class DeviceStage:
    """Finishes the batches of one rank.

    Args:
        augment: the user's augmentation; None = none.
        device: where batches are.
        dtype: dtype of the images; None = that of the pipeline, or float32.
        endings: dtype and normalization with which pipelines ended, by split.
        columns: columns of the batches.
        tells: whether it says what it does; rank 0 does.

    Attributes:
        config: the augmentation, with the mean and std that hold; None = none.
        augment: the device augmentation; None = none, or not built yet.

    Raises:
        ConfigError: the settings contradict one another.
    """

    def __init__(
        self,
        augment: AugmentConfig | None,
        device: torch.device,
        dtype: torch.dtype | None,
        endings: Mapping[Split, Ending],
        columns: SampleColumns,
        tells: bool,
    ) -> None:
        self._finish = Finish(endings, augment, device, dtype)
        self.config = self._finish.config if augment else None
        if self.config and (target := columns.target):
            check_mixable(self.config, target.dtype, target.shape)
        self._device = device
        self._endings = endings
        self._has_target = columns.has_target
        self._tells = tells
        self._seen = set[Split]()
        self.augment: DeviceAugment | None = None

    def build(self, train: UserTransform, transform: TransformConfig) -> None:
        """Build the augmentation, whose imports take a second.

        Args:
            train: the CPU transform of the training.
            transform: the transform's settings.
        """
        self._travels_as_array = transform.decode_as == "array"
        if self.config:
            self.augment = DeviceAugment(
                self.config,
                self._device,
                self._finish.dtype,
                transform.target_columns,
                makes_views(train),
                self._has_target,
            )
            check_module(self._endings.get("train"), self.augment)
        if self._tells:
            for line in self._finish.described():
                print_progress(_logger, line)

    def __call__(self, batch: Batch, strength: float) -> Batch:
        """Finish a batch; `strength` is that of the augmentation."""
        split = batch.position.split
        if split not in self._seen:
            self._seen.add(split)
            self._check_floats(batch)
        is_recorded = self.augment is not None and self.augment.config.differentiable
        if self._finish.does(split) and not is_recorded:
            return self._finish(batch)
        if self.augment is not None:
            return self.augment.of_batch(batch, strength)
        return batch

    def _check_floats(self, batch: Batch) -> None:
        """Check the dtype of a split's first images, and say where floats travel."""
        if not batch.image.is_floating_point() or self._travels_as_array:
            return
        split = batch.position.split
        ending = self._endings.get(split)
        check_floats(ending, split)
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
