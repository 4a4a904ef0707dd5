"""A recorded run, by its folder: its stream as it was opened, and which samples each step had.

    run = RecordedRun("runs/first")   starts no Ray, and writes nothing
    run.plan, run.stream              the order; and the stream, with its stores and transforms
    run.micro_batches(step)           places of a step's micro-batches
    run.draws(place)                  the samples of a micro-batch: indices, keys, weights

A step is counted as in metrics.jsonl, samples.jsonl and `raypipe status`: step N is the N-th optimizer step, so 1
is the first, and N steps are done after it. `MicroBatchId.step`, which counts from 0 in its epoch, is one less.
A run that was resumed has several starts. The one that holds for a step is the last that began before it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raypipe.errors import ConfigError
from raypipe.history.record_checks import damage_told, whole_number
from raypipe.history.recorded_stream import RecordedStream
from raypipe.metrics.records import RECORDS, Record, read_records
from raypipe.mistakes import choices
from raypipe.plan.places import PADDING, MicroBatchId
from raypipe.plan.schedule import Plan
from raypipe.storage.filesystem import as_uri, join_address
from raypipe.storage.lease import check_owner
from raypipe.streaming.bad_samples import BadSample
from raypipe.streaming.opening import open_stream
from raypipe.streaming.record.digest_log import place_in
from raypipe.streaming.record.opened import StreamRecord, sealed

_GIVEN = {*signature(open_stream).parameters, "augment"} - {"pool", "quarantine"}


class MicroBatchDraws(NamedTuple):
    """The samples of a micro-batch, arrays (B,).

    Attributes:
        place: the micro-batch.
        indices: int64, as the model saw them: with the substitutes of bad samples; PADDING = no sample.
        keys: uint64 (B, 2), the keys of their CPU transforms.
        weights: float32, 0 for padding, and for bad samples of a validation.
        bad: why a drawn sample could not be used, by its row.
    """

    place: MicroBatchId
    indices: np.ndarray
    keys: np.ndarray
    weights: np.ndarray
    bad: dict[int, str]


class Start(NamedTuple):
    """A start of a run: at its beginning, or where it was resumed.

    Attributes:
        step: steps that were done.
        workers: W.
        validates: whether it began with the validation of that step.
        stream: the stream as it was opened; starts with the same record have the same one.
        settings: the settings of the stream by their whole names, plain values.
        seal: the hash of what decides its batches, which the lines of its hashes have.
    """

    step: int
    workers: int
    validates: bool
    stream: RecordedStream
    settings: dict[str, Any]
    seal: str

    def has_place(self, place: MicroBatchId) -> bool:
        """Return whether its plan has a micro-batch of a place; a loop may validate in any epoch."""
        plan = self.stream.plan
        steps = plan.steps_per_epoch if place.split == "train" else plan.val_steps
        return (
            place.epoch < plan.config.epochs
            and place.step < steps
            and place.micro < plan.config.per_step
        )


def given_of(**values: Any) -> dict[str, Any]:
    """Return the arguments that options give instead of the recorded ones."""
    return {name: value for name, value in values.items() if value}


def _starts_in(
    records: list[Record],
    run_uri: str,
    trust_run_code: bool,
    given: dict[str, Any],
) -> list[Start]:
    """Read the starts of a run, in the order in which they happened; see `raypipe.replay`."""
    streams: dict[str, RecordedStream] = {}
    starts = []
    for record in records:
        described = record.get("stream")
        if record.get("kind") != "start" or described is None:
            continue
        with damage_told(join_address(run_uri, RECORDS)):
            # A resume may change settings, and most do not.
            text = json.dumps(described, sort_keys=True)
            if text not in streams:
                stream = StreamRecord(**described)
                streams[text] = RecordedStream(run_uri, stream, trust_run_code, given)
            workers = whole_number(record.get("workers", 1), "workers", 1)
            start = Start(
                whole_number(record["step"], "step"),
                workers,
                bool(record.get("validates")),
                streams[text],
                dict(record.get("settings", {})),
                sealed(described, workers),
            )
            starts.append(start)
    return starts


class RecordedRun:
    """A run by its folder.

    Args:
        run, trust_run_code, anyway, given: see `raypipe.replay`.

    Attributes:
        address: the run's folder.
        records: those of metrics.jsonl.
        starts: in the order in which they happened.
        stream: the stream of the newest start.
    """

    def __init__(
        self,
        run: str | Path,
        trust_run_code: bool = False,
        anyway: bool = False,
        **given: Any,
    ) -> None:
        self._anyway = anyway
        for name in given.keys() - _GIVEN:
            raise ConfigError(
                f"unknown argument {name!r}{choices(name, sorted(_GIVEN))}"
            )
        run_uri = as_uri(str(run).rstrip("/"))
        self.address = run_uri.removeprefix("file://")
        self.records = read_records(run_uri)
        check_owner(run_uri, trust_run_code)
        self.starts = _starts_in(self.records, run_uri, trust_run_code, given)
        if not self.starts:
            raise ConfigError(
                f"{self.address} does not exist, or has no start in its {RECORDS}: give the folder of a run that "
                "has begun to train, which it printed as run_dir, or which raypipe.loader got as run_dir"
            )
        self.stream = self.starts[-1].stream

    def __len__(self) -> int:
        """Return the number of optimizer steps of the whole run."""
        return self.plan.config.epochs * self.plan.steps_per_epoch

    @property
    def differences(self) -> list[str]:
        """Sentences that say what has changed since the run, and since its earlier starts; empty = nothing."""
        sentences = list(self.stream.differences)
        for start in self.starts:
            sentences += start.stream.changed_code
        return list(dict.fromkeys(sentences))

    @property
    def losses(self) -> dict[int, float]:
        """The loss of each step whose record has one."""
        return {
            record["step"]: record["loss"]
            for record in self.records
            if record.get("kind") == "train" and "loss" in record
        }

    @property
    def plan(self) -> Plan:
        """The plan of the newest start, see `RecordedStream.plan`."""
        return self.stream.plan

    def start_of(self, step: int) -> Start:
        """Return the start that holds for a step."""
        return self.start_at(MicroBatchId("train", 0, step - 1, 0))

    def start_at(
        self, place: MicroBatchId, starts: Sequence[Start] | None = None
    ) -> Start:
        """Return the start that holds for a micro-batch.

        Args:
            starts: those that may have made it, in order; None = all.
        """
        starts = starts or self.starts
        step = self.step_of(place)
        for start in reversed(starts):
            is_at_end = place.split == "val" and start.validates and start.step == step
            if start.step < step or is_at_end:
                return start
        return starts[0]

    def has_val(self, epoch: int) -> bool:
        """Return whether a validation follows an epoch: each start may have others."""
        start = self.start_at(MicroBatchId("val", epoch, 0, 0))
        return start.stream.plan.has_val(epoch)

    def step_of(self, place: MicroBatchId) -> int:
        """Return the step of a micro-batch; for a validation, the step before it."""
        return int(self.plan.global_step(place)) + (place.split == "train")

    def rank_of(self, place: MicroBatchId) -> int:
        """Return the rank that got a micro-batch."""
        return place.micro % self.start_at(place).workers

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
        if not 1 <= step <= len(self):
            raise ConfigError(
                f"{self.address} has the steps 1 to {len(self):,}, counted as in metrics.jsonl, and no step "
                f"{step:,}"
            )
        if self.is_skipped(step):
            raise ConfigError(
                f"step {step:,} was left out by plan.skip, so the model saw nothing of it"
            )
        epoch, in_epoch = divmod(step - 1, self.plan.steps_per_epoch)
        workers = self.start_of(step).workers
        per_step = self.plan.config.per_step
        numbers = [
            number
            for number in range(per_step)
            if rank in (None, number % workers) and micro in (None, number)
        ]
        if not numbers:
            raise ConfigError(
                f"step {step} had the micro-batches 0 to {per_step - 1}, number m on rank m mod {workers}: "
                f"rank {rank} had no number {micro} (None = any)"
            )
        return [MicroBatchId("train", epoch, in_epoch, number) for number in numbers]

    def is_skipped(self, step: int) -> bool:
        """Return whether `plan.skip` left out a step."""
        return self.start_of(step).stream.plan.skipped.has(step - 1)

    def place_of(self, name: str) -> MicroBatchId:
        """Return the place of a name such as train-e0000-s000012-m000, as errors and quarantine/ have it.

        Raises:
            ConfigError: it is not such a name, or the run has no such micro-batch.
        """
        place = place_in(name)
        if place is None:
            raise ConfigError(
                f"{name!r} does not name a micro-batch, as in train-e0000-s000012-m000"
            )
        if not any(start.has_place(place) for start in reversed(self.starts)):
            plan = self.plan
            raise ConfigError(
                f"{self.address} has no micro-batch {place}: it has {plan.config.epochs:,} epochs of "
                f"{plan.steps_per_epoch:,} steps of {plan.config.per_step} micro-batches each, and validations of "
                f"{plan.val_steps:,} steps"
            )
        return place

    def draws(
        self, place: MicroBatchId, bad: Sequence[BadSample] | None = None
    ) -> MicroBatchDraws:
        """Return the samples of a micro-batch: the plan's, and the substitutes of bad ones.

        Args:
            bad: its bad samples; None = those that quarantine/ has.
        """
        stream = self.start_at(place).stream
        plan = stream.plan
        drawn = plan.draw(place)
        keys = plan.sample_keys(place.split, drawn)
        weights = (drawn.indices != PADDING).astype(np.float32)
        indices = drawn.indices.copy()
        reasons: dict[int, str] = {}
        for sample in stream.bad_samples(place) if bad is None else bad:
            for row in np.flatnonzero(drawn.indices == sample.index).tolist():
                reasons[row] = str(sample.error)
                if sample.substitute is None:
                    weights[row] = 0
                    continue
                indices[row] = sample.substitute
                of_row = drawn.at(slice(row, row + 1))
                keys[row] = plan.substitute_keys(
                    place.split, of_row, sample.substitute
                )[0]
        return MicroBatchDraws(place, indices, keys, weights, reasons)
