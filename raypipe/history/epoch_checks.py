"""Checks of an epoch's record by itself: its lines, and its roots."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from raypipe.history.findings import Finding, some_named
from raypipe.plan.places import MicroBatchId
from raypipe.plan.schedule import Plan
from raypipe.streaming.record.digest_log import (
    EpochRecord,
    EpochRoot,
    num_of_epoch,
    steps_of_epoch,
)

_MAX_MISSING = 100_000  # micro-batches of an epoch that are some_named


@dataclass
class EpochSummary:
    """An epoch of a record, as its hashes are.

    Attributes:
        micro_batches: number of recorded micro-batches.
        is_complete: whether these are all of the epoch.
        root, finished_root: see `EpochRoot`, computed from the hashes.
        fits: whether the recorded root is that one; None = none was recorded.
    """

    micro_batches: int
    is_complete: bool
    root: str
    finished_root: str
    fits: bool | None


def check_lines(
    plan: Plan, epoch: int, record: EpochRecord, begin: int, end: int | None
) -> Iterator[Finding]:
    """Yield findings about micro-batches that are missing, or recorded with two hashes.

    Args:
        begin: the training step in the epoch at which the run has begun.
        end: the training steps that were done at least, if the epoch may have ended early; None = all.
    """
    of_epoch = _missing(plan, epoch, record, begin, end)
    missing = list(itertools.islice(of_epoch, _MAX_MISSING))
    if missing:
        text = (
            f"epoch {epoch}: {some_named(missing)} missing in the record: lines were removed, could not be "
            "written, or the run did not record them"
        )
        yield Finding.of("missing", text, missing)
    if record.disagreeing:
        twice = list(record.disagreeing)
        text = (
            f"epoch {epoch}: {some_named(twice)} recorded twice with different hashes: starts of the run, with "
            "other code or versions, made different pixels, or a line was added"
        )
        yield Finding.of("twice", text, twice)


def _missing(
    plan: Plan, epoch: int, record: EpochRecord, begin: int, end: int | None
) -> Iterator[MicroBatchId]:
    """The micro-batches of an epoch that have no line; see `check_lines`."""
    recorded = defaultdict[tuple[str, int], set[int]](set)
    for position in record.hashes:
        recorded[position.split, position.micro].add(position.step)
    training = plan.training_of(epoch)
    for split, steps in steps_of_epoch(plan, epoch).items():
        first = begin if split == "train" else 0
        for micro in range(plan.config.per_step):
            of_micro = recorded[split, micro]
            stop = steps.stop
            if end is not None:
                # Each rank hands out its own in order. Rank 0 has the first of each step.
                is_known = split == "train" and micro == 0
                stop = max([step + 1 for step in of_micro], default=0)
                stop = max(stop, min(end, steps.stop) if is_known else 0)
            for step in range(first, stop):
                is_skipped = split == "train" and training.skipped.has(step)
                if step not in of_micro and not is_skipped:
                    yield MicroBatchId(split, epoch, step, micro)


def summary_of(plan: Plan, epoch: int, record: EpochRecord) -> EpochSummary:
    """Summarize an epoch by its hashes."""
    computed = record.computed_root()
    fits = all(root == computed for root in record.roots)
    return EpochSummary(
        computed.num_micro_batches,
        len(record.hashes) == num_of_epoch(plan, epoch),
        computed.root,
        computed.finished_root,
        fits if record.roots else None,
    )


def check_roots(
    epoch: int, record: EpochRecord, summary: EpochSummary
) -> Iterator[Finding]:
    """Yield findings about an epoch's roots that are not those of its hashes, or are missing."""
    computed = EpochRoot(summary.micro_batches, summary.root, summary.finished_root)
    for root in record.roots:
        if root != computed:
            yield Finding("root", _misfit(epoch, root, computed), epoch)
    if summary.is_complete and not record.roots:
        text = f"epoch {epoch}: it is complete, and has no root: the line was removed, or could not be written"
        yield Finding("root", text, epoch)


def _misfit(epoch: int, recorded: EpochRoot, computed: EpochRoot) -> str:
    """The sentence about a root that is not that of the hashes."""
    if recorded.num_micro_batches != computed.num_micro_batches:
        how = f"it is of {recorded.num_micro_batches} micro-batches, and {computed.num_micro_batches} are recorded"
    elif recorded.root == computed.root:
        how = "the hashes of finished micro-batches, or their root, were changed after the run"
    else:
        how = "a hash or the root was changed after the run"
    return (
        f"epoch {epoch}: the recorded root is not the one of the recorded hashes: {how}"
    )
