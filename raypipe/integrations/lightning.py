"""Data module of Lightning for a stream.

Lightning counts batches, a stream's state counts whole steps. Lightning's counters say where a run is: each
training begins at the place that they mean, and a checkpoint's counters are brought to a whole step when it
is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl

from raypipe.errors import ConfigError
from raypipe.plan.places import Split
from raypipe.streaming.epochs import Batches
from raypipe.streaming.loader import Loader
from raypipe.streaming.plain import Format, PlainLoader, SharedEpochs, check_format

__all__ = ["StreamDataModule"]

_logger = logging.getLogger(__name__)


class StreamDataModule(pl.LightningDataModule):
    """Data module with the training and validation of this rank's loader.

        loader = raypipe.loader(spec, augment=…)
        trainer = pl.Trainer(**StreamDataModule.settings(loader), strategy=…)
        trainer.fit(module, datamodule=StreamDataModule(loader), ckpt_path=…)

    A run that is resumed from any of Lightning's checkpoints, made with any number of workers, continues with the
    next step, even mid-epoch. A checkpoint from inside an optimizer step, which has no gradients, continues
    with the whole step.

    Args:
        loader: this rank's loader.
        format: format of batches, see `raypipe.plain_loaders`.
    """

    def __init__(self, loader: Loader, format: Format = "dict") -> None:
        super().__init__()
        check_format(loader, format)
        self._loader = loader
        self._format = format
        shared = _LightningEpochs(self, loader)
        self._train, self._val = (
            _LightningLoader(shared, split, format) for split in ("train", "val")
        )
        self._saved_in_step = 0  # batches of a step, where the checkpoint was made

    @staticmethod
    def settings(loader: Loader) -> dict[str, Any]:
        """Return the arguments of `pl.Trainer` that the plan sets: epochs, accumulation, validation interval."""
        config = loader.plan.config
        of_lengths = {}
        if loader.plan.skipped.count:
            # epochs have different lengths
            of_lengths["reload_dataloaders_every_n_epochs"] = 1
        return of_lengths | {
            "max_epochs": config.epochs,
            "accumulate_grad_batches": loader.accumulation_steps,
            "check_val_every_n_epoch": config.val_interval or 1,
            "num_sanity_val_steps": 0,  # a stream starts once more for them
            "use_distributed_sampler": False,
        }

    def setup(self, stage: str) -> None:
        """Check the trainer's flags, before anything is trained.

        Raises:
            ConfigError: a flag contradicts the plan.
        """
        trainer = self._trainer()
        if stage != "fit":
            return
        self._check_flags(trainer)
        if not any(isinstance(callback, _WholeSteps) for callback in trainer.callbacks):
            trainer.callbacks.insert(0, _WholeSteps(self))

    def train_dataloader(self) -> PlainLoader:
        return self._train

    def val_dataloader(self) -> PlainLoader | list[PlainLoader]:
        return self._val if len(self._val) else []

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict() | {
            "accumulation_steps": self._loader.accumulation_steps
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved_in_step = state_dict.get(
            "accumulation_steps", self._loader.accumulation_steps
        )
        if self.trainer is None or self.trainer.state.fn == "fit":
            self._loader.load_state_dict(state_dict)

    def _trainer(self) -> Any:
        assert self.trainer is not None, "a Trainer has set it"
        return self.trainer

    def _check_flags(self, trainer: Any) -> None:
        loader = self._loader
        config = self._loader.plan.config
        steps = loader.plan.steps_per_epoch * config.epochs
        unlimited = trainer.max_steps == -1
        max_epochs = trainer.max_epochs
        if max_epochs is not None and max_epochs > config.epochs:
            raise ConfigError(
                f"max_epochs must be at most {config.epochs}, got {max_epochs}: the plan has no more (plan.epochs)"
            )
        if max_epochs in (None, -1) and (unlimited or trainer.max_steps > steps):
            raise ConfigError(
                f"max_epochs must be set, to at most {config.epochs}, or max_steps to at most {steps}: the plan "
                "has no more (plan.epochs)"
            )
        self._check_accumulation(trainer)
        if loader.plan.skipped.count and trainer.reload_dataloaders_every_n_epochs != 1:
            raise ConfigError(
                "reload_dataloaders_every_n_epochs must be 1, since plan.skip gives epochs different lengths"
            )
        if self._format == "batch" and trainer.precision in (
            "16-true",
            "bf16-true",
            "64-true",
        ):
            raise ConfigError(
                f"precision={trainer.precision!r} converts what batches hold, and a Batch cannot be changed: give "
                'StreamDataModule "dict" or a function as format, or use mixed precision'
            )

    def _check_accumulation(self, trainer: Any) -> None:
        needed = self._loader.accumulation_steps
        if not trainer.lightning_module.automatic_optimization:
            needed = 1  # the module steps itself, and Lightning demands 1
        if trainer.accumulate_grad_batches != needed:
            raise ConfigError(
                f"accumulate_grad_batches must be {needed}, got {trainer.accumulate_grad_batches}: an optimizer "
                "step of the plan has so many batches on each rank (plan.global_batch_size, plan.micro_batch_size)"
            )


class _LightningLoader(PlainLoader):
    """Plain loader whose place is in the data module's state."""

    def state_dict(self) -> dict[str, Any]:
        return {}  # Lightning saves a loader's own state besides that of the data module

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class _LightningEpochs(SharedEpochs):
    """Trainings from the places that Lightning's counters mean."""

    def __init__(self, module: StreamDataModule, loader: Loader) -> None:
        super().__init__(loader)
        self._module = module

    def rewind_look(self, is_new_loop: bool) -> None:
        if self._module.trainer is None:  # otherwise Lightning's counters say where
            super().rewind_look(is_new_loop)

    def next(self, split: Split) -> Batches:
        trainer: Any = self._module.trainer  # its types lack some attributes
        if split == "train" and trainer is not None:
            self._module._check_accumulation(trainer)
            loop: Any = trainer.fit_loop
            # Nothing is counted of a batch before it has come.
            step = (
                loop.epoch_loop.batch_progress.current.ready
                // self.loader.accumulation_steps
            )
            # The same samples in each epoch.
            if getattr(trainer, "overfit_batches", 0):
                epoch = 0
            else:
                epoch = loop.epoch_progress.current.processed
            self.go_to(epoch, step)
        if split == "val" and trainer is not None and self.epoch:
            loop = trainer.fit_loop
            batches = loop.epoch_loop.batch_progress
            is_over = batches.is_last_batch
            # to its end, or up to Lightning's limit
            if is_over or 0 < loop.max_batches <= batches.current.ready:
                self.epoch.train.leave()  # Lightning does not tell its iterator
        return super().next(split)


class _WholeSteps(pl.Callback):
    """Brings the batch counters of a checkpoint that is loaded to a whole step of the loader's world size.

    Its optimizer steps are as many, and the gradients of a step under way are not in it.
    """

    def __init__(self, module: StreamDataModule) -> None:
        self._module = module

    def on_load_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        loop = checkpoint.get("loops", {}).get("fit_loop", {})
        batches = loop.get("epoch_loop.batch_progress")
        epochs = loop.get("epoch_progress")
        saved = self._module._saved_in_step
        needed = self._module._loader.accumulation_steps
        if not batches or not saved:
            return
        total = batches["total"]
        current = batches["current"]
        done = _num_done(current)
        is_over = batches["is_last_batch"] and done == current["ready"]
        if is_over and saved == needed:
            to = done  # whichever batch it ended with
        else:
            to = done // saved * needed
        begun = 0 if is_over else done % saved
        if epochs["current"]["started"] < epochs["current"]["ready"]:
            begun = 0
            to = 0
            is_over = False  # the batches are those of the epoch before
        if begun:
            _logger.warning(
                "the checkpoint was made after %d of the %d batches of an optimizer step, without gradients: "
                "these are trained again. Running statistics and torch's random state have seen them before; "
                "every_n_train_steps makes checkpoints between steps",
                begun,
                saved,
            )
        before = (_num_done(total) - done) // saved * needed
        batches["is_last_batch"] = is_over
        _shift(current, to - done)
        _shift(total, before + to - _num_done(total))


def _shift(counts: dict[str, int], by: int) -> None:
    for name in counts:
        counts[name] += by


def _num_done(counts: Mapping[str, int]) -> int:
    """Batches that are trained; in a callback at a batch's end, that batch is not yet completed."""
    ready, started, processed = (
        counts[name] for name in ("ready", "started", "processed")
    )
    if ready == started == processed:
        return processed
    return counts["completed"]
