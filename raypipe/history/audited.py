"""Checks a run's record of hashes, and micro-batches that are made again.

    record.check_record()    lines that are missing, foreign or recorded twice; roots and settings that do not fit
    record.compare(places)   hashes of micro-batches, made again in this process, with the recorded ones

Each check adds findings, which say what differs and where.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from raypipe.errors import ConfigError, RaypipeError
from raypipe.history.record_checks import damage_told
from raypipe.history.recorded import RecordedRun, Start
from raypipe.history.recorded_stream import RecordedStream
from raypipe.history.step_maker import Remade, StepMaker
from raypipe.plan.places import PADDING, MicroBatchId
from raypipe.plan.schedule import Plan
from raypipe.storage.filesystem import as_uri, open_filesystem
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.record.digest_log import (
    DIGESTS,
    FACTS,
    EpochRecord,
    Hashes,
    cpu_kind,
    num_of_epoch,
    read_epoch,
    recorded_counts,
    recorded_files,
    root_of,
    time_of,
)
from raypipe.streaming.record.opened import sealed

_ORDER = attrgetter("split", "step", "micro")
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
        fits: whether the recorded root is that one; None = none was recorded.
    """

    micro_batches: int
    is_complete: bool
    root: str
    fits: bool | None


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
        self._makers: dict[RecordedStream, StepMaker | None] = {}
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
        """Check that no line is missing, that hashes agree, and that roots and settings are those of the run."""
        with damage_told(f"{self._run.address}: {DIGESTS}/count-*.json"):
            counts = recorded_counts(self._folder)
        trained = [start.workers for start in self._run.starts if start.has_trained]
        for rank in range(max(trained, default=1)):
            if rank not in counts:
                self.find("missing", f"{DIGESTS}/count-{rank:04d}.json of rank {rank}")
        of_counts = itertools.chain.from_iterable(counts.values())
        epochs = sorted({*of_counts, *(epoch for epoch, _ in self._files)})
        for epoch in range(self._begin[0], min(epochs[-1], _MAX_MISSING)):
            if epoch not in epochs and num_of_epoch(self._run.plan, epoch):
                self.find("missing", "no line", epoch)
                break
        ranks = range(self._run.starts[-1].workers)
        reached = min(max(counts.get(rank, {}), default=0) for rank in ranks)
        for epoch in epochs:
            record = self._epoch(epoch)
            for rank, of_rank in sorted(counts.items()):
                num = of_rank.get(epoch, 0)
                found = record.num_lines.get(rank, 0)
                if found < num:
                    text = f"rank {rank} has written {num} lines, and {found} are there"
                    self.find("missing", text, epoch)
            self._check_lines(epoch, record)
            if record.recorded:
                self._check_whole(epoch, record, epoch >= reached)
        if not self.epochs:
            plan = self._run.stream.record.plan
            self.find("store", f"no line in {DIGESTS}/ is of the run's plan {plan}")

    @functools.cached_property
    def _begin(self) -> tuple[int, int]:
        """The epoch and the step in it at which the run has begun."""
        start = min(
            self._run.starts, key=lambda start: (start.step, not start.validates)
        )
        per_epoch = self._run.plan.steps_per_epoch
        epoch, step = divmod(start.step, per_epoch)
        return (epoch - 1, per_epoch) if start.validates else (epoch, step)

    def _check_lines(self, epoch: int, record: EpochRecord) -> None:
        """Check each line of an epoch by itself, and lines of one place with each other."""
        for start in record.starts:
            if not self._run_starts(start):
                text = f"lines of rank {start.get('rank')} with settings of no start of the run"
                self.find("foreign", text, epoch)
                break
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
        unfinished = [
            place
            for place, hashes in record.hashes.items()
            if hashes.start.get("device") == "cpu" and not hashes.finished
        ]
        what = "without the hash of the finished tensors"
        self.find("missing", what, places=unfinished)

    def _check_whole(self, epoch: int, record: EpochRecord, is_last: bool) -> None:
        """Check that no micro-batch is missing, and the root; all ranks have gone on behind all but the last."""
        newest = max(record.starts, key=time_of)
        plans = [start.stream.plan for start in self._run_starts(newest)]
        plan = min(
            plans or [self._run.plan], key=lambda plan: num_of_epoch(plan, epoch)
        )
        is_whole = bool(record.roots) or not (is_last or record.was_left)
        missing = self._missing(plan, epoch, record.recorded, is_whole)
        some = list(itertools.islice(missing, _MAX_MISSING))
        self.find("missing", "missing in the record", places=some)
        root = record.computed_root()
        fits = record.roots == {root} if record.roots else None
        if not fits and any(map(_differ, record.recorded.values())):
            # Once a changed transform has made a part again, an earlier root covers hashes that no longer count.
            fits = root in record.roots or None
        if fits is False:
            self.find("root", "other than that of the recorded hashes", epoch)
        num = len(record.recorded)
        is_complete = num == num_of_epoch(plan, epoch)
        self.epochs[epoch] = EpochSummary(num, is_complete, root, fits)

    def _missing(
        self, plan: Plan, epoch: int, recorded: Collection[MicroBatchId], is_whole: bool
    ) -> Iterator[MicroBatchId]:
        """Yield the places without a line, in the whole epoch or before others with their number in a step."""
        if epoch >= plan.config.epochs:
            return
        there = sorted(recorded, key=_ORDER)
        ends = {(place.split, place.micro): place.step for place in there}
        begin = plan.cursor(*max(self._begin, (epoch, 0)))
        for place in plan.micro_batches(begin):
            if place.epoch != epoch:
                break
            end = ends.get((place.split, place.micro), -1)
            if place not in recorded and (is_whole or place.step < end):
                yield place

    def _has(self, place: MicroBatchId) -> bool:
        """Return whether the plan of a start had a place when it was recorded."""
        starts = self._run_starts(self._hashes(place)[-1].start)
        return any(start.has_place(place) for start in starts)

    def _run_starts(self, recorded: dict[str, Any]) -> list[Start]:
        """The starts of the run that have the settings of a recorded one, the newest first."""
        facts = tuple(str(recorded.get(name)) for name in FACTS)
        return self._starts_of(facts, str(recorded.get("seal")))

    def _find_starts(self, facts: tuple[str, ...], seal: str) -> list[Start]:
        named = dict(zip(FACTS, facts, strict=True))
        return [
            start
            for start in reversed(self._run.starts)
            if named["workers"] == str(start.workers)
            and sealed(vars(start.stream.record), named) == seal
        ]

    def _may_differ(self, several: list[Hashes]) -> bool:
        """Return whether starts may have made a micro-batch differently: settings, code or versions changed."""
        starts = [hashes.start for hashes in several]
        streams = {start.stream for each in starts for start in self._run_starts(each)}
        machines = {(start.get("device"), start.get("cpu")) for start in starts}
        has_changed = len(streams) > 1 or len(machines) > 1
        return len(set(map(time_of, starts))) > 1 and has_changed

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
        samples: dict[tuple[str, bool], list[set[int]]] = {}
        for place in places:
            on_compared()
            hashes = self._hashes(place)[-1]
            stream = self._run_starts(hashes.start)[0].stream
            try:
                maker = self._maker(stream)
                if maker is None:
                    continue
                remade = Remade(maker, place)
                host = remade.host
                is_equal = self._is_equal(
                    "batch", place, batch_hash(host), hashes.stream
                )
                self.num_compared += 1
                found = samples.setdefault((place.split, is_equal), [])
                found.append({*host.index.tolist()} - {PADDING})
                if is_equal and hashes.finished and self._can_finish(stream, hashes):
                    self.num_finished += 1
                    finished = batch_hash(remade.finished)
                    self._is_equal("finished", place, finished, hashes.finished)
            except RaypipeError as error:
                self.find("batch", f"it cannot be made again: {error}", places=[place])
        for split in ("train", "val"):
            if different := samples.get((split, False)):
                common = set.intersection(*different)
                common = common.difference(*samples.get((split, True), []))
                if common:
                    text = f"samples of {split} that all different micro-batches have, and no equal one: "
                    self.find("store", text + str(sorted(common)[:_NUM_NAMED]))

    def _maker(self, stream: RecordedStream) -> StepMaker | None:
        """Return what makes micro-batches of a stream; find stores that have changed, the first time."""
        if stream not in self._makers:
            if stream.lacks:
                self.find("store", stream.lacks)
            self._makers[stream] = StepMaker(stream) if stream.is_open else None
        return self._makers[stream]

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
        if places is not None and not places:
            return
        if places:
            epoch = places[0].epoch
            names = ", ".join(map(str, places[:_NUM_NAMED]))
            more = len(places) - _NUM_NAMED
            text = (
                f"{names} and {more} more: {text}" if more > 0 else f"{names}: {text}"
            )
        if epoch is not None:
            text = f"epoch {epoch}: {text}"
        name = str(places[0]) if places and len(places) == 1 else ""
        self.findings.append(Finding(kind, text, epoch, name))


def _differ(several: list[Hashes]) -> bool:
    """Return whether records of a place differ, as far as they have it."""
    streams = {hashes.stream for hashes in several}
    finished = {hashes.finished for hashes in several} - {""}
    return len(streams) > 1 or len(finished) > 1
