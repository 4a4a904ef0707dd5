"""Checks a run's record of hashes: its trees, and micro-batches that are made again.

    record.check_tree()            lines that are missing or recorded twice, and roots that do not fit the hashes
    record.compare(positions)      hashes of micro-batches, made again in this process, with the recorded ones

Each check adds findings, which say what is wrong and, as far as it can be told, who changed: the record after the
run, the batch that the model got, or the store.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from raypipe.errors import ConfigError, RaypipeError
from raypipe.history.differences import Difference, RemadeBatches, recorded_with
from raypipe.history.epoch_checks import (
    EpochSummary,
    check_lines,
    check_roots,
    summary_of,
)
from raypipe.history.findings import Finding, Kind, some_named
from raypipe.history.recorded import RecordedRun
from raypipe.history.recorded_stream import RecordedStream
from raypipe.history.step_maker import StepMaker
from raypipe.metrics.records import read_records
from raypipe.plan.places import MicroBatchId
from raypipe.storage.filesystem import as_uri, open_filesystem
from raypipe.stores.base import Store
from raypipe.streaming.record import merkle
from raypipe.streaming.record.digest_log import (
    DIGESTS,
    EpochRecord,
    Hashes,
    cpu_kind,
    read_epoch,
    recorded_epochs,
)
from raypipe.streaming.record.hashes import finished_hash, stream_hash

_MAX_EMPTY = 100  # epochs without a file that are looked at one by one


@dataclass
class AuditedRecord:
    """The record of hashes of a run, and the findings of its checks.

    Attributes:
        run: the run.
        findings: all findings, in the order of the checks.
        epochs: the epochs that `check_tree` has read.
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
        self._fingerprint = self.run.stream.record["plan"]
        self._makers: dict[int, StepMaker] = {}
        self._foreign: dict[int, list[MicroBatchId]] = {}
        self._files = recorded_epochs(self._folder)
        if not self._files:
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
        """Root over those of all epochs, hexadecimal."""
        leaves = [
            f"epoch {number} {epoch.root}".encode()
            for number, epoch in self.epochs.items()
        ]
        return merkle.root(leaves).hex()

    def epoch_record(self, epoch: int) -> EpochRecord:
        """Read the record of an epoch, of the micro-batches that the run's plan has."""
        record = read_epoch(self._folder, epoch, self._fingerprint)
        foreign = [
            position for position in record.hashes if not self.run.has_place(position)
        ]
        for position in foreign:
            del record.hashes[position]
        self._foreign[epoch] = foreign
        return record

    # The trees

    def check_tree(self) -> None:
        """Check that no line is missing, that hashes agree, and that the roots are those of the hashes."""
        begin_epoch, begin_step = self._begin()
        reached = self._reached()
        steps_per_epoch = self.run.plan.steps_per_epoch
        num_epochs = self.run.plan.config.epochs
        beyond = [epoch for epoch in self._files if epoch >= num_epochs]
        if beyond:
            text = f"{DIGESTS}/ has files of epoch {beyond[0]}, and the run has the epochs 0 to {num_epochs - 1}"
            self.find("foreign", text)
        files = [epoch for epoch in self._files if epoch < num_epochs]
        last = min(max([*files, (reached - 1) // steps_per_epoch]), num_epochs - 1)
        if not any(self.epoch_record(epoch).hashes for epoch in self._files):
            text = f"no line in {DIGESTS}/ is of the run's plan {self._fingerprint}: other settings made them"
            self.find("store", text)
            return
        num_empty = 0
        for epoch in range(begin_epoch, last + 1):
            num_empty += epoch not in self._files
            if num_empty > _MAX_EMPTY:
                text = f"epochs {epoch} to {last}: they were not looked at, since so many before have no line"
                self.find("missing", text)
                return
            record = self.epoch_record(epoch)
            begin = begin_step if epoch == begin_epoch else 0
            end = None
            if not record.roots and (epoch == last or record.was_left):
                end = 0 if record.was_left else reached - epoch * steps_per_epoch
            self._check_epoch(epoch, record, begin, end)

    def _begin(self) -> tuple[int, int]:
        """The epoch and the step in it at which the run has begun."""
        start = min(
            self.run.starts, key=lambda start: (start.step, not start.validates)
        )
        epoch, step = divmod(start.step, self.run.plan.steps_per_epoch)
        if start.validates:
            return epoch - 1, self.run.plan.steps_per_epoch
        return epoch, step

    def _reached(self) -> int:
        """The steps that the run has done, by rank 0's record of its training."""
        records = read_records(as_uri(self.run.address))
        steps = (record["step"] for record in records if record.get("kind") == "train")
        return max(map(int, steps), default=0)

    def _check_epoch(
        self, epoch: int, record: EpochRecord, begin: int, end: int | None
    ) -> None:
        """Check an epoch's record by itself; see `check_lines`."""
        plan = self.run.plan
        foreign = self._foreign[epoch]
        if foreign:
            text = f"epoch {epoch}: {some_named(foreign)} recorded that the run's plan does not have"
            self.find("foreign", text, epoch, foreign)
        self.findings += check_lines(plan, epoch, record, begin, end)
        summary = summary_of(plan, epoch, record)
        self.epochs[epoch] = summary
        self.findings += check_roots(epoch, record, summary)

    # Micro-batches that are made again

    def choose(self, num: int, seed: int) -> list[MicroBatchId]:
        """Return random positions of the record; all of them if it has no more."""
        total = self.num_recorded
        chosen = sorted(random.Random(seed).sample(range(total), min(num, total)))
        positions = list[MicroBatchId]()
        before = 0
        for epoch, summary in self.epochs.items():
            end = before + summary.micro_batches
            numbers = [number - before for number in chosen if before <= number < end]
            if numbers:
                of_epoch = [
                    position for position, _ in self.epoch_record(epoch).leaves()
                ]
                positions += [of_epoch[number] for number in numbers]
            before = end
        return positions

    def places(self) -> list[MicroBatchId]:
        """Return all positions of the record, in the plan's order."""
        return [
            position
            for epoch in self.epochs
            for position, _ in self.epoch_record(epoch).leaves()
        ]

    def compare(
        self,
        positions: Sequence[MicroBatchId],
        on_compared: Callable[[], None] = lambda: None,
    ) -> None:
        """Make micro-batches again, and compare their hashes with the recorded ones.

        Args:
            on_compared: called after each.
        """
        if not self._can_make(positions):
            return
        numbers = sorted({position.epoch for position in positions})
        records = {epoch: self.epoch_record(epoch) for epoch in numbers}
        compared = RemadeBatches(self._store_of, self.epochs, records, [], [])
        for position in positions:
            record = records[position.epoch]
            result = self._compare_one(position, record.hashes[position], record)
            if isinstance(result, Difference):
                compared.different.append(result)
            elif result is not None:
                compared.equal.append((position, result))
            on_compared()
        if compared.different:
            every = (self.epoch_record(epoch) for epoch in self.epochs)
            recorded_at = recorded_with(compared.hashes, every)
            self.findings += compared.explained(recorded_at)
        self.findings += compared.changed_roots()

    def _store_of(self, position: MicroBatchId) -> Store:
        return self.run.stream_of(position).spec.stores[position.split]

    def _can_make(self, positions: Sequence[MicroBatchId]) -> bool:
        """Find stores that have changed; return whether micro-batches of the same order can still be made."""
        can_make = True
        streams = {id(stream): stream for stream in map(self.run.stream_of, positions)}
        for stream in streams.values():
            if stream.lacks:
                self.find("store", stream.lacks)
            if not stream.is_open or stream.plan is not stream.spec.plan:
                can_make = False
        return can_make

    def _compare_one(
        self, position: MicroBatchId, recorded: Hashes, record: EpochRecord
    ) -> Difference | np.ndarray | None:
        """Return the difference, or the samples of an equal micro-batch; None if it cannot be made."""
        stream = self.run.stream_of(position)
        if id(stream) not in self._makers:
            self._makers[id(stream)] = StepMaker(stream)
        maker = self._makers[id(stream)]
        try:
            host = maker.on_cpu(position)
        except RaypipeError as error:
            text = f"{position} cannot be made again: {error}"
            self.find("batch", text, position.epoch, [position])
            return None
        self.num_compared += 1
        remade = stream_hash(host).hex()
        if remade != recorded.stream:
            return Difference(position, recorded.stream, remade, host.index.copy())
        if recorded.finished and self._can_finish(stream, record):
            self.num_finished += 1
            arrived = maker.arrive(host)
            finished = finished_hash(arrived, maker.finish(arrived)).hex()
            if finished != recorded.finished:
                text = (
                    f"{position} came from the CPU transform as it was recorded, and the device stage made other "
                    "tensors of it: its augmentation, or this part of the record, was another one"
                )
                self.find("finished", text, position.epoch, [position])
        return host.index.copy()

    def _can_finish(self, stream: RecordedStream, record: EpochRecord) -> bool:
        """Return whether the device stage can be compared: torch may round differently elsewhere."""
        kinds = {str(start.get("cpu")) for start in record.starts}
        if kinds != {cpu_kind()}:
            self.uncompared = (
                f"recorded on {', '.join(sorted(kinds))}, and this is {cpu_kind()}"
            )
        elif stream.differences:
            self.uncompared = stream.differences[0]
        return not self.uncompared

    def find(
        self,
        kind: Kind,
        text: str,
        epoch: int | None = None,
        positions: Sequence[MicroBatchId] = (),
    ) -> None:
        """Add a finding."""
        name = str(positions[0]) if len(positions) == 1 else ""
        self.findings.append(Finding(kind, text, epoch, name))
