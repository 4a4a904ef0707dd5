"""Checks a run's record of hashes, and micro-batches that are made again.

    record.check_record()    lines that are missing, foreign or recorded twice; roots and settings that do not fit
    record.compare(places)   hashes of micro-batches, made again in this process, with the recorded ones

Each check adds findings, which say the fault and its place.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from raypipe.errors import ConfigError, RaypipeError
from raypipe.history.recorded import RecordedRun, Start
from raypipe.history.recorded_stream import RecordedStream
from raypipe.history.step_maker import StepMaker
from raypipe.plan.places import PADDING, MicroBatchId, Split
from raypipe.plan.schedule import Plan
from raypipe.storage.filesystem import as_uri, open_filesystem
from raypipe.stores.base import name_of
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.record.digest_log import (
    DIGESTS,
    EpochRecord,
    Hashes,
    RecordedStart,
    cpu_kind,
    num_of_epoch,
    order_of,
    read_epoch,
    recorded_counts,
    recorded_epochs,
    steps_of_epoch,
)
from raypipe.streaming.record.opened import sealed

_NUM_NAMED = 3  # micro-batches or samples that a finding names, at most
_MAX_MISSING = 100_000  # micro-batches of an epoch, and epochs, that are looked for

Kind = Literal["missing", "foreign", "twice", "root", "batch", "finished", "store"]


class Finding(NamedTuple):
    """Something wrong with a run or its record.

    Attributes:
        kind: missing (lines, files or hashes that were recorded are gone, or could not be written), foreign (lines
            of micro-batches that the run does not have, or of settings that its starts do not have), twice (two
            hashes for one micro-batch), root (it is not the one of the hashes), batch (a micro-batch has another
            hash when it is made again), finished (the device stage makes other tensors), store (it has other
            contents, or cannot be opened).
        text: a sentence for people.
        epoch: the epoch; None = it is about the whole run.
        micro_batch: name of the micro-batch; empty = it is about several.
    """

    kind: Kind
    text: str
    epoch: int | None = None
    micro_batch: str = ""


@dataclass
class EpochSummary:
    """An epoch of a record.

    Attributes:
        micro_batches: number of recorded micro-batches.
        is_complete: whether these are all of the epoch.
        root: hash over them and their hashes.
        fits: whether the recorded root is that one; None = none was recorded.
    """

    micro_batches: int
    is_complete: bool
    root: str
    fits: bool | None


@dataclass
class AuditedRecord:
    """The record of hashes of a run, and the findings of its checks.

    Attributes:
        run: the run.
        findings: all findings, in the order of the checks.
        epochs: the epochs that `check_record` has read.
        num_compared: micro-batches that were made again and compared.
        num_finished: those of them whose finished tensors were compared, too.
        uncompared: why finished tensors were not compared; empty = they were, or none were recorded.
    """

    run: RecordedRun
    findings: list[Finding] = field(default_factory=list)
    epochs: dict[int, EpochSummary] = field(default_factory=dict)
    num_compared: int = 0
    num_finished: int = 0
    uncompared: str = ""

    def __post_init__(self) -> None:
        filesystem, path = open_filesystem(as_uri(self.run.address))
        self._folder = filesystem, f"{path}/{DIGESTS}"
        self._plan = self.run.stream.record["plan"]
        self._makers: dict[int, StepMaker] = {}
        self._starts: dict[str, list[Start]] = {}
        self._read = -1, EpochRecord()
        if not recorded_epochs(self._folder):
            raise ConfigError(
                f"{self.run.address} has no hashes: a run records them with train.log_digest=true, your own loop "
                "with raypipe.loader(…, log_digest=True)"
            )

    @property
    def num_recorded(self) -> int:
        """Number of micro-batches in the record."""
        return sum(epoch.micro_batches for epoch in self.epochs.values())

    @property
    def root(self) -> str:
        """Hash over the roots of all epochs, hexadecimal."""
        lines = [
            f"epoch {number} {epoch.root}\n" for number, epoch in self.epochs.items()
        ]
        return hashlib.blake2b("".join(lines).encode(), digest_size=32).hexdigest()

    def places(self) -> list[MicroBatchId]:
        """Return all places of the record, in the plan's order."""
        return [place for epoch in self.epochs for place in self._places_of(epoch)]

    def choose(self, num: int, seed: int) -> list[MicroBatchId]:
        """Return random places of the record; all of them if it has no more."""
        places = self.places()
        chosen = random.Random(seed).sample(range(len(places)), min(num, len(places)))
        return [places[number] for number in sorted(chosen)]

    def _places_of(self, epoch: int) -> list[MicroBatchId]:
        return sorted(self._epoch(epoch).hashes, key=order_of)

    def _epoch(self, epoch: int) -> EpochRecord:
        """Read the record of an epoch, without lines that the run does not have."""
        if self._read[0] != epoch:
            record = read_epoch(self._folder, epoch, self._plan)
            for place in list(record.hashes):
                if not self._has(place, record):
                    del record.hashes[place]
            self._read = epoch, record
        return self._read[1]

    # The record by itself

    def check_record(self) -> None:
        """Check that no line is missing, that hashes agree, and that roots and settings are those of the run."""
        files = recorded_epochs(self._folder)
        counts = recorded_counts(self._folder)
        self._check_ranks(counts)
        epochs = sorted({*files, *(epoch for of in counts.values() for epoch in of)})
        self._check_gaps(epochs)
        ranks = range(self.run.starts[-1].workers)
        reached = min(max(counts.get(rank, {}), default=0) for rank in ranks)
        has_lines = False
        for epoch in epochs:
            record = read_epoch(self._folder, epoch, self._plan)
            for rank, num in sorted(
                (rank, of.get(epoch, 0)) for rank, of in counts.items()
            ):
                found = record.num_lines.get(rank, 0)
                if found < num:
                    text = (
                        f"epoch {epoch}: rank {rank} has written {num} lines, and {found} are there: lines were "
                        "removed, or lost with their machine"
                    )
                    self.find("missing", text, epoch)
            has_lines = has_lines or bool(record.hashes)
            self._check_epoch(epoch, record, epoch >= reached)
        if not has_lines:
            text = f"no line in {DIGESTS}/ is of the run's plan {self._plan}: other settings made them"
            self.find("store", text)

    def _check_ranks(self, counts: dict[int, dict[int, int]]) -> None:
        """Find ranks that have trained, and have no count of their lines."""
        workers = [start.workers for start in self.run.starts if start.has_trained]
        for rank in range(max(workers, default=1)):
            if rank not in counts:
                text = f"rank {rank} has no {DIGESTS}/count-{rank:04d}.json, which counts its lines"
                self.find("missing", text)

    def _check_gaps(self, epochs: Sequence[int]) -> None:
        """Find epochs without a line before others that have some."""
        gaps = [
            epoch
            for epoch in range(self._begin[0], min(epochs[-1], _MAX_MISSING))
            if epoch not in epochs and num_of_epoch(self.run.plan, epoch)
        ]
        if gaps:
            text = f"epoch {gaps[0]} has no line, nor do {len(gaps) - 1} others"
            self.find("missing", text, gaps[0])

    @functools.cached_property
    def _begin(self) -> tuple[int, int]:
        """The epoch and the step in it at which the run has begun."""
        start = min(
            self.run.starts, key=lambda start: (start.step, not start.validates)
        )
        epoch, step = divmod(start.step, self.run.plan.steps_per_epoch)
        if start.validates:
            return epoch - 1, self.run.plan.steps_per_epoch
        return epoch, step

    def _check_epoch(self, epoch: int, record: EpochRecord, is_last: bool) -> None:
        """Check an epoch's record by itself; all ranks have gone on behind one that is not the last."""
        unknown = [start for start in record.starts if not self._starts_of(start)]
        for start in unknown[:1]:
            text = (
                f"epoch {epoch}: rank {start.rank} has recorded lines with settings that none of the run's starts "
                "has: its record was changed"
            )
            self.find("foreign", text, epoch)
        foreign = [place for place in record.hashes if not self._has(place, record)]
        self._find_places("foreign", foreign, "not of the run's plan")
        for place in foreign:
            del record.hashes[place]
        self._read = epoch, record
        twice = [
            place
            for place, starts in record.twice.items()
            if not self._may_differ(starts)
        ]
        self._find_places("twice", twice, "recorded twice with different hashes")
        unfinished = [
            place
            for place, hashes in record.hashes.items()
            if hashes.start.facts["device"] == "cpu" and not hashes.finished
        ]
        what = "without the hash of the finished tensors"
        self._find_places("missing", unfinished, what)
        if all(start.facts["plan"] != self._plan for start in record.starts):
            return
        plan = self._plan_of(epoch, record)
        is_whole = bool(record.roots) or not (is_last or record.was_left)
        missing = self._missing(plan, epoch, record, is_whole)
        some = list(itertools.islice(missing, _MAX_MISSING))
        self._find_places("missing", some, "missing in the record")
        computed = record.computed_root()
        fits = record.roots == [computed] if record.roots else None
        if record.twice and not fits:
            # Once a changed transform has made a part again, an earlier root covers hashes that no longer count.
            fits = True if computed in record.roots else None
        if fits is False:
            text = f"epoch {epoch}: the recorded root is not the one of the recorded hashes"
            self.find("root", text, epoch)
        is_complete = computed[0] == num_of_epoch(plan, epoch)
        self.epochs[epoch] = EpochSummary(*computed[:1], is_complete, computed[1], fits)

    def _missing(
        self, plan: Plan, epoch: int, record: EpochRecord, is_whole: bool
    ) -> Iterator[MicroBatchId]:
        """Yield the places without a line, in the whole epoch or before others with their number in a step."""
        recorded = defaultdict[tuple[str, int], set[int]](set)
        for place in record.hashes:
            recorded[place.split, place.micro].add(place.step)
        training = plan.training_of(epoch)
        for split, steps in steps_of_epoch(plan, epoch).items():
            first = 0
            if split == "train" and epoch == self._begin[0]:
                first = self._begin[1]
            for micro in range(plan.config.per_step):
                of_micro = recorded[split, micro]
                end = steps.stop if is_whole else max(of_micro, default=-1) + 1
                for step in range(first, end):
                    is_skipped = split == "train" and training.skipped.has(step)
                    if step not in of_micro and not is_skipped:
                        yield MicroBatchId(split, epoch, step, micro)

    def _has(self, place: MicroBatchId, record: EpochRecord) -> bool:
        """Return whether the plan of a start had a place when it was recorded."""
        starts = self._starts_of(record.hashes[place].start)
        return any(self.run.has_place(place, start) for start in starts)

    def _plan_of(self, epoch: int, record: EpochRecord) -> Plan:
        """The plan of the newest start that has recorded an epoch; among several, the shortest."""
        newest = max(record.starts, key=lambda start: start.time)
        plans = [start.stream.plan for start in self._starts_of(newest)]
        return min(plans or [self.run.plan], key=lambda plan: num_of_epoch(plan, epoch))

    def _starts_of(self, recorded: RecordedStart) -> list[Start]:
        """The starts of the run that have the settings of a recorded one, the newest first."""
        key = f"{recorded.seal} {recorded.facts}"
        if key not in self._starts:
            self._starts[key] = [
                start for start in reversed(self.run.starts) if _fits(start, recorded)
            ]
        return self._starts[key]

    def _may_differ(self, starts: Sequence[RecordedStart]) -> bool:
        """Return whether starts may have made a micro-batch differently: settings, code or versions changed."""
        of_run = [start for each in starts for start in self._starts_of(each)]
        has_changed = any(start.described != of_run[0].described for start in of_run)
        facts = [(start.facts["device"], start.facts["cpu"]) for start in starts]
        is_elsewhere = any(fact != facts[0] for fact in facts)
        return len({start.time for start in starts}) > 1 and (
            has_changed or is_elsewhere
        )

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
        different: dict[MicroBatchId, np.ndarray] = {}
        equal: dict[MicroBatchId, np.ndarray] = {}
        can_make: dict[int, bool] = {}
        for place in places:
            hashes = self._epoch(place.epoch).hashes[place]
            on_compared()
            stream = self._starts_of(hashes.start)[0].stream
            if id(stream) not in can_make:
                can_make[id(stream)] = self._can_make(stream)
            if not can_make[id(stream)]:
                continue
            try:
                self._compare_one(place, hashes, stream, different, equal)
            except RaypipeError as error:
                text = f"{place} cannot be made again: {error}"
                self.find("batch", text, place.epoch, place)
        splits: tuple[Split, Split] = ("train", "val")
        for split in splits:
            self._find_samples(
                {
                    place: found
                    for place, found in different.items()
                    if place.split == split
                },
                [found for place, found in equal.items() if place.split == split],
            )

    def _can_make(self, stream: RecordedStream) -> bool:
        """Find stores that have changed; return whether micro-batches of the same order can still be made."""
        if stream.lacks:
            self.find("store", stream.lacks)
        return stream.is_open and stream.plan is stream.spec.plan

    def _compare_one(
        self,
        place: MicroBatchId,
        recorded: Hashes,
        stream: RecordedStream,
        different: dict[MicroBatchId, np.ndarray],
        equal: dict[MicroBatchId, np.ndarray],
    ) -> None:
        if id(stream) not in self._makers:
            self._makers[id(stream)] = StepMaker(stream)
        maker = self._makers[id(stream)]
        host = maker.on_cpu(place)
        self.num_compared += 1
        remade = batch_hash(host).hex()
        if remade != recorded.stream:
            text = (
                f"{place} has the hash {remade} when it is made again, and {recorded.stream} is recorded: the "
                "model got other data, or the record or a sample has changed"
            )
            self.find("batch", text, place.epoch, place)
            different[place] = host.index.copy()
            return
        equal[place] = host.index.copy()
        if recorded.finished and self._can_finish(stream, recorded.start):
            self.num_finished += 1
            finished = batch_hash(maker.finish(maker.arrive(host))).hex()
            if finished != recorded.finished:
                text = (
                    f"{place} came from the CPU transform as it was recorded, and the device stage makes other "
                    f"tensors of it: they have the hash {finished}, and {recorded.finished} is recorded"
                )
                self.find("finished", text, place.epoch, place)

    def _can_finish(self, stream: RecordedStream, start: RecordedStart) -> bool:
        """Return whether the device stage can be compared: torch may round differently elsewhere."""
        if start.facts["cpu"] != cpu_kind():
            self.uncompared = (
                f"recorded on {start.facts['cpu']}, and this is {cpu_kind()}"
            )
        elif stream.changed_code:
            self.uncompared = stream.changed_code[0]
        else:
            return True
        return False

    def _find_samples(
        self, different: dict[MicroBatchId, np.ndarray], equal: list[np.ndarray]
    ) -> None:
        """Find the samples that all differing micro-batches have, and no equal one."""
        if not different:
            return
        common = set.intersection(
            *(set(found.tolist()) for found in different.values())
        )
        suspects = sorted(
            common.difference({PADDING}, *(found.tolist() for found in equal))
        )
        if not suspects:
            return
        place = next(iter(different))
        recorded = self._epoch(place.epoch).hashes[place].start
        store = self._starts_of(recorded)[0].stream.spec.stores[place.split]
        named = [
            f"{index} ({name_of(store, index)})" for index in suspects[:_NUM_NAMED]
        ]
        text = (
            f"sample {', '.join(named)} of {store.address}: in all {len(different)} micro-batches of "
            f"{place.split} that differ, and in none of the {len(equal)} that are equal; suspects: {len(suspects)}"
        )
        self.find("store", text)

    def _find_places(
        self, kind: Kind, places: Sequence[MicroBatchId], what: str
    ) -> None:
        """Add a finding about places of an epoch."""
        if not places:
            return
        names = ", ".join(map(str, places[:_NUM_NAMED]))
        if len(places) > _NUM_NAMED:
            names += f" and {len(places) - _NUM_NAMED} more"
        epoch = places[0].epoch
        place = places[0] if len(places) == 1 else None
        self.find(kind, f"epoch {epoch}: {names}: {what}", epoch, place)

    def find(
        self,
        kind: Kind,
        text: str,
        epoch: int | None = None,
        place: MicroBatchId | None = None,
    ) -> None:
        """Add a finding."""
        self.findings.append(Finding(kind, text, epoch, str(place) if place else ""))


def _fits(start: Start, recorded: RecordedStart) -> bool:
    """Return whether a rank has begun with the settings of a start."""
    is_same = recorded.facts.get("workers") == start.workers
    return is_same and sealed(start.described, recorded.facts) == recorded.seal
