"""Places in a run: of micro-batches, of samples in them, and where a run stands; the sides of images."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, NewType

from raypipe.errors import DAMAGE, CursorError

Split = Literal["train", "val"]
Sides = tuple[int, int]
"""Height and width of an image, pixels."""
TrainStep = NewType("TrainStep", int)
"""Training steps done, counted through all epochs: the clock of a run. Steps of a validation do not count."""
PADDING = -1
"""The index of a padding row: zeros, weight 0."""


@dataclass(frozen=True)
class MicroBatchId:
    """The place of one micro-batch in a run.

    `step` counts within this pass over its split. `Plan.global_step` gives the run's clock for both splits.
    """

    split: Split
    epoch: int
    step: int
    micro: int

    def __str__(self) -> str:
        return f"{self.split}-e{self.epoch:04d}-s{self.step:06d}-m{self.micro:03d}"


class SamplePlace(NamedTuple):
    """The place of a sample in a run: a row, from 0, of a micro-batch."""

    micro_batch: MicroBatchId
    row: int


CURSOR_FILE = "cursor.json"
"""The file of a checkpoint that holds the cursor."""


@dataclass(frozen=True)
class Cursor:
    """Place in a run, from which it can resume.

    Attributes:
        epoch: training epoch e.
        step: steps of epoch e that are done. Equal to the steps in an epoch: validation e is next.
        fingerprint: the plan's, so that a checkpoint cannot continue a different plan's stream.
    """

    epoch: int
    step: int
    fingerprint: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_dict(fields: Any) -> Cursor:
        """Make a cursor from its fields by name. Raises CursorError if they are not a cursor's."""
        try:
            return Cursor(
                int(fields["epoch"]), int(fields["step"]), str(fields["fingerprint"])
            )
        except DAMAGE as error:
            raise CursorError(
                f"not a cursor: {str(fields)[:200]!r} ({error})"
            ) from None

    @staticmethod
    def from_json(text: str) -> Cursor:
        """Raises CursorError when the text is not a cursor."""
        try:
            fields = json.loads(text)
        except ValueError:
            fields = text
        return Cursor.from_dict(fields)
