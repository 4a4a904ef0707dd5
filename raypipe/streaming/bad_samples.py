"""Bad samples of a stream: their record, and how many of them a run tolerates."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raypipe.errors import BadSamplesError, SampleError, TransformError
from raypipe.plan.places import MicroBatchId
from raypipe.storage.files import names_of_lines, write_text
from raypipe.storage.filesystem import join_address, open_filesystem
from raypipe.storage.retries import tried_once, without_retries
from raypipe.stores.base import title_of

logger = logging.getLogger(__name__)

# Where a record has failed, this process tries none again: an object store that is gone says so after minutes, and
# a run should not wait for it at every bad sample.
_without_records: set[str] = set()


@dataclass(frozen=True)
class BadSample:
    """A sample that could not be read, decoded or transformed.

    Attributes:
        position: the micro-batch that was to have it.
        store: address of its store.
        index: its index there.
        name: the store's own name for it; empty = it has none.
        substitute: index of the sample in its place; None = its row has weight 0.
        error: the reason.
        fault: "store", or "transform".
    """

    position: MicroBatchId
    store: str
    index: int
    name: str
    substitute: int | None
    error: str
    fault: str

    @property
    def title(self) -> str:
        """Return how errors name it."""
        return title_of(self.store, self.index, self.name)

    def record(self) -> dict[str, Any]:
        """The sample as one line of the quarantine has it."""
        record = dict(vars(self))
        return {**vars(record.pop("position")), **record}


def counts_of(bad: Sequence[BadSample]) -> dict[str, float]:
    """Return bad samples as amounts of metrics, by name."""
    replaced = [sample for sample in bad if sample.substitute is not None]
    return {
        "bad_samples_total": len(bad),
        "substituted_samples_total": len(replaced),
    }


def record_bad(
    folder_uri: str, position: MicroBatchId, bad: Sequence[BadSample]
) -> None:
    """Log bad samples, and write them as one JSON-lines object per micro-batch.

    The object is named by the micro-batch's place, so a retry on any node writes the same object. If it cannot
    be written, the process logs that once, and then only the log has the samples.

    Args:
        folder_uri: folder of the quarantine; empty = log only.
        position: the micro-batch.
        bad: its bad samples.
    """
    lines = [json.dumps(sample.record()) for sample in bad]
    for line in lines:
        logger.warning("bad sample: %s", line)
    if not folder_uri or folder_uri in _without_records:
        return
    try:
        with without_retries():
            filesystem, folder = open_filesystem(folder_uri)
            filesystem.create_dir(folder, recursive=True)
            write_text(
                join_address(folder_uri, f"{position}.jsonl"),
                "".join(line + "\n" for line in lines),
            )
    except Exception as error:
        # a full disk, an unreachable object store, or anything else
        _without_records.add(folder_uri)
        logger.warning(
            "bad samples cannot be recorded in %s, but in this log: %s",
            folder_uri,
            error,
        )


def recorded_in(folder_uri: str) -> set[str]:
    """Return the names of the micro-batches in a quarantine; empty where there are none, or it cannot be read."""
    if not folder_uri:
        return set()
    with tried_once():
        return set(names_of_lines(folder_uri))
    return set()


def forget_bad(folder_uri: str, position: MicroBatchId) -> None:
    """Remove a micro-batch's record, which an earlier start made with bad samples, and this one without."""
    with tried_once():
        filesystem, folder = open_filesystem(folder_uri)
        filesystem.delete_file(f"{folder}/{position}.jsonl")


@dataclass
class BadSampleBudget:
    """Limit of the bad samples that one process of a run tolerates.

    Attributes:
        max_fraction: largest share of the samples seen, in [0, 1].
        grace: this many are always tolerated, since one in the first ten says little about a rate.
    """

    max_fraction: float = 0.01
    grace: int = 10
    num_bad: int = 0
    num_seen: int = 0

    def spend(self, bad: Sequence[BadSample], num_seen: int) -> None:
        """Count further samples seen, and those of them that were bad.

        Raises:
            BadSamplesError: more than max(grace, max_fraction × seen) have been bad.
        """
        self.num_bad += len(bad)
        self.num_seen += num_seen
        if bad and self.num_bad > max(self.grace, self.max_fraction * self.num_seen):
            last = bad[-1]
            advice = SampleError.advice
            if last.fault == TransformError.fault:
                advice = TransformError.advice
            raise BadSamplesError(
                f"{self.num_bad} of {self.num_seen} samples are bad, more than"
                f" transform.max_bad_fraction={self.max_fraction:g} allows (the first {self.grace} are free);"
                f" the last one is {last.title}: {last.error}."
                f" Raise transform.max_bad_fraction, or {advice}"
            )
