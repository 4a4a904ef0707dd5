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
from pathlib import Path
from typing import Any

import numpy as np

from raypipe.device.prefetcher import Batch
from raypipe.errors import ConfigError, RaypipeError
from raypipe.history.drawn_at import History
from raypipe.history.recorded import RecordedRun
from raypipe.history.sample_table import sample_rows
from raypipe.history.step_maker import Remade, remade_of
from raypipe.plan.places import MicroBatchId, Split
from raypipe.streaming.digest import other_settings
from raypipe.streaming.hashes import batch_hash

# Steps whose pixels are compared: the first, and those at the begin of epochs.
_MAX_MADE = 8
# Draws that are compared at most, which takes some seconds.
_MAX_DRAWS = 1 << 22
# Settings that decide nothing that a model sees.
_FREE = ("workers", "actors", "from_step", "to_step")

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
    opened = Replay(run, trust_run_code, anyway, **given)
    for sentence in opened.differences:
        logger.warning("%s", sentence)
    return opened


class Replay(RecordedRun):
    """The steps of a run, counted from 1 as in metrics.jsonl; `raypipe.replay` makes it.

    Iterating yields the micro-batches of one step after the other.

    Args:
        run, trust_run_code, anyway, given: see `replay`.
    """

    def __iter__(self) -> Iterator[list[Batch]]:
        for step in range(1, len(self) + 1):
            if not self.is_skipped(step):
                yield self[step]

    def __getitem__(self, key: int | tuple[int, int]) -> Any:
        """Return the micro-batches of a step, [Batch, …]; or, of (step, number), one of them.

        Raises:
            ConfigError: the run has no such step, or its pixels cannot be made again.
        """
        if isinstance(key, tuple):
            step, micro = key
            (place,) = self.micro_batches(step, micro=micro)
            return self.batch(place)
        return [self.batch(place) for place in self.micro_batches(key)]

    def batch(self, place: MicroBatchId) -> Batch:
        """Make a micro-batch as the loop got it, also one of a validation."""
        return self.remade(place).finished

    def remade(self, place: MicroBatchId) -> Remade:
        """Return a micro-batch that is made again as far as it is asked for; see `batch`."""
        start = self.start_at(place)
        stream = start.stream
        if stream.lacks and not self._anyway:
            hint = ""
            if stream.is_open:
                hint = "; anyway=True (--anyway) makes them as they are now"
            raise ConfigError(
                f"the pixels of {self.address} cannot be made again: {stream.lacks}{hint}. The order of its "
                "samples can still be told: see replay.samples, or `raypipe replay` without a picture"
            )
        return remade_of(stream, place, start.workers)

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
            for place in self.micro_batches(step, rank, micro)
            for row in self.samples_of(place)
        ]

    def samples_of(self, place: MicroBatchId) -> list[dict[str, Any]]:
        """Return a row for each sample of a micro-batch, also one of a validation; see `samples`."""
        stream = self.start_at(place).stream
        remade = bad = None
        if stream.is_open and (self._anyway or not stream.lacks):
            remade = self.remade(place)
            if not stream.quarantine and stream.spec.transform.max_bad_fraction:
                # nothing has recorded them
                bad = remade.bad
        draws = self.draws(place, bad)
        step = self.step_of(place)
        of_place = {"step": step, "micro": place.micro, "rank": self.rank_of(place)}
        return [{**of_place, **row} for row in sample_rows(draws, stream, remade)]

    def compare(self, other: Replay) -> dict[str, Any]:
        """Compare this run with another one.

        Returns:
            `equal`: nothing differs in what was compared; `order`: the first step with other samples or seeds, or
            that one of the runs skips, None = none of the `compared_steps`; `pixels`: the first step that was made
            and is not the same, None = none; `made_steps`; `settings` that differ, name → (this run's, the
            other's); `loss`: the first step at which their records have different losses, None = none; and
            `unknown`: why pixels could not be compared, empty = they were.
        """
        num_steps = min(len(self), len(other))
        compared_steps = num_steps
        order = None
        if self.plan.fingerprint != other.plan.fingerprint:
            num_drawn = max(1, _MAX_DRAWS // self.plan.global_batch_size)
            compared_steps = min(num_steps, num_drawn)
            for step in range(1, compared_steps + 1):
                if self._order_of(step) != other._order_of(step):
                    order = compared_steps = step
                    num_steps = step - 1
                    break
        # until the order parts, else the first and those that begin epochs
        begins = range(1, num_steps + 1, max(1, self.plan.steps_per_epoch))
        made: list[int] = []
        pixels = None
        unknown = ""
        try:
            for step in [at for at in begins if not self.is_skipped(at)][:_MAX_MADE]:
                hashes = [[*map(batch_hash, run[step])] for run in (self, other)]
                made.append(step)
                if hashes[0] != hashes[1]:
                    pixels = step
                    break
        except RaypipeError as error:
            made = []
            unknown = str(error)
        settings = other_settings(self.starts[-1].settings, other.starts[-1].settings)
        for name in _FREE:
            settings.pop(name, None)
        others = other.losses
        parted = [
            step for step, loss in self.losses.items() if others.get(step, loss) != loss
        ]
        return {
            "equal": order is None and pixels is None,
            "order": order,
            "compared_steps": compared_steps,
            "pixels": pixels,
            "made_steps": made,
            "settings": settings,
            "loss": min(parted, default=None),
            "unknown": unknown,
        }

    def _order_of(self, step: int) -> bytes:
        """The samples of a step and their keys, as bytes; empty if it is left out."""
        plan = self.plan
        if plan.skipped.has(step - 1):
            return b""
        end = step * plan.global_batch_size
        draws = plan.draw_epoch(0, np.arange(end - plan.global_batch_size, end))
        return draws.indices.tobytes() + plan.sample_keys("train", draws).tobytes()

    def when(self, sample: int | str, split: Split = "train") -> dict[str, Any]:
        """Find the steps that drew a sample, and those that will; see `raypipe.history.drawn_at.History.of`."""
        return self._history.of(sample, split)

    @functools.cached_property
    def _history(self) -> History:
        return History(self)
