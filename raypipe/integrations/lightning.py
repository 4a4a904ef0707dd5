"""Data module of Lightning for a stream."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from raypipe.streaming.loader import Loader
from raypipe.streaming.plain import Format, PlainLoader, plain_loaders

__all__ = ["StreamDataModule"]


class StreamDataModule(pl.LightningDataModule):
    """Data module with the training and validation of this rank's loader.

        loader = raypipe.loader(spec, augment=…)
        trainer = pl.Trainer(**StreamDataModule.settings(loader), strategy=…)
        trainer.fit(module, datamodule=StreamDataModule(loader), ckpt_path=…)

    Its checkpoints contain the loader's position, so a resumed run continues with the next step, even mid-epoch.

    Args:
        loader: this rank's loader.
        format: format of batches, see `raypipe.plain_loaders`.
    """

    def __init__(self, loader: Loader, format: Format = "dict") -> None:
        super().__init__()
        self._loader = loader
        self._train, self._val = plain_loaders(loader, format)

    @staticmethod
    def settings(loader: Loader) -> dict[str, Any]:
        """Return the arguments of `pl.Trainer` that the plan sets: epochs, accumulation, validation interval."""
        config = loader.plan.config
        return {
            "max_epochs": config.epochs,
            "accumulate_grad_batches": loader.accumulation_steps,
            "check_val_every_n_epoch": config.val_interval or 1,
            "num_sanity_val_steps": 0,  # these steps would come before the first training batch
            "use_distributed_sampler": False,
        }

    def train_dataloader(self) -> PlainLoader:
        return self._train

    def val_dataloader(self) -> PlainLoader | list[PlainLoader]:
        return self._val if len(self._val) else []

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loader.load_state_dict(state_dict)
