"""Trainer of Transformers for a stream."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import logging
import warnings
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import get_last_checkpoint

from raypipe.device.prefetcher import Batch
from raypipe.errors import ConfigError
from raypipe.plan.schedule import Plan
from raypipe.streaming.loader import Loader
from raypipe.streaming.plain import (
    NOT_COUNTED,
    Format,
    PlainLoader,
    SharedEpochs,
    check_format,
    counted_target,
)

__all__ = ["StreamTrainer", "image_inputs"]

_logger = logging.getLogger(__name__)


def image_inputs(batch: Batch) -> dict[str, Any]:
    """Return inputs of image classifiers: `pixel_values` and `labels`, with -100 for rows that do not count."""
    return {"pixel_values": batch.image, "labels": counted_target(batch)}


_PLACE = "raypipe"
"""The entry of a checkpoint's state, beside those of callbacks, that has the run's place."""

# Arguments without effect where all data is the stream's, and those that order or size a training.
_OF_DATASETS = (
    "data_collator",
    "dataloader_drop_last",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "dataloader_persistent_workers",
    "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context",
    "dataloader_in_order",
    "split_batches",
    "dispatch_batches",
    "even_batches",
    "use_seedable_sampler",
    "non_blocking",
)
_OF_TRAINING = (
    "train_dataset",
    "train_sampling_strategy",
    "group_by_length",
    "length_column_name",
    "data_seed",
    "auto_find_batch_size",
)


class _PlaceInRun(transformers.TrainerCallback):
    """Callback that sets the step, the epoch and the place as the plan counts them.

    The Trainer miscounts a resumed epoch, and does not count the steps of `plan.skip`, or those that a callback
    leaves out by ending an epoch.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def on_step_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        lr_scheduler: Any = None,
        **kwargs: Any,
    ) -> None:
        self._count_skipped(state, lr_scheduler, state.max_steps)

    def on_step_end(
        self,
        args: Any,
        state: Any,
        control: Any,
        lr_scheduler: Any = None,
        **kwargs: Any,
    ) -> None:
        steps = self._plan.steps_per_epoch
        epoch, step = divmod(state.global_step - 1, steps)
        if not self._plan.training_of(epoch, step + 1).num_delivered:
            step = steps - 1
            self._count_skipped(state, lr_scheduler, (epoch + 1) * steps)
        state.epoch = epoch + (step + 1) / steps
        self._note_place(state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_epoch_stop:
            state.global_step += -state.global_step % self._plan.steps_per_epoch
            self._note_place(state)

    def _note_place(self, state: Any) -> None:
        state.stateful_callbacks[_PLACE] = asdict(
            self._plan.cursor_at(state.global_step)
        )

    def _count_skipped(self, state: Any, lr_scheduler: Any, end: int) -> None:
        """Count the skipped steps that come next, up to an end."""
        while state.global_step < end and self._plan.skipped.has(state.global_step):
            state.global_step += 1
            if not isinstance(lr_scheduler, ReduceLROnPlateau):
                with warnings.catch_warnings():
                    # where the first steps are skipped, the optimizer has done none
                    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler")
                    lr_scheduler.step()


class _TrainLoader(PlainLoader):
    """The training as a Trainer needs it, which takes all epochs for as long as the first."""

    def __len__(self) -> int:
        """Return the number of this rank's micro-batches in an epoch of which no step is skipped."""
        return self._loader.plan.steps_per_epoch * self._loader.accumulation_steps


class StreamTrainer(transformers.Trainer):
    """Trainer of Transformers that trains and evaluates on this rank's loader.

    The plan sets its arguments for epochs, batch size and accumulation. It evaluates when its arguments or you say
    so: on the stream's validation, or on your dataset. A resumed run continues with the next step, by the
    place in the checkpoint, and with all of its weights: a checkpoint of another model, or of another plan, is
    rejected.

    The validation loss is the mean over all samples, for any number of workers. With several workers, rows of
    padding have the label -100, which `compute_metrics` must ignore too.

    Args:
        loader: this rank's loader.
        format: format of batches; a Trainer needs dicts of its model's arguments.
        args, kwargs: arguments of `transformers.Trainer`, except datasets and collators.

    Raises:
        ConfigError: an argument contradicts the plan, or has no effect; or, from `train`, the weights in the
            checkpoint do not match the model's.
        CursorError: from `train`: the checkpoint was made under another plan.
    """

    def __init__(
        self, *args: Any, loader: Loader, format: Format = image_inputs, **kwargs: Any
    ) -> None:
        signature = inspect.signature(transformers.Trainer.__init__)
        given = signature.bind(self, *args, **kwargs).arguments
        del given["self"]
        if given.get("args") is None:
            raise ConfigError("StreamTrainer needs args, the TrainingArguments")
        arguments = copy.copy(
            given["args"]
        )  # the plan sets some, and they are the user's
        _check_effects(arguments, given)
        _check_fit(arguments, loader)
        _set_by_plan(arguments, loader)
        # the Trainer would fetch the batches of finished steps again
        arguments.ignore_data_skip = True
        self._loader = loader
        check_format(loader, format)
        shared = SharedEpochs(loader)
        self._stream_train = _TrainLoader(shared, "train", format)
        self._stream_val = PlainLoader(shared, "val", format)
        self._is_of_stream = True  # the data that it evaluates
        super().__init__(
            **{"eval_dataset": self._stream_val} | given | {"args": arguments}
        )
        # It comes first, so that all other callbacks see the epoch that is logged.
        self.callback_handler.callbacks.insert(0, _PlaceInRun(loader.plan))

    def get_train_dataloader(self) -> Any:
        return self._stream_train

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        of_stream = self._validation_of(eval_dataset)
        # one without samples is false
        if of_stream is None:
            return super().get_eval_dataloader(eval_dataset)
        return of_stream

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        of_stream = self._validation_of(test_dataset)
        if of_stream is None:
            return super().get_test_dataloader(test_dataset)
        return of_stream

    def _validation_of(self, dataset: Any) -> Any:
        """The stream's validation, if it is that; None = a dataset of the user's."""
        self._is_of_stream = dataset is self._stream_val or (
            dataset is None and self.eval_dataset is self._stream_val
        )
        return self._stream_val if self._is_of_stream else None

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call `transformers.Trainer.prediction_step`, and scale the loss to its share of the whole validation."""
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        if loss is not None and "labels" in inputs and self._is_of_stream:
            counted = int((inputs["labels"] != NOT_COUNTED).sum())
            num_batches = len(self._stream_val) * self._loader.world_size
            share = counted * num_batches / self._loader.plan.num_val
            # the mean over zero rows is NaN
            loss = loss * share if counted else loss.new_zeros(())
        return loss, logits, labels

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call `transformers.Trainer.train`, after moving the loader to the checkpoint's position."""
        last = resume_from_checkpoint or None
        if last is True:
            last = get_last_checkpoint(self.args.output_dir)
        if last:
            state = json.loads(Path(str(last), "trainer_state.json").read_text())
            place = state.get("stateful_callbacks", {}).get(_PLACE)
            if place is None:
                place = asdict(self._loader.plan.cursor_at(state["global_step"]))
                _logger.warning(
                    "%s does not say for which plan it was made: before its step %d, it may have trained other "
                    "samples than this plan's",
                    last,
                    state["global_step"],
                )
            self._loader.load_state_dict(place)
        return super().train(last, *args, **kwargs)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, *args: Any, **kwargs: Any
    ) -> None:
        self._loaded_from = resume_from_checkpoint
        super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_best_model(self) -> None:
        self._loaded_from = str(self.state.best_model_checkpoint)
        super()._load_best_model()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Load the weights that a checkpoint has under other names, and raise ConfigError if any remain.

        A Trainer saves with `save_pretrained`, which renames weights to the names of the Hub's checkpoints. It
        loads with `load_state_dict`, which does not rename them back, and skips those weights (5.23, 5.24).
        """
        missing = load_result.missing_keys
        unexpected = load_result.unexpected_keys
        if (missing or unexpected) and isinstance(
            self.model, transformers.PreTrainedModel
        ):
            dtypes = [
                value.dtype
                for value in self.model.parameters()
                if value.is_floating_point()
            ]
            model_class: Any = type(self.model)
            translated, report = model_class.from_pretrained(
                self._loaded_from,
                config=self.model.config,
                dtype=functools.reduce(torch.promote_types, dtypes),  # changes no value
                ignore_mismatched_sizes=True,  # the user may have replaced parts of the model
                output_loading_info=True,
            )
            mismatched = [name for name, *_ in report["mismatched_keys"]]
            values = translated.state_dict()
            for name in (*report["missing_keys"], *mismatched):
                values.pop(name, None)
            self.model.load_state_dict(
                {name: values[name] for name in missing if name in values}, strict=False
            )
            missing = [name for name in missing if name not in values]
            unexpected = [
                name for name in unexpected if name in report["unexpected_keys"]
            ]
        wrong = []
        if missing:
            wrong.append(
                f"lacks {len(missing)} weights of the model ({_some(missing)})"
            )
        if unexpected:
            wrong.append(
                f"has {len(unexpected)} weights that the model lacks ({_some(unexpected)})"
            )
        if wrong:
            raise ConfigError(
                f"{self._loaded_from} {' and '.join(wrong)}: build the model that was saved, or start a new run "
                "in another output_dir"
            )


def _defaults(kind: Any) -> dict[str, Any]:
    return {field.name: field.default for field in fields(kind)}


def _check_fit(arguments: transformers.TrainingArguments, loader: Loader) -> None:
    """Raise ConfigError for arguments, or a loader, with which a Trainer cannot follow the plan."""
    config = loader.plan.config
    num_steps = config.epochs * loader.plan.steps_per_epoch
    if arguments.max_steps > num_steps:
        raise ConfigError(
            f"max_steps must be at most {num_steps}, or -1 for all of them, got {arguments.max_steps}: "
            "the plan has no more (plan.epochs)"
        )
    for epoch in range(config.epochs):
        if not loader.plan.training_of(epoch).num_delivered:
            raise ConfigError(
                f"plan.skip leaves out all steps of epoch {epoch}, and a Trainer ends at such an epoch: "
                "leave one of them"
            )
    ahead = loader.accumulation_steps - 1
    if loader.device.type == "cuda" and loader.keep_batches < ahead:
        raise ConfigError(
            f"a Trainer fetches all {ahead + 1} batches of a step before it uses the first: keep them valid "
            f"with raypipe.loader(…, keep_batches={ahead})"
        )


def _set_by_plan(arguments: transformers.TrainingArguments, loader: Loader) -> None:
    """Set the arguments that the plan determines.

    Raises:
        ConfigError: one is given, and contradicts the plan.
    """
    config = loader.plan.config
    size = config.micro_batch_size
    of_plan = {
        "num_train_epochs": (config.epochs, "plan.epochs"),
        "per_device_train_batch_size": (size, "plan.micro_batch_size"),
        "per_device_eval_batch_size": (size, "plan.micro_batch_size"),
        "gradient_accumulation_steps": (
            loader.accumulation_steps,
            "plan.global_batch_size",
        ),
    }
    defaults = _defaults(transformers.TrainingArguments)
    for name, (needed, setting) in of_plan.items():
        if (value := getattr(arguments, name)) not in (needed, defaults[name]):
            raise ConfigError(
                f"{name} must be {needed}, got {value}: leave it out, since {setting} sets it"
            )
        setattr(arguments, name, needed)


def _check_effects(arguments: Any, given: Mapping[str, Any]) -> None:
    """Raise ConfigError at an argument that would do nothing, since the stream makes the batches."""
    defaults = {"train_dataset": None, "data_collator": None}
    defaults |= _defaults(AcceleratorConfig) | _defaults(type(arguments))
    values = vars(arguments.accelerator_config) | vars(arguments) | given
    if arguments.use_cpu:
        values["dataloader_pin_memory"] = True  # TrainingArguments change it
    names = () if given.get("eval_dataset") else _OF_DATASETS
    for name in (*_OF_TRAINING, *names):
        if name in defaults and values.get(name) != defaults[name]:
            raise ConfigError(
                f"{name} has no effect, since the stream makes the batches: leave it out, or give the "
                "eval_dataset for which it is"
            )


def _some(names: Collection[str]) -> str:
    return ", ".join([*names][:3]) + (", …" if len(names) > 3 else "")
