"""Checks a run's record of hashes, and micro-batches that are made again.

    record.check_record()    lines that are missing, foreign, or differ from those of another start; settings
    record.compare(places)   hashes of micro-batches, made again in this process, with the recorded ones

Each check adds findings, which say what differs and where.
"""

from __future__ import annotations

import functools
import random
from collections import defaultdict
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from raypipe.errors import ConfigError, RaypipeError
from raypipe.history.recorded import RecordedRun, Start
from raypipe.history.recorded_stream import RecordedStream
from raypipe.history.step_maker import Remade, remade_of
from raypipe.plan.places import MicroBatchId, Split
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
)

_ORDER = attrgetter("epoch", "split", "step", "micro")
_NUM_NAMED = 3  # micro-batches that a finding names, at most

Kind = Literal["lines", "foreign", "twice", "root", "batch", "finished", "store"]


class Finding(NamedTuple):
    """Something wrong with a run or its record.

    Attributes:
        kind: lines (those that a rank has written are gone, or others), foreign (lines of micro-batches that the
            run does not have, or of settings that its starts do not have), twice (starts of one stream made a
            micro-batch differently), root (it is not the published one), batch (a micro-batch has another hash
            when it is made again), finished (the device stage makes other tensors), store (it has other contents,
            or cannot be opened).
        text: the difference, for people.
        epoch: the epoch; None = it is about the whole run.
        micro_batch: name of the micro-batch; empty = it is about several.
    """

    kind: Kind
    text: str
    epoch: int | None = None
    micro_batch: str = ""


class AuditedRecord:
    """The record of hashes of a run, and the findings of its checks.

    Attributes:
        findings: all findings, in the order of the checks.
        epochs: of each epoch the number of recorded micro-batches, whether these are all, and the root over them.
        places: all places of these epochs, in the plan's order.
        num_compared: micro-batches that were made again and compared.
        num_finished: those of them whose finished tensors were compared, too.
        uncompared: why finished tensors were not compared; empty = they were, or none were recorded.
    """

    def __init__(self, run: RecordedRun) -> None:
        self._run = run
        filesystem, path = open_filesystem(as_uri(run.address))
        folder = filesystem, f"{path}/{DIGESTS}"
        self._files = recorded_files(folder)
        if not self._files:
            raise ConfigError(
                f"{run.address} has no hashes: a run records them with train.log=[digest], your own loop "
                "with raypipe.loader(…, log_digest=True)"
            )
        self._plan = run.stream.record.plan
        self._epoch = functools.lru_cache(maxsize=1)(
            lambda epoch: read_epoch(folder, epoch)
        )
        self.findings: list[Finding] = []
        self.epochs: dict[int, dict[str, Any]] = {}
        self.places: list[MicroBatchId] = []
        self.num_compared = 0
        self.num_finished = 0
        self.uncompared = ""

    @property
    def root(self) -> str:
        """Hash over the roots of all epochs, hexadecimal."""
        return root_of(
            f"epoch {number} {epoch['root']}\n" for number, epoch in self.epochs.items()
        )

    def choose(self, num: int, seed: int) -> list[MicroBatchId]:
        """Return random places of the record, in its order; all of them if it has no more."""
        num = min(num, len(self.places))
        return sorted(random.Random(seed).sample(self.places, num), key=_ORDER)

    # The record by itself

    def check_record(self) -> None:
        """Check that no line is missing or foreign, and that hashes agree."""
        steps = defaultdict[int, set[int]](set)  # those of lines, by W
        for epoch in sorted({epoch for epoch, *_ in self._files}):
            record = self._epoch(epoch)
            self._check_epoch(epoch, record)
            if record.recorded:
                self.epochs[epoch] = {
                    "micro_batches": len(record.recorded),
                    "is_complete": self._is_complete(epoch, record),
                    "root": record.root,
                }
                self.places += sorted(record.recorded, key=_ORDER)
            for place, hashes in record.recorded.items():
                workers = self._starts_of(hashes)[0].workers
                steps[workers].add(self._run.step_of(place))
        # A rank that gets the batch of a second step has got the first one's with all others.
        trained = [workers for workers, of_start in steps.items() if len(of_start) > 1]
        ranks = {rank for _, rank, _ in self._files}
        for rank in set(range(max(trained, default=1))) - ranks:
            self._find("lines", f"no file of rank {rank} is in {DIGESTS}/")

    def _is_complete(self, epoch: int, record: EpochRecord) -> bool:
        """Return whether a record has all micro-batches of an epoch's training and of its validation."""
        plan = self._run.plan
        num_steps: dict[Split, int] = {"train": plan.training_of(epoch).num_delivered}
        if self._run.has_val(epoch):
            num_steps["val"] = plan.val_steps
        splits = [place.split for place in record.recorded]
        return all(
            splits.count(split) == num * plan.config.per_step
            for split, num in num_steps.items()
        )

    def _check_epoch(self, epoch: int, record: EpochRecord) -> None:
        """Check the lines of an epoch, and drop those that are not the run's."""
        for name in record.damaged:
            text = f"{name}.jsonl has other lines than its rank has written"
            self._find("lines", text, epoch)
        foreign = []
        for place, hashes in list(record.recorded.items()):
            starts = self._starts_of(hashes)
            if not any(start.has_place(place) for start in starts):
                foreign.append(place)
            elif starts[0].stream.record.plan == self._plan:
                continue
            del record.recorded[place]
        text = "are of no start of the run, by their settings or its plan"
        self._find_places("foreign", text, epoch, foreign)
        twice = [
            place
            for place, *both in record.unequal
            if place in record.recorded and not self._may_differ(both)
        ]
        text = (
            "were made again after a restart, differently, by equal settings and code"
        )
        self._find_places("twice", text, epoch, twice)

    def _find_places(
        self, kind: Kind, text: str, epoch: int, places: list[MicroBatchId]
    ) -> None:
        if places:
            named = ", ".join(map(str, places[:_NUM_NAMED]))
            self._find(kind, f"{len(places)} micro-batches {text}: {named}", epoch)

    def _may_differ(self, both: list[Hashes]) -> bool:
        """Return whether starts had other settings, code, versions, devices or CPUs."""
        made_by = {
            (start.stream, str([hashes.start.get("device"), hashes.start.get("cpu")]))
            for hashes in both
            for start in self._starts_of(hashes)
        }
        return len(made_by) != 1

    def _starts_of(self, hashes: Hashes) -> list[Start]:
        """The starts of the run that have the settings of the one that recorded hashes, in order."""
        seal = hashes.start.get("seal")
        return [start for start in self._run.starts if start.seal == seal]

    # Micro-batches that are made again

    def compare(self, places: Iterable[MicroBatchId]) -> None:
        """Make micro-batches again, and compare their hashes with the recorded ones.

        Args:
            places: in the order of their epochs.
        """
        lacking = set[str]()
        for place in places:
            hashes = self._epoch(place.epoch).recorded[place]
            start = self._run.start_at(place, self._starts_of(hashes))
            stream = start.stream
            if stream.lacks and stream.lacks not in lacking:
                lacking.add(stream.lacks)
                self._find("store", stream.lacks)
            if stream.is_open:
                try:
                    self._compare(
                        remade_of(stream, place, start.workers), stream, hashes
                    )
                except RaypipeError as error:
                    text = f"it cannot be made again: {error}"
                    self._find("batch", text, place=place)

    def _compare(self, remade: Remade, stream: RecordedStream, hashes: Hashes) -> None:
        """Compare a micro-batch as it reached its rank, and then as the model got it.

        Torch may round differently elsewhere.
        """
        place = remade.place
        made = batch_hash(remade.host)
        self.num_compared += 1
        if not self._is_equal("batch", place, made, hashes.stream):
            return
        if not hashes.finished:
            return
        cpu = hashes.start.get("cpu")
        if cpu != cpu_kind():
            self.uncompared = f"recorded on {cpu}, and this is {cpu_kind()}"
        elif stream.changed_code:
            self.uncompared = stream.changed_code[0]
        else:
            self.num_finished += 1
            finished = batch_hash(remade.finished)
            self._is_equal("finished", place, finished, hashes.finished)

    def _is_equal(
        self, kind: Kind, place: MicroBatchId, remade: bytes, recorded: str
    ) -> bool:
        text = f"hash {remade.hex()} when it is made again, and {recorded} is recorded"
        if remade.hex() != recorded:
            self._find(kind, text, place=place)
        return remade.hex() == recorded

    def check_root(self, published: str) -> None:
        """Check that a published root is the record's, or that of an epoch."""
        roots = {self.root, *(epoch["root"] for epoch in self.epochs.values())}
        if published not in roots:
            text = f"{self.root}, and neither it nor an epoch's is the published {published}"
            self._find("root", text)

    def _find(
        self,
        kind: Kind,
        text: str,
        epoch: int | None = None,
        place: MicroBatchId | None = None,
    ) -> None:
        name = str(place or "")
        if place:
            epoch = place.epoch
            text = f"{name}: {text}"
        if epoch is not None:
            text = f"epoch {epoch}: {text}"
        self.findings.append(Finding(kind, text, epoch, name))
