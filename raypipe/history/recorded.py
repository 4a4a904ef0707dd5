"""A recorded run, by its folder: its settings, its stream as it was opened, and which samples each step had.

    open_run("runs/first")            → RecordedRun, which starts no Ray and writes nothing
    run.plan, run.spec                the order; and the stream, with its stores and transforms
    run.micro_batches(step)           places of a step's micro-batches
    run.draws(place)                  the samples of a micro-batch: indices, keys, weights

A step is counted as in metrics.jsonl, samples.jsonl and `raypipe status`: step N is the N-th optimizer step, so 1
is the first, and N steps are done after it. `MicroBatchId.step`, which counts from 0 in its epoch, is one less.
A run that was resumed has several starts. The one that holds for a step is the last that began before it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import pyarrow.fs

from raypipe.errors import ConfigError
from raypipe.history.record_checks import check_stream, damage_told, whole_number
from raypipe.history.recorded_stream import MicroBatchDraws, RecordedStream
from raypipe.metrics.records import RECORDS, read_records
from raypipe.mistakes import choices
from raypipe.plan.places import MicroBatchId
from raypipe.plan.schedule import Plan
from raypipe.storage.filesystem import as_uri, join_address, open_filesystem
from raypipe.storage.lease import check_owner
from raypipe.streaming.opening import open_stream
from raypipe.streaming.record.digest_log import place_in
from raypipe.streaming.spec import StreamSpec

_GIVEN = {*signature(open_stream).parameters, "augment"} - {"pool", "quarantine"}


@dataclass(frozen=True)
class Start:
    """A start of a run: at its beginning, or where it was resumed.

    Attributes:
        step: steps that were done.
        workers: W.
        validates: whether it began with the validation of that step.
        stream: the stream as it was opened.
        settings: the settings of the stream by their whole names, plain values.
        described: the record of the stream.
        has_trained: whether the run has records of later steps.
    """

    step: int
    workers: int
    validates: bool
    stream: RecordedStream
    settings: dict[str, Any]
    described: dict[str, Any]
    has_trained: bool


def open_run(
    run: str | Path, *, trust_run_code: bool = False, **given: Any
) -> RecordedRun:
    """Open a run by its folder.

    Args:
        run: folder or URI of a run, by `raypipe train` or your own loop.
        trust_run_code: open the folder although another user owns it, and run the code that it names.
        given: arguments of `raypipe.open_stream`, or `augment`, to use instead of those in the record: `train="…"`
            for a store that has moved, `train_transform=…` for an object that the folder does not hold.

    Raises:
        ConfigError: there is no run, or it has not begun to train.
    """
    unknown = given.keys() - _GIVEN
    if unknown:
        name = min(unknown)
        raise ConfigError(f"unknown argument {name!r}{choices(name, sorted(_GIVEN))}")
    run_uri = as_uri(str(run).rstrip("/"))
    records = _records_of(run, run_uri)
    check_owner(run_uri, trust_run_code)
    streams: dict[str, RecordedStream] = {}
    starts = []
    last = max(record["step"] for record in records)
    for record in records:
        described = record.get("stream")
        if record.get("kind") != "start" or described is None:
            continue
        with damage_told(join_address(run_uri, RECORDS)):
            check_stream(described)
            # A resume may change settings, and most do not.
            of_stream = {name: described[name] for name in ("arguments", "augment")}
            text = json.dumps(of_stream, sort_keys=True)
            if text not in streams:
                streams[text] = RecordedStream(
                    run_uri, described, trust_run_code, given
                )
            start = Start(
                whole_number(record["step"], "step"),
                whole_number(record.get("workers", 1), "workers", 1),
                bool(record.get("validates")),
                streams[text],
                dict(record.get("settings", {})),
                described,
                record["step"] < last,
            )
        starts.append(start)
    return RecordedRun(run_uri, starts)


def given_of(
    train: str | dict[str, str],
    val: str,
    train_transform: str = "",
    val_transform: str = "",
    augment: str = "",
) -> dict[str, Any]:
    """Return the arguments that options give instead of the recorded ones."""
    values = {
        "train": train,
        "val": val,
        "train_transform": train_transform,
        "val_transform": val_transform,
        "augment": augment,
    }
    return {name: value for name, value in values.items() if value}


def _records_of(run: str | Path, run_uri: str) -> list[dict[str, Any]]:
    """The records of a run, the last start of which says how its stream was opened.

    Raises:
        ConfigError: there are none.
    """
    kind = _kind_of(run_uri)
    records: list[dict[str, Any]] = []
    if kind == pyarrow.fs.FileType.Directory:
        records = read_records(run_uri)
        found = f"has no start in its {RECORDS}, so it has not begun to train, or it is not the folder of a run"
    elif kind == pyarrow.fs.FileType.File:
        found = "is a file, and not the folder of a run"
    else:
        found = "does not exist"
    starts = [record for record in records if record.get("kind") == "start"]
    if not starts:
        raise ConfigError(
            f"{run} {found}: give the folder of a run, which it printed as run_dir, or which raypipe.loader got "
            "as run_dir"
        )
    if "stream" not in starts[-1]:
        raise ConfigError(
            f"{run} does not say how its stream was opened: an older raypipe recorded it"
        )
    return records


class RecordedRun:
    """A run by its folder; `open_run` makes one.

    Attributes:
        address: the run's folder.
        starts: in the order in which they happened.
    """

    def __init__(self, run_uri: str, starts: list[Start]) -> None:
        self.address = run_uri.removeprefix("file://")
        self.starts = starts

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the run's stream at its newest start, by their whole names."""
        return self.starts[-1].settings

    @property
    def stream(self) -> RecordedStream:
        """The stream of the newest start."""
        return self.starts[-1].stream

    @property
    def spec(self) -> StreamSpec:
        """The stream of the newest start, opened again, see `RecordedStream.spec`."""
        return self.stream.spec

    @property
    def plan(self) -> Plan:
        """The plan of the newest start, see `RecordedStream.plan`."""
        return self.stream.plan

    @property
    def differences(self) -> list[str]:
        """Sentences that say what has changed since the run, see `RecordedStream.differences`."""
        return self.stream.differences

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps of the whole run."""
        plan = self.plan
        return plan.config.epochs * plan.steps_per_epoch

    def start_of(self, step: int, validates: bool = False) -> Start:
        """Return the start that holds for a step.

        Args:
            validates: for the validation behind that step.
        """
        holding = [
            start
            for start in self.starts
            if start.step < step
            or (validates and start.validates and start.step == step)
        ]
        return holding[-1] if holding else self.starts[0]

    def stream_of(self, place: MicroBatchId) -> RecordedStream:
        """Return the stream that a micro-batch is of."""
        return self.start_of(self.step_of(place), place.split == "val").stream

    def step_of(self, place: MicroBatchId) -> int:
        """Return the step of a micro-batch; for a validation, the step before it."""
        done = self.plan.global_step(place)
        return int(done) + (place.split == "train")

    def steps_in(self, epoch: int) -> range:
        """Return the steps of an epoch; epochs are counted from 0, as in metrics.jsonl.

        Raises:
            ConfigError: the run has no such epoch.
        """
        plan = self.plan
        if not 0 <= epoch < plan.config.epochs:
            raise ConfigError(
                f"{self.address} has the epochs 0 to {plan.config.epochs - 1}, and no epoch {epoch}"
            )
        first = epoch * plan.steps_per_epoch + 1
        return range(first, first + plan.steps_per_epoch)

    def micro_batches(
        self, step: int, rank: int | None = None, micro: int | None = None
    ) -> list[MicroBatchId]:
        """Return the places of a step's micro-batches, in the order of their numbers.

        Args:
            step: from 1 on.
            rank: only those that went to this rank; with W ranks, number m went to rank m mod W.
            micro: only the one of this number, from 0 on.

        Raises:
            ConfigError: the run has no such step, rank or number, or `plan.skip` left the step out.
        """
        self.check_step(step)
        start = self.start_of(step)
        if self.is_skipped(step):
            raise ConfigError(
                f"step {step:,} was left out by plan.skip, so the model saw nothing of it"
            )
        per_step = self.plan.config.per_step
        world_size = start.workers
        if rank is not None and not 0 <= rank < world_size:
            raise ConfigError(
                f"step {step} had {world_size} rank{'s' if world_size > 1 else ''}, from 0 on, and no rank {rank}"
            )
        if micro is not None and not 0 <= micro < per_step:
            raise ConfigError(
                f"a step has {per_step} micro-batch{'es' if per_step > 1 else ''}, from 0 on, not {micro}"
            )
        if rank is not None and micro is not None and micro % world_size != rank:
            raise ConfigError(
                f"micro-batch {micro} of step {step} went to rank {micro % world_size} of {world_size}, not to "
                f"rank {rank}"
            )
        epoch, step_in_epoch = divmod(step - 1, self.plan.steps_per_epoch)
        return [
            MicroBatchId("train", epoch, step_in_epoch, number)
            for number in range(per_step)
            if (rank is None or number % world_size == rank)
            and (micro is None or number == micro)
        ]

    def is_skipped(self, step: int) -> bool:
        """Return whether `plan.skip` left out a step."""
        return self.start_of(step).stream.plan.skipped.has(step - 1)

    def check_step(self, step: int) -> None:
        """Raise ConfigError unless the run has a step."""
        if not 1 <= step <= self.num_steps:
            raise ConfigError(
                f"{self.address} has the steps 1 to {self.num_steps:,}, counted as in metrics.jsonl, and no step "
                f"{step:,}"
            )

    def has_place(self, place: MicroBatchId, start: Start | None = None) -> bool:
        """Return whether the plan of a start, None = the newest, has a micro-batch of a place."""
        plan = start.stream.plan if start else self.plan
        steps = plan.steps_per_epoch if place.split == "train" else plan.val_steps
        return (
            place.epoch < plan.config.epochs
            and place.step < steps
            and place.micro < plan.config.per_step
            and (place.split == "train" or plan.has_val(place.epoch))
        )

    def check_place(self, place: MicroBatchId) -> MicroBatchId:
        """Return a place; raise ConfigError unless the run has it."""
        plan = self.plan
        if not self.has_place(place):
            validations = "no validation"
            if plan.val_steps:
                validations = f"validations of {plan.val_steps:,} steps"
            raise ConfigError(
                f"{self.address} has no micro-batch {place}: it has {plan.config.epochs:,} epochs of "
                f"{plan.steps_per_epoch:,} steps of {plan.config.per_step} micro-batches each, and {validations}"
            )
        return place

    def rank_of(self, place: MicroBatchId) -> int:
        """Return the rank that got a micro-batch."""
        start = self.start_of(self.step_of(place), place.split == "val")
        return place.micro % start.workers

    def draws(self, place: MicroBatchId) -> MicroBatchDraws:
        """Return the samples of a micro-batch.

        They are the plan's. Samples that the run could not use are those of its quarantine/.
        """
        return self.stream_of(place).draws(place)


def _kind_of(address: str) -> pyarrow.fs.FileType:
    """Return whether a file, a folder, or nothing is at an address."""
    filesystem, path = open_filesystem(address)
    return filesystem.get_file_info(path).type


def place_of(name: str) -> MicroBatchId:
    """Return the place that a name such as train-e0000-s000012-m000 is of, as errors and quarantine/ have it.

    Raises:
        ConfigError: the text is not such a name.
    """
    place = place_in(name)
    if place is None:
        raise ConfigError(
            f"{name!r} does not name a micro-batch, as in train-e0000-s000012-m000"
        )
    return place
