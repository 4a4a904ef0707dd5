"""Steps of a run made again: the tensors as the loop got them, and a table of their samples.

    replay = raypipe.replay("runs/first")
    replay[48211]              → [Batch, …], the M micro-batches of a step
    replay[48211, 3]           → Batch, its micro-batch number 3
    replay.samples(48211)      → [{"index": …, "name": …, "label": …}, …]

Stores, transforms and augmentation are called as the run called them, in this process, on the CPU. Where
the run's device was a GPU, which rounds some operations differently, the images agree up to rounding.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import replace as changed
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raypipe.device.prefetcher import Batch
from raypipe.errors import ConfigError
from raypipe.history.recorded import RecordedRun, open_run
from raypipe.history.sample_table import sample_rows
from raypipe.history.step_maker import Remade, remade_of
from raypipe.plan.places import MicroBatchId, Split

if TYPE_CHECKING:
    from raypipe.history.drawn_at import History, SampleHistory

logger = logging.getLogger(__name__)


def replay(
    run: str | Path, *, trust_run_code: bool = False, anyway: bool = False, **given: Any
) -> Replay:
    """Open a run's folder, to make any of its steps again. Starts no Ray, and changes nothing in the folder.

    Args:
        run: folder or URI of a run, by `raypipe train` or your own loop.
        trust_run_code: open the folder although another user owns it, and run the code that it names.
        anyway: make pixels of stores whose contents have changed since the run.
        given: arguments of `raypipe.open_stream`, or `augment`, to use instead of those in the record: `train="…"`
            for a store that has moved, `train_transform=…` for an object that the folder does not hold.

    Raises:
        ConfigError: there is no run, or it has not begun to train.
    """
    opened = open_run(run, trust_run_code=trust_run_code, **given)
    for sentence in opened.differences:
        logger.warning("%s", sentence)
    return Replay(opened, anyway)


class Replay:
    """The steps of a run, counted from 1 as in metrics.jsonl; `raypipe.replay` makes it.

    Iterating yields the micro-batches of one step after the other.

    Attributes:
        run: the run, by its folder.
        differences: sentences that say what has changed since the run; empty = nothing.
    """

    def __init__(self, run: RecordedRun, anyway: bool = False) -> None:
        self.run = run
        self._anyway = anyway

    @property
    def differences(self) -> list[str]:
        """See the class."""
        return self.run.differences

    def __len__(self) -> int:
        """Return the number of steps of the whole run."""
        return self.run.num_steps

    def __iter__(self) -> Iterator[list[Batch]]:
        for step in range(1, len(self) + 1):
            if not self.run.is_skipped(step):
                yield self[step]

    def __getitem__(self, key: int | tuple[int, int]) -> Any:
        """Return the micro-batches of a step, [Batch, …]; or, of (step, number), one of them.

        Raises:
            ConfigError: the run has no such step, or its pixels cannot be made again.
        """
        if isinstance(key, tuple):
            step, micro = key
            (place,) = self.run.micro_batches(step, micro=micro)
            return self.batch(place)
        return [self.batch(place) for place in self.run.micro_batches(key)]

    def batch(self, place: MicroBatchId) -> Batch:
        """Make a micro-batch as the loop got it, also one of a validation."""
        plan = self.run.plan
        workers = self.run.start_at(place).workers
        ends_step = place.micro >= plan.config.per_step - workers
        ends_split = ends_step and plan.ends_split(place)
        batch = self.remade(place).finished
        return changed(batch, ends_step=ends_step, ends_split=ends_split)

    def remade(self, place: MicroBatchId) -> Remade:
        """Return a micro-batch that is made again as far as it is asked for; see `batch`."""
        stream = self.run.start_at(place).stream
        if stream.lacks and not self._anyway:
            hint = ""
            if stream.is_open:
                hint = "; anyway=True (--anyway) makes them as they are now"
            raise ConfigError(
                f"the pixels of {self.run.address} cannot be made again: {stream.lacks}{hint}. The order of its "
                "samples can still be told: see replay.samples, or `raypipe replay` without a picture"
            )
        return remade_of(stream, place)

    def samples(
        self, step: int, rank: int | None = None, micro: int | None = None
    ) -> list[dict[str, Any]]:
        """Return a row for each sample of a step. Pixels are made only where the draws depend on their sizes.

        Args:
            step: from 1 on.
            rank, micro: only the micro-batches of a rank, or the one of a number.

        Returns:
            Rows with `step`, `micro`, `rank`, `row`; `index` and `name` in the store, `label`, `class`, `weight`,
            `seed` (of the CPU transform), `drawn` and `augmented` (the operations of the CPU transform and of the
            augmentation on the device with their numbers, see `raypipe.history.sample_table`), `mixed` (`partner`,
            its `sample`, the own target's `share` and CutMix's `box`; None = not mixed), and `bad` (why the drawn
            sample was replaced).

        Raises:
            ConfigError: the run has no such step, rank or number; or the order cannot be told.
        """
        return [
            row
            for place in self.run.micro_batches(step, rank, micro)
            for row in self.samples_of(place)
        ]

    def samples_of(self, place: MicroBatchId) -> list[dict[str, Any]]:
        """Return a row for each sample of a micro-batch, also one of a validation; see `samples`."""
        run = self.run
        stream = run.start_at(place).stream
        draws = run.draws(place)
        remade = None
        if stream.is_open and (self._anyway or not stream.lacks):
            remade = self.remade(place)
            if not stream.quarantine and stream.spec.transform.max_bad_fraction:
                # nothing has recorded the substitutes of bad samples
                index = remade.host.index
                for row in np.flatnonzero(index != draws.drawn).tolist():
                    draws.bad.setdefault(row, "it cannot be used")
                draws = draws._replace(
                    indices=index, weights=np.asarray(remade.host.weight)
                )
        step = run.step_of(place)
        of_place = {"step": step, "micro": place.micro, "rank": run.rank_of(place)}
        return [{**of_place, **row} for row in sample_rows(draws, stream, remade)]

    def when(self, sample: int | str, split: Split = "train") -> SampleHistory:
        """Find the steps that drew a sample, and those that will; see `raypipe.history.drawn_at.History.of`."""
        return self._history.of(sample, split)

    @functools.cached_property
    def _history(self) -> History:
        from raypipe.history.drawn_at import History

        return History(self.run)
