"""A loader's training or its validation as a plain loader, for training loops of other libraries."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, Literal

import numpy as np
import torch

from raypipe.device.prefetcher import Batch
from raypipe.errors import ConfigError
from raypipe.plan.places import Split
from raypipe.streaming.epochs import Batches, Epoch
from raypipe.streaming.loader import Loader

_logger = logging.getLogger(__name__)

Format = Literal["dict", "batch"] | Callable[[Batch], Any]
"""What a plain loader yields: `{"image", "target", "weight"}`, `"views"` where there are any, and columns by their
names; the Batch; or what a function makes of it."""

NOT_COUNTED = -100
"""The target of rows that do not count: padding, and samples that cannot be used. `cross_entropy` of torch leaves
it out by default, and so do the models of Transformers."""


def counted_target(batch: Batch) -> torch.Tensor:
    """The targets: classes, int64 (B,), are NOT_COUNTED where a row does not count; others are as they are."""
    if batch.target.dtype != torch.int64 or batch.target.ndim != 1:
        return batch.target
    return torch.where(batch.weight > 0, batch.target, NOT_COUNTED)


def plain_loaders(
    loader: Loader, format: Format = "dict"
) -> tuple[PlainLoader, PlainLoader]:
    """Return the loader's training and validation, each as an iterable that a loop iterates once per epoch.

    Args:
        loader: this rank's loader.
        format: items to yield: "dict" (image, target, weight, and columns), "batch", or a function of the `Batch`.

    Raises:
        ConfigError: the format is "dict", and MixUp or CutMix is on, for whose targets it has no room, or a column
            has the name of an entry. Iterating raises it if the loop wants more epochs than the plan has.
    """
    check_format(loader, format)
    shared = SharedEpochs(loader)
    return PlainLoader(shared, "train", format), PlainLoader(shared, "val", format)


def check_format(loader: Loader, format: Format) -> None:
    """Raise ConfigError unless the loader's batches can have the format; see `plain_loaders`."""
    if format not in ("dict", "batch") and not callable(format):
        raise ConfigError(
            f"format must be 'dict', 'batch' or a function of the Batch, got {format!r}"
        )
    if loader.augment and loader.augment.mixes and format == "dict":
        raise ConfigError(
            "MixUp and CutMix make two targets of one, and 'dict' has room for one: give a function, such as "
            "lambda batch: (batch.image, soft_targets(batch.target, batch.mix, num_classes))"
        )
    if format == "dict" and (
        clash := {"image", "target", "weight", "views"} & loader.columns.types.keys()
    ):
        raise ConfigError(
            f"column {min(clash)!r} has the name of an entry of 'dict': give a function instead"
        )


class SharedEpochs:
    """The epochs of the one stream that both loaders share.

    Attributes:
        loader: the loader of the stream.
        epoch: the epoch under way; None = none is, since the loader was told where to continue.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self._epochs = loader.epochs()
        self._epoch: Epoch | None = None

    @property
    def epoch(self) -> Epoch | None:
        epoch = self._epoch
        return epoch if epoch and self.loader._is_in(epoch) else None

    def next(self, split: Split) -> Batches:
        """The next training, or the validation of the epoch that is being trained."""
        self.rewind_look(split == "train")
        epoch = self.epoch
        # After a resume before a validation, the rest of the epoch's training is empty.
        if epoch is None or (split == "train" and epoch.train.begun):
            epoch = self._next_epoch()
        if split == "train":
            if epoch is None:
                epochs = self.loader.plan.config.epochs
                raise ConfigError(
                    f"the loop wants more than the {epochs} epochs of the plan: set plan.epochs"
                )
            return epoch.train
        # The plan may have none here; it is a pure function, so there is one wherever a loop wants it.
        return epoch.val if epoch and len(epoch.val) else self.loader.validation()

    def rewind_look(self, is_new_loop: bool) -> None:
        """Go back to the start of an epoch of which only the first batch was taken: a look costs nothing.

        Args:
            is_new_loop: whether a loop begins, and so ends any that has taken that batch.
        """
        epoch = self.epoch
        if epoch and epoch.train.segment and epoch.train.is_look(is_new_loop):
            first_step = epoch.train.segment.first_step
            start = self.loader.plan.cursor(epoch.number, first_step)
            self.loader.load_state_dict(asdict(start))

    def go_to(self, epoch: int, num_steps: int) -> None:
        """Let the next training be what comes after so many steps of an epoch; nothing happens if it is."""
        plan = self.loader.plan
        upcoming = plan.normalized(self.loader.cursor)
        if self.epoch and self.epoch.train.begun:
            upcoming = plan.cursor(self.epoch.number + 1, 0)
        step = plan.training_of(epoch).step_of(num_steps)
        # either may be the first of some that are skipped
        next_step = plan.training_of(upcoming.epoch, upcoming.step).step_of(0)
        if (epoch, step) != (upcoming.epoch, next_step):
            self.loader.load_state_dict(asdict(plan.cursor(epoch, step)))

    @property
    def num_steps(self) -> int:
        """Training steps, without skipped ones, of the epoch under way; after its last batch, of the next."""
        plan = self.loader.plan
        cursor = self.loader.cursor
        number = cursor.epoch + (cursor.step == plan.steps_per_epoch)
        if self.epoch:
            train = self.epoch.train
            number = self.epoch.number + (train.begun and not train.is_open)
        return plan.training_of(min(number, plan.config.epochs - 1)).num_delivered

    def _next_epoch(self) -> Epoch | None:
        self._epoch = next(self._epochs, None)
        if self._epoch is None:
            # there are more again after a load_state_dict
            self._epochs = self.loader.epochs()
        return self._epoch


class PlainLoader:
    """Iterable whose iterations are the next epoch's training, after a resume its end; or a whole validation.

    An iteration of a training that is left after its first batch was a look: the next one begins with it again. A
    validation has no batches without samples and, in one process, no rows without: weights are 1. Ranks of several
    need batches of one shape and number.

    Both loaders of a run share one stream. It costs least in the order of the plan, which validates at the end of
    an epoch; at any other time, and a second time, a validation is made as well.

    Attributes:
        batch_size: B, the size of this rank's micro-batches; several make up an optimizer step, see
            `Loader.accumulation_steps`.
        end_of_dataloader: whether the newest batch is the last of a training step, or of a validation. Accelerate
            reads it, and begins to count a step's batches again.
        remainder: -1, as Accelerate has it for samples that need not be cut off: there are none in one process,
            and their weights are 0 in several.
    """

    end_of_dataloader = False
    remainder = -1

    def __init__(self, shared: SharedEpochs, split: Split, format: Format) -> None:
        self.batch_size = shared.loader.plan.config.micro_batch_size
        self._shared = shared
        self._loader = shared.loader
        self._split = split
        self._format = format

    def __len__(self) -> int:
        """Return the number of this rank's micro-batches in a whole epoch: in this one, if steps are skipped."""
        if self._split == "train":
            return self._shared.num_steps * self._loader.accumulation_steps
        plan = self._loader.plan
        filled = -(-plan.num_val_rows // self.batch_size)
        steps, rest = divmod(filled, plan.config.per_step)
        last = -(-rest // self._loader.world_size)
        return steps * self._loader.accumulation_steps + last

    def __iter__(self) -> Iterator[Any]:
        # A generator: loops of others make iterators that they never ask.
        # A stream without validation has an empty one after each epoch.
        if not len(self):
            return
        with _known_to_accelerate(self):
            for batch in (
                self._training() if self._split == "train" else self._validation()
            ):
                yield self._formed(batch)

    def _training(self) -> Iterator[Batch]:
        batches = iter(self._shared.next("train"))
        for batch in batches:
            self.end_of_dataloader = batch.ends_step
            if batch.ends_split:
                # their end is asked for with the last one, since loops that count do not ask for it
                next(batches, None)
            yield batch

    def _validation(self) -> Iterator[Batch]:
        """The batches up to the last one in which any rank has samples; a single rank's without padding."""
        num_left = len(self)
        is_single = self._loader.world_size == 1
        num_rows = num_left * self.batch_size * self._loader.world_size
        if not is_single and num_rows > self._loader.plan.num_val:
            _warn_once(
                "the last batches of the validation have padding, with weight 0 and target -100: a mean over a "
                "batch, or over the batches, is wrong or NaN. Sum over rows by weight (docs/integrations.md)"
            )
        batches = iter(self._shared.next("val"))
        for batch in batches:
            num_left -= 1
            counts = batch.index >= 0
            if batch.num_bad:
                counts &= (batch.weight > 0).cpu().numpy()
            if (is_single and not counts.all()) or not num_left:
                batch = batch.with_rows(np.flatnonzero(counts | (not is_single)))
            self.end_of_dataloader = not num_left
            if not num_left:
                batch = replace(batch, ends_step=True, ends_split=True)
                for _ in batches:
                    pass
            if len(batch.index):
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """Like `Loader.state_dict`: both loaders of a run share one place.

        Raises:
            ConfigError: some batches of an optimizer step were handed out, and others not. Their gradients are in
                no checkpoint, and the loop's count of batches would continue from another place than the stream.
        """
        loader = self._loader
        self._shared.rewind_look(False)
        if num := loader.num_beyond:
            raise ConfigError(
                f"a checkpoint inside an optimizer step, after {num} of this rank's "
                f"{loader.accumulation_steps} batches, would lose their gradients, and the resumed loop would "
                "step at other batches: save after the last (if batch.ends_step, if accelerator.sync_gradients)"
            )
        return loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Like `Loader.load_state_dict`; loading it into one of the two loaders is enough."""
        self._loader.load_state_dict(state)

    def _formed(self, batch: Batch) -> Any:
        if callable(self._format):
            return self._format(batch)
        if self._format == "batch":
            return batch
        entries: dict[str, Any] = {
            "image": batch.image,
            "target": counted_target(batch),
            "weight": batch.weight,
        }
        return entries | ({"views": batch.views} if batch.views else {}) | batch.columns


@functools.cache
def _warn_once(text: str) -> None:
    _logger.warning(text)


@contextlib.contextmanager
def _known_to_accelerate(loader: PlainLoader) -> Iterator[None]:
    """Context manager: the loader is the one that Accelerate asks for `end_of_dataloader`, if it is in use.

    So it counts the batches of each step from 0. Its own count of all batches would be wrong once the number of
    workers has changed.
    """
    module: Any = sys.modules.get("accelerate.state")
    if module and module.GradientState._shared_state:
        state = module.GradientState()
    else:
        state = None
    if state:
        needed = loader._loader.accumulation_steps
        if type(loader) is PlainLoader and state.num_steps != needed:
            _warn_once(
                f"gradient_accumulation_steps of Accelerator is not the plan's {needed}: unless your loop steps "
                "by itself, give it loader.accumulation_steps"
            )
        state._add_dataloader(loader)
    try:
        yield
    finally:
        if state:
            state._remove_dataloader(loader)
