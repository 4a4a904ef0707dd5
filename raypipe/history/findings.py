"""Findings of an audit: sentences about what is wrong with a run or its record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from raypipe.plan.places import MicroBatchId

Kind = Literal[
    "missing",
    "foreign",
    "twice",
    "root",
    "exchanged",
    "hash",
    "batch",
    "finished",
    "store",
]
NUM_NAMED = 3
"""Micro-batches or samples that a finding names, at most."""


class Finding(NamedTuple):
    """Something wrong with a run or its record.

    Attributes:
        kind: missing (lines were removed, or could not be written), foreign (lines of micro-batches that the run
            does not have), twice (two hashes for one micro-batch), root
            (it is not the one of the hashes), exchanged (a micro-batch has the hash of another place), hash (the
            record was changed after the run), batch (the model got other data, or a sample has changed),
            finished (the device stage made other tensors), store (it has other contents, or cannot be opened).
        text: a sentence for people.
        epoch: the epoch; None = it is about the whole run.
        micro_batch: name of the micro-batch; empty = it is about several.
    """

    kind: Kind
    text: str
    epoch: int | None = None
    micro_batch: str = ""

    @staticmethod
    def of(kind: Kind, text: str, positions: Sequence[MicroBatchId]) -> Finding:
        """Return a finding about micro-batches of an epoch."""
        name = str(positions[0]) if len(positions) == 1 else ""
        return Finding(kind, text, positions[0].epoch, name)


def some_named(positions: Sequence[MicroBatchId]) -> str:
    """Some micro-batches by name, and the number of others, with a verb."""
    names = ", ".join(map(str, positions[:NUM_NAMED]))
    more = len(positions) - NUM_NAMED
    if more > 0:
        return f"{names} and {more} more micro-batches are"
    return f"{names} {'is' if len(positions) == 1 else 'are'}"
