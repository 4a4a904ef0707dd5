"""Events of a rank's loader, for whoever measures, exports or records them.

StageClock       raypipe.metrics.timing          where the time goes
TrainerMetrics   raypipe.metrics.prometheus      metrics for Prometheus
RunLog           raypipe.streaming.run_log       console lines, status.json and metrics.jsonl

opened                                           the stream starts, possibly again
  asked → arrived → handed_out                   each batch; or asked → failed
  saving → saved                                 each wait of the loop for a checkpoint; or saving → failed
  checkpointed                                   a checkpoint was written, or the run begins to make some
  recorded                                       the training of some seconds, a validation, a fault, …
ended                                            the stream has ended
closed                                           there are no more events
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raypipe.plan.places import MicroBatchId, Split


Cause = Callable[[], str]
"""Names the cause of a wait, while it lasts."""


class Observer:
    """Observer of a loader. Each event does nothing unless a subclass implements it."""

    def opened(self, supervisor: Any) -> None:
        """A stream was opened; `supervisor` is the handle of its Supervisor, None = it has none."""

    def asked(self, split: Split, name: str, cause: Cause) -> None:
        """The loop asks for a batch of a name, and waits for a cause that can be asked for at any time."""

    def arrived(self, split: Split) -> None:
        """The batch is there."""

    def failed(self) -> None:
        """The batch cannot be made, or the checkpoint cannot be saved: the wait is over."""

    def handed_out(self, position: MicroBatchId, amounts: Mapping[str, Any]) -> None:
        """The batch has been augmented, and the loop computes; `amounts` are images, and seconds of an actor."""

    def saving(self, cause: Cause) -> None:
        """The loop waits for a checkpoint."""

    def saved(self) -> None:
        """The wait for a checkpoint is over."""

    def checkpointed(self) -> None:
        """A checkpoint has just been written, or the run begins to make some."""

    def recorded(self, kind: str, line: str, values: Mapping[str, Any]) -> None:
        """There are values to record, of a kind: train, val, phases, diagnosis, report or fault.

        Args:
            line: for people; empty = not to be printed.
        """

    def ended(self) -> None:
        """The stream has ended."""

    def closed(self) -> None:
        """The loader was closed."""
