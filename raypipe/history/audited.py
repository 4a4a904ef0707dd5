"""Checks a run's record of hashes, and micro-batches that are made again.

    record.check_record()    lines that are missing, foreign or recorded twice; settings that do not fit
    record.compare(places)   hashes of micro-batches, made again in this process, with the recorded ones

Each check adds findings, which say what differs and where.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from raypipe.errors import ConfigError, RaypipeError
from raypipe.history.record_checks import damage_told
from raypipe.history.recorded import RecordedRun, Start
from raypipe.history.recorded_stream import RecordedStream
from raypipe.history.step_maker import remade_of
from raypipe.plan.places import MicroBatchId
from raypipe.plan.schedule import Plan
from raypipe.storage.filesystem import as_uri, open_filesystem
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.record.digest_log import (
    DIGESTS,
    EpochRecord,
    Hashes,
    cpu_kind,
    read_epoch,
    recorded_files,
    root_of,
    time_of,
)
from raypipe.streaming.record.opened import sealed

_ORDER = attrgetter("split", "step", "micro")
_NUM_NAMED = 3  # micro-batches that a finding names, at most

Kind = Literal["lines", "foreign", "twice", "root", "batch", "finished", "store"]


class Finding(NamedTuple):
    """Something wrong with a run or its record.

    Attributes:
        kind: lines (those that a rank has written are gone, or others), foreign (lines of micro-batches that the
            run does not have, or of settings that its starts do not have), twice (two hashes for one micro-batch),
            root (it is not the published one), batch (a micro-batch has another hash when it is made again),
            finished (the device stage makes other tensors), store (it has other contents, or cannot be opened).
        text: the difference, for people.
        epoch: the epoch; None = it is about the whole run.
        micro_batch: name of the micro-batch; empty = it is about several.
    """

    kind: Kind
    text: str
    epoch: int | None = None
    micro_batch: str = ""


class EpochSummary(NamedTuple):
    """An epoch of a record.

    Attributes:
        micro_batches: number of recorded micro-batches.
        is_complete: whether these are all of the epoch.
        root: hash over them and their hashes.
    """

    micro_batches: int
    is_complete: bool
    root: str


class AuditedRecord:
    """The record of hashes of a run, and the findings of its checks.

    Attributes:
        findings: all findings, in the order of the checks.
        epochs: the epochs that `check_record` has read.
        num_compared: micro-batches that were made again and compared.
        num_finished: those of them whose finished tensors were compared, too.
        uncompared: why finished tensors were not compared; empty = they were, or none were recorded.
    """

    def __init__(self, run: RecordedRun) -> None:
        self._run = run
        filesystem, path = open_filesystem(as_uri(run.address))
        self._folder = filesystem, f"{path}/{DIGESTS}"
        self.findings: list[Finding] = []
        self.epochs: dict[int, EpochSummary] = {}
        self.num_compared = 0
        self.num_finished = 0
        self.uncompared = ""
        self._files = recorded_files(self._folder)
        if not self._files:
            raise ConfigError(
                f"{run.address} has no hashes: a run records them with train.log=[digest], your own loop "
                "with raypipe.loader(…, log_digest=True)"
            )
        self._is_open = functools.cache(self._opened)
        self._starts_of = functools.cache(self._find_starts)
        self._epoch = functools.lru_cache(maxsize=1)(self._read_epoch)

    @property
    def root(self) -> str:
        """Hash over the roots of all epochs, hexadecimal."""
        return root_of(
            f"epoch {number} {epoch.root}\n" for number, epoch in self.epochs.items()
        )

    def places(self) -> list[MicroBatchId]:
        """Return all places of the record, in the plan's order."""
        return [
            place
            for epoch in self.epochs
            for place in sorted(self._epoch(epoch).recorded, key=_ORDER)
            if self._has(place)
        ]

    def choose(self, num: int, seed: int) -> list[MicroBatchId]:
        """Return random places of the record; all of them if it has no more."""
        places = self.places()
        chosen = random.Random(seed).sample(range(len(places)), min(num, len(places)))
        return [places[number] for number in sorted(chosen)]

    def _read_epoch(self, epoch: int) -> EpochRecord:
        return read_epoch(self._folder, epoch, self._run.stream.record.plan)

    def _hashes(self, place: MicroBatchId) -> list[Hashes]:
        return self._epoch(place.epoch).recorded[place]

    # The record by itself

    def check_record(self) -> None:
        """Check that no line is missing or foreign, and that hashes agree."""
        trained = [start.workers for start in self._run.starts if start.has_trained]
        ranks = {rank for _, rank in self._files}
        for rank in range(max(trained, default=1)):
            if rank not in ranks:
                self.find("lines", f"no file of rank {rank} is in {DIGESTS}/")
        for epoch in sorted({epoch for epoch, _ in self._files}):
            record = self._epoch(epoch)
            for name in record.damaged:
                text = f"{name}.jsonl has other lines than its rank has written"
                self.find("lines", text, epoch)
            self._check_lines(epoch, record)
            if num := len(record.recorded):
                is_complete = num == _num_of_epoch(self._run.plan, epoch)
                self.epochs[epoch] = EpochSummary(num, is_complete, record.root)

    def _check_lines(self, epoch: int, record: EpochRecord) -> None:
        """Check each line of an epoch by itself, and lines of one place with each other."""
        for start in record.starts:
            if not self._run_starts(start):
                text = f"lines of rank {start.get('rank')} with settings of no start of the run"
                self.find("foreign", text, epoch)
                break
        if record.num_unknown:
            text = f"{record.num_unknown} lines that are no hashes of the epoch"
            self.find("foreign", text, epoch)
        foreign = [place for place in record.recorded if not self._has(place)]
        self.find("foreign", "not of the run's plan", places=foreign)
        for place in foreign:
            del record.recorded[place]
        twice = [
            place
            for place, several in record.recorded.items()
            if _differ(several) and not self._may_differ(several)
        ]
        self.find("twice", "recorded twice with different hashes", places=twice)

    def _has(self, place: MicroBatchId) -> bool:
        """Return whether the plan of a start had a place for a rank when it was recorded."""
        recorded = self._hashes(place)[-1].start
        return any(
            start.has_place(place)
            and str(place.micro % start.workers) == str(recorded.get("rank"))
            for start in self._run_starts(recorded)
        )

    def _run_starts(self, recorded: dict[str, Any]) -> list[Start]:
        """The starts of the run that have the settings of a recorded one, the newest first."""
        return self._starts_of(str(recorded.get("workers")), str(recorded.get("seal")))

    def _find_starts(self, workers: str, seal: str) -> list[Start]:
        with damage_told(f"{self._run.address}: the record of its stream"):
            return [
                start
                for start in reversed(self._run.starts)
                if workers == str(start.workers)
                and sealed(vars(start.stream.record)) == seal
            ]

    def _may_differ(self, several: list[Hashes]) -> bool:
        """Return whether starts may have made a micro-batch differently: settings, code or versions changed."""
        starts = [hashes.start for hashes in several]
        made_by = {
            (start.stream, each.get("device"), each.get("cpu"))
            for each in starts
            for start in self._run_starts(each)
        }
        return len(set(map(time_of, starts))) > 1 and len(made_by) > 1

    # Micro-batches that are made again

    def compare(
        self,
        places: Sequence[MicroBatchId],
        on_compared: Callable[[], None] = lambda: None,
    ) -> None:
        """Make micro-batches again, and compare their hashes with the recorded ones.

        Args:
            places: in the order of their epochs.
            on_compared: called after each.
        """
        for place in places:
            on_compared()
            hashes = self._hashes(place)[-1]
            stream = self._run_starts(hashes.start)[0].stream
            try:
                if not self._is_open(stream):
                    continue
                remade = remade_of(stream, place)
                made = batch_hash(remade.host)
                self.num_compared += 1
                is_equal = self._is_equal("batch", place, made, hashes.stream)
                if is_equal and hashes.finished and self._can_finish(stream, hashes):
                    self.num_finished += 1
                    finished = batch_hash(remade.finished)
                    self._is_equal("finished", place, finished, hashes.finished)
            except RaypipeError as error:
                self.find("batch", f"it cannot be made again: {error}", places=[place])

    def _opened(self, stream: RecordedStream) -> bool:
        """Return whether micro-batches of a stream can be made; find stores that have changed."""
        if stream.lacks:
            self.find("store", stream.lacks)
        return stream.is_open

    def _is_equal(
        self, kind: Kind, place: MicroBatchId, remade: bytes, recorded: str
    ) -> bool:
        """Compare a hash with the recorded one."""
        if remade.hex() == recorded:
            return True
        text = f"hash {remade.hex()} when it is made again, and {recorded} is recorded"
        self.find(kind, text, places=[place])
        return False

    def _can_finish(self, stream: RecordedStream, hashes: Hashes) -> bool:
        """Return whether the device stage can be compared: torch may round differently elsewhere."""
        cpu = hashes.start.get("cpu")
        if cpu != cpu_kind():
            self.uncompared = f"recorded on {cpu}, and this is {cpu_kind()}"
        elif stream.changed_code:
            self.uncompared = stream.changed_code[0]
        else:
            return True
        return False

    def find(
        self,
        kind: Kind,
        text: str,
        epoch: int | None = None,
        places: Sequence[MicroBatchId] | None = None,
    ) -> None:
        """Add a finding, unless it is about places and there are none."""
        name = ""
        if places is not None:
            if not places:
                return
            epoch = places[0].epoch
            named = ", ".join(map(str, places[:_NUM_NAMED]))
            if len(places) == 1:
                name = named
            else:
                named = f"{len(places)} micro-batches, {named}"
            text = f"{named}: {text}"
        if epoch is not None:
            text = f"epoch {epoch}: {text}"
        self.findings.append(Finding(kind, text, epoch, name))


def _num_of_epoch(plan: Plan, epoch: int) -> int:
    """The number of an epoch's micro-batches, of training and validation, on all ranks."""
    num_steps = plan.training_of(epoch).num_delivered
    if plan.has_val(epoch):
        num_steps += plan.val_steps
    return num_steps * plan.config.per_step


def _differ(several: list[Hashes]) -> bool:
    """Return whether records of a place differ, as far as they have it."""
    streams = {hashes.stream for hashes in several}
    finished = {hashes.finished for hashes in several} - {""}
    return len(streams) > 1 or len(finished) > 1
