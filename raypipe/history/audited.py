"""Checks a run's record of hashes: its trees, and micro-batches that are made again.

    record.check_tree()            lines that are missing or recorded twice, and roots that do not fit the hashes
    record.compare(places)         hashes of micro-batches, made again in this process, with the recorded ones

Each check adds findings, which say what is wrong and, as far as it can be told, who changed: the record after the
run, the batch that the model got, or the store.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from raypipe.errors import ConfigError, RaypipeError
from raypipe.history.recorded import RecordedRun
from raypipe.history.recorded_stream import RecordedStream
from raypipe.history.step_maker import StepMaker
from raypipe.metrics.records import read_records
from raypipe.plan.places import PADDING, MicroBatchId
from raypipe.storage.filesystem import as_uri, open_filesystem
from raypipe.stores.base import name_of
from raypipe.streaming import merkle
from raypipe.streaming.digest_log import (
    DIGESTS,
    EpochRecord,
    EpochRoot,
    Hashes,
    cpu_kind,
    leaf_of,
    num_of_epoch,
    read_epoch,
    recorded_epochs,
    steps_of_epoch,
)
from raypipe.streaming.hashes import finished_hash, stream_hash

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
_NUM_NAMED = 3  # places or samples in one finding's text
_MAX_MISSING = 100_000  # micro-batches of an epoch that are counted
_MAX_EMPTY = 100  # epochs without a file that are looked at one by one


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


@dataclass
class _Difference:
    """A micro-batch whose hash is not the recorded one when it is made again."""

    place: MicroBatchId
    recorded: str
    made: str
    indices: np.ndarray


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
        foreign = [place for place in record.hashes if not self.run.has_place(place)]
        for place in foreign:
            del record.hashes[place]
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
            self._check_lines(epoch, record, begin, end)
            self._check_roots(epoch, record)

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

    def _check_lines(
        self, epoch: int, record: EpochRecord, begin: int, end: int | None
    ) -> None:
        """Find places that are missing, or recorded with two hashes; see `_missing`."""
        foreign = self._foreign[epoch]
        if foreign:
            text = f"epoch {epoch}: {_counted(foreign)} recorded that the run's plan does not have"
            self.find("foreign", text, epoch, foreign)
        of_epoch = self._missing(epoch, record, begin, end)
        missing = list(itertools.islice(of_epoch, _MAX_MISSING))
        if missing:
            text = (
                f"epoch {epoch}: {_counted(missing)} missing in the record: lines were removed, could not be "
                "written, or the run did not record them"
            )
            self.find("missing", text, epoch, missing)
        if record.disagreeing:
            places = list(record.disagreeing)
            text = (
                f"epoch {epoch}: {_counted(places)} recorded twice with different hashes: starts of the run, with "
                "other code or versions, made different pixels, or a line was added"
            )
            self.find("twice", text, epoch, places)

    def _missing(
        self, epoch: int, record: EpochRecord, begin: int, end: int | None
    ) -> Iterator[MicroBatchId]:
        """The places of an epoch that have no line.

        Args:
            begin: the training step in the epoch at which the run has begun.
            end: the training steps that were done at least, if the epoch may have ended early; None = all.
        """
        recorded = defaultdict[tuple[str, int], set[int]](set)
        for place in record.hashes:
            recorded[place.split, place.micro].add(place.step)
        plan = self.run.plan
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

    def _check_roots(self, epoch: int, record: EpochRecord) -> None:
        computed = record.computed_root()
        is_complete = len(record.hashes) == num_of_epoch(self.run.plan, epoch)
        fits = all(root == computed for root in record.roots)
        self.epochs[epoch] = EpochSummary(
            computed.num_micro_batches,
            is_complete,
            computed.root,
            computed.finished_root,
            fits if record.roots else None,
        )
        for root in record.roots:
            if root != computed:
                self.find("root", _misfit(epoch, root, computed), epoch)
        if is_complete and not record.roots:
            text = f"epoch {epoch}: it is complete, and has no root: the line was removed, or could not be written"
            self.find("root", text, epoch)

    # Micro-batches that are made again

    def choose(self, num: int, seed: int) -> list[MicroBatchId]:
        """Return random places of the record; all of them if it has no more."""
        total = self.num_recorded
        chosen = sorted(random.Random(seed).sample(range(total), min(num, total)))
        places = list[MicroBatchId]()
        before = 0
        for epoch, summary in self.epochs.items():
            end = before + summary.micro_batches
            numbers = [number - before for number in chosen if before <= number < end]
            if numbers:
                of_epoch = [place for place, _ in self.epoch_record(epoch).leaves()]
                places += [of_epoch[number] for number in numbers]
            before = end
        return places

    def places(self) -> list[MicroBatchId]:
        """Return all places of the record, in the plan's order."""
        return [
            place
            for epoch in self.epochs
            for place, _ in self.epoch_record(epoch).leaves()
        ]

    def compare(
        self,
        places: Sequence[MicroBatchId],
        on_compared: Callable[[], None] = lambda: None,
    ) -> None:
        """Make micro-batches again, and compare their hashes with the recorded ones.

        Args:
            on_compared: called after each.
        """
        if not self._can_make(places):
            return
        different = list[_Difference]()
        equal = list[tuple[MicroBatchId, np.ndarray]]()
        records = {epoch: self.epoch_record(epoch) for epoch in _epochs_of(places)}
        for place in places:
            recorded = records[place.epoch].hashes[place]
            found = self._compare_one(place, recorded, records[place.epoch])
            if isinstance(found, _Difference):
                different.append(found)
            elif found is not None:
                equal.append((place, found))
            on_compared()
        if different:
            self._explain(different, equal, records)
        for epoch, record in records.items():
            summary = self.epochs[epoch]
            num_equal = sum(place.epoch == epoch for place, _ in equal)
            is_changed = any(
                root.num_micro_batches == num_equal and root.root != summary.root
                for root in record.roots
            )
            if is_changed and num_equal == summary.micro_batches:
                text = (
                    f"epoch {epoch}: all its hashes are right, so its root was changed"
                )
                self.find("root", text, epoch)

    def _can_make(self, places: Sequence[MicroBatchId]) -> bool:
        """Find stores that have changed; return whether micro-batches of the same order can still be made."""
        can_make = True
        streams = {id(stream): stream for stream in map(self.run.stream_of, places)}
        for stream in streams.values():
            if stream.lacks:
                self.find("store", stream.lacks)
            if not stream.is_open or stream.plan is not stream.spec.plan:
                can_make = False
        return can_make

    def _compare_one(
        self, place: MicroBatchId, recorded: Hashes, record: EpochRecord
    ) -> _Difference | np.ndarray | None:
        """Return the difference, or the samples of an equal micro-batch; None if it cannot be made."""
        stream = self.run.stream_of(place)
        if id(stream) not in self._makers:
            self._makers[id(stream)] = StepMaker(stream)
        maker = self._makers[id(stream)]
        try:
            host = maker.on_cpu(place)
        except RaypipeError as error:
            text = f"{place} cannot be made again: {error}"
            self.find("batch", text, place.epoch, [place])
            return None
        self.num_compared += 1
        made = stream_hash(host).hex()
        if made != recorded.stream:
            return _Difference(place, recorded.stream, made, host.index.copy())
        if recorded.finished and self._can_finish(stream, record):
            self.num_finished += 1
            arrived = maker.arrive(host)
            finished = finished_hash(arrived, maker.finish(arrived)).hex()
            if finished != recorded.finished:
                text = (
                    f"{place} came from the CPU transform as it was recorded, and the device stage made other "
                    "tensors of it: its augmentation, or this part of the record, was another one"
                )
                self.find("finished", text, place.epoch, [place])
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

    # The meaning of a difference

    def _explain(
        self,
        different: list[_Difference],
        equal: Sequence[tuple[MicroBatchId, np.ndarray]],
        records: dict[int, EpochRecord],
    ) -> None:
        """Add a finding for each difference: an exchange, a forged hash, or other data."""
        elsewhere = self._places_of({one.made for one in different})
        recorded_at = self._places_of({one.recorded for one in different})
        restored = {
            epoch: self._is_restored(epoch, record, different)
            for epoch, record in records.items()
        }
        unexplained = list[_Difference]()
        for one in different:
            others = [
                place
                for place in (*elsewhere[one.made], *recorded_at[one.recorded])
                if place != one.place
            ]
            if others:
                text = f"{one.place} has another hash when it is made again, and was exchanged with {others[0]}"
                self.find("exchanged", text, one.place.epoch, [one.place])
            elif restored[one.place.epoch]:
                text = (
                    f"{one.place}: its hash was changed after the run. With the hash that it has when it is made "
                    "again, the epoch's root is right"
                )
                self.find("hash", text, one.place.epoch, [one.place])
            else:
                unexplained.append(one)
        self._explain_data(unexplained, equal)

    def _places_of(self, hashes: Collection[str]) -> dict[str, list[MicroBatchId]]:
        """Return the places that are recorded with these hashes."""
        found = defaultdict[str, list[MicroBatchId]](list)
        for epoch in self.epochs:
            for place, recorded in self.epoch_record(epoch).hashes.items():
                if recorded.stream in hashes:
                    found[recorded.stream].append(place)
        return found

    def _is_restored(
        self, epoch: int, record: EpochRecord, different: Sequence[_Difference]
    ) -> bool:
        """Return whether the recorded root fits the hashes that micro-batches have when they are made again."""
        if self.epochs[epoch].fits is not False:
            return False
        made = {one.place: one.made for one in different}
        leaves = [
            leaf_of(place, made[place]) if place in made else leaf
            for place, leaf in record.leaves()
        ]
        root = merkle.root(leaves).hex()
        return any(recorded.root == root for recorded in record.roots)

    def _explain_data(
        self,
        different: Sequence[_Difference],
        equal: Sequence[tuple[MicroBatchId, np.ndarray]],
    ) -> None:
        """Add findings for micro-batches of other data, and the samples that could be the cause."""
        for one in different:
            fits = self.epochs[one.place.epoch].fits
            if fits:
                why = "the root fits the record, so the model got other data, or a sample of the store has changed"
            else:
                why = "the record was changed, the model got other data, or a sample of the store has changed"
            text = f"{one.place} has another hash when it is made again: {why}"
            self.find("batch", text, one.place.epoch, [one.place])
        for split in ("train", "val"):
            of_split = [one for one in different if one.place.split == split]
            good = [indices for place, indices in equal if place.split == split]
            if of_split and (suspects := _suspects(of_split, good)):
                self.find("store", self._named(of_split, suspects, len(good)))

    def _named(
        self, different: Sequence[_Difference], suspects: list[int], num_equal: int
    ) -> str:
        """The sentence about samples that are in all micro-batches that differ."""
        place = different[0].place
        store = self.run.stream_of(place).spec.stores[place.split]
        names = [
            f"{index} ({name_of(store, index)})" for index in suspects[:_NUM_NAMED]
        ]
        more = len(suspects) - len(names)
        if len(suspects) == 1:
            subject = f"sample {names[0]} is"
        else:
            subject = (
                f"samples {', '.join(names)}{f' and {more} more' if more else ''} are"
            )
        return (
            f"{subject} in all {len(different)} micro-batches of {place.split} that differ, and in none of the "
            f"{num_equal} that are equal: look at {store.address} there"
        )

    def find(
        self,
        kind: Kind,
        text: str,
        epoch: int | None = None,
        places: Sequence[MicroBatchId] = (),
    ) -> None:
        """Add a finding."""
        name = str(places[0]) if len(places) == 1 else ""
        self.findings.append(Finding(kind, text, epoch, name))


def _suspects(
    different: Sequence[_Difference], good: Sequence[np.ndarray]
) -> list[int]:
    """The samples that all differing micro-batches have, and no equal one."""
    common = set(different[0].indices.tolist()) - {PADDING}
    for one in different[1:]:
        common &= set(one.indices.tolist())
    for indices in good:
        common -= set(indices.tolist())
    return sorted(common)


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


def _counted(places: Sequence[MicroBatchId]) -> str:
    """Some places by name, and the number of others, with a verb."""
    names = ", ".join(map(str, places[:_NUM_NAMED]))
    more = len(places) - _NUM_NAMED
    if more > 0:
        return f"{names} and {more} more micro-batches are"
    return f"{names} {'is' if len(places) == 1 else 'are'}"


def _epochs_of(places: Sequence[MicroBatchId]) -> list[int]:
    return sorted({place.epoch for place in places})
