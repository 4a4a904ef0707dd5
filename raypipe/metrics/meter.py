"""Where the time of one rank goes: the stages of each micro-batch, by splits, and intervals of the training."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from raypipe.metrics.timing import StageClock, StageTimes, has_drained, mark
from raypipe.plan.places import Split


class Meter:
    """The times of one rank's loader, which reports each micro-batch: `asked`, `arrived`, `handed_out`.

    Attributes:
        clocks: of each split; the threads that copy and decode add to them.
        first_batch_s: seconds from the start of the stream to its first batch; 0 before it.
        skips: whether the loop skips batches: no interval of the training is recorded then.
    """

    def __init__(self, device: torch.device) -> None:
        self.clocks: dict[Split, StageClock] = {"train": StageClock(), "val": StageClock()}
        self.first_batch_s, self.skips = 0.0, False
        self._device = device
        self._counts: dict[Split, StageTimes] = {"train": StageTimes(), "val": StageTimes()}
        # Where the compute of the micro-batch that was handed out last began, and its split.
        self._computing: tuple[Split, Any] | None = None
        self.begin_interval()

    def begin(self) -> None:
        """Begin the stream, possibly again."""
        self._created, self.first_batch_s = time.perf_counter(), 0.0

    def times(self, split: Split) -> StageTimes:
        """See `Loader.times`."""
        seconds: dict[str, Any] = {f"{stage}_s": total for stage, total in self.clocks[split].totals().items()}
        return replace(self._counts[split], **seconds)

    def asked(self) -> Any:
        """The next micro-batch is asked for, so the compute of the last one has ended: the mark of this moment."""
        now = mark(self._device)
        if self._computing:
            split, since = self._computing
            self.clocks[split].add("compute", since, now)
            self._computing = None
        return now

    def arrived(self, split: Split, asked: Any) -> Any:
        """A micro-batch that was asked for at a mark is there: the mark of this moment."""
        drained = has_drained(asked)
        now = mark(self._device)
        if self.first_batch_s:
            self.clocks[split].add("wait", asked, now)
            self._counts[split] += StageTimes(micro_batches=1, drained=drained)
        else:
            self.first_batch_s = time.perf_counter() - self._created
            self.begin_interval()  # the start of the run is reported apart
        return now

    def handed_out(self, split: Split, arrived: Any, counts: StageTimes) -> None:
        """A micro-batch that arrived at a mark has been augmented, and its compute begins.

        Args:
            counts: its images, and the seconds that an actor spent on it.
        """
        self._counts[split] += counts
        now = mark(self._device)
        self.clocks[split].add("augment", arrived, now)
        self._computing = split, now

    @contextlib.contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Count the time within as waiting for a checkpoint, not as compute."""
        computing = self._computing
        begun = self.asked()
        yield
        ended = mark(self._device)
        self.clocks["train"].add("checkpoint", begun, ended)
        if computing:
            self._computing = computing[0], ended

    def begin_interval(self) -> None:
        """An interval of the training begins."""
        self._before, self._since = self.times("train"), time.perf_counter()

    @property
    def interval_age_s(self) -> float:
        """Seconds since an interval of the training began."""
        return time.perf_counter() - self._since

    def interval(self) -> tuple[StageTimes, float]:
        """Times, and seconds, since an interval of the training began."""
        return self.times("train") - self._before, self.interval_age_s
