"""The metrics that a run exports for Prometheus: every name, its labels and meaning, and who records it.

    TrainerMetrics   each rank: its batches, where its time goes, how it learns
    StreamMetrics    the process in which Ray Data schedules: the pool, and what is in flight
    Recorder         each transform actor: its work; the supervisor: faults

Ray collects them from every process and serves them on every node, under these names with `ray_` before them; see
docs/reference.md. A recording takes about 10 µs, so it is made once for a micro-batch in an actor, and once a
second elsewhere. Ray drops a gauge that was not set for two of its export intervals, of 10 s: a value set once a
second lasts while its process lives, so a dead run shows no loss. A thread sets a trainer's gauges, since the
trainer itself may wait for long.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ray.util.metrics import Counter, Gauge

from raypipe.background import Repeating
from raypipe.metrics.observer import Observer
from raypipe.storage.retries import take_counts

if TYPE_CHECKING:
    from raypipe.metrics.timing import StageTimes
    from raypipe.plan.places import Split

STAGES = ("wait", "transfer", "decode", "augment", "compute", "checkpoint")
"""Stages of a trainer's time: NAME_s in progress, records, `StageTimes` and exported metrics."""

_PERIOD_S = 1.0


class Metric(NamedTuple):
    """A metric; Ray adds its own labels."""

    labels: tuple[str, ...]
    meaning: str


_RUN = ("run",)
_SPLIT = ("run", "split")
_RANK = ("run", "rank")
_BY_LABELS = {
    _RUN: {
        "raypipe_trainer_last_checkpoint_timestamp_seconds": "When the last one was written, or the run began.",
        "raypipe_trainer_room_wait_seconds": "How long trainers have found no free resources.",
        "raypipe_trainer_step": "Training steps done, through all epochs.",
        "raypipe_trainer_epoch": "The epoch that the run is in, from 0.",
        "raypipe_trainer_augment_strength": "Strength of the augmentation, in [0, 1].",
        "raypipe_trainer_loss": "Mean loss over all ranks, between lines of progress.",
        "raypipe_trainer_learning_rate": "Learning rate.",
        "raypipe_validation_loss": "Loss of the last validation.",
        "raypipe_validation_accuracy": "Accuracy of the last validation, in [0, 1].",
        "raypipe_stream_blocks_total": "Blocks that the pool has finished.",
        "raypipe_stream_in_flight": "Blocks in work, or finished and not yet taken.",
        "raypipe_stream_waiting": "Finished blocks that no rank has taken yet.",
    },
    _RANK: {
        "raypipe_trainer_gpu_utilization": "Share of the time for which the GPU executes kernels.",
        "raypipe_trainer_steps_total": "Training steps that a rank has done since its start.",
        "raypipe_trainer_first_batch_seconds": "From the start of a loader to its first batch.",
        "raypipe_trainer_last_batch_timestamp_seconds": "When a rank got its last micro-batch, or began to wait.",
    },
    (*_RANK, "split"): {
        "raypipe_trainer_images_total": "Images that a rank was given, without padding.",
        "raypipe_trainer_wait_seconds_total": "Waiting for data, without the first batch.",
        "raypipe_trainer_transfer_seconds_total": "Copies to the device, beside other work.",
        "raypipe_trainer_decode_seconds_total": "Decoding on the device, while other work runs.",
        "raypipe_trainer_augment_seconds_total": "Device augmentation.",
        "raypipe_trainer_compute_seconds_total": "Forward, backward and optimizer.",
        "raypipe_trainer_checkpoint_seconds_total": "Waiting for checkpoints.",
        "raypipe_trainer_micro_batches_total": "Micro-batches that a rank asked for.",
        "raypipe_trainer_drained_total": "Those before which the GPU had finished its work.",
    },
    (*_RUN, "reason"): {
        "raypipe_trainer_restarts_total": "How often all trainers were started again.",
    },
    (*_RUN, "version", "plan", "workers"): {
        "raypipe_run_info": "1; what the run is, by its labels.",
    },
    (*_RUN, "state"): {
        "raypipe_stream_actors": "Transform actors: running, restarting, pending.",
    },
    (*_RUN, "kind"): {
        "raypipe_stream_faults_total": "Faults that were recovered from.",
    },
    _SPLIT: {
        "raypipe_actor_micro_batches_total": "Micro-batches that actors have made, repeats included.",
        "raypipe_actor_remembered_total": "Micro-batches that actors did not have to make again.",
        "raypipe_actor_read_seconds_total": "Reading the store, in actors or in readers.",
        "raypipe_actor_work_seconds_total": "Actors' time for reading, decoding, transforming.",
        "raypipe_bad_samples_total": "Samples that could not be decoded or transformed.",
        "raypipe_substituted_samples_total": "Bad samples that were replaced by others.",
    },
    (*_RUN, "role", "operation"): {
        "raypipe_storage_requests_total": "What was asked of object storage, repeats not counted.",
        "raypipe_storage_seconds_total": "Time for it, the waiting in outages included.",
        "raypipe_storage_bytes_total": "Bytes read and written, without whole files uploaded.",
        "raypipe_storage_retries_total": "Repeats after failures that pass, beside pyarrow's own.",
        "raypipe_storage_errors_total": "Requests that have failed in the end.",
    },
}
METRICS = {
    name: Metric(labels, meaning)
    for labels, meanings in _BY_LABELS.items()
    for name, meaning in meanings.items()
}
"""By name; those that end in _total are counters, others gauges. A label has few values: runs, ranks, splits, and
what this module names."""

_GAUGES = {
    ("train", "loss"): "trainer_loss",
    ("train", "lr"): "trainer_learning_rate",
    ("val", "loss"): "validation_loss",
    ("val", "accuracy"): "validation_accuracy",
}
"""Gauges of what a loop records, by the record's kind and the value's name."""


@functools.cache
def _instrument(name: str) -> Any:
    """Ray's own object, one in a process."""
    metric = METRICS[name]
    make = Counter if name.endswith("_total") else Gauge
    return make(name, metric.meaning, metric.labels)


class Recorder:
    """Records metrics of a run, by their names without raypipe_, under labels that partly do not change."""

    def __init__(self, run: str, **labels: str) -> None:
        self._labels = {"run": run, **labels}
        self._totals: dict[tuple[str, ...], float] = {}

    def _instrument(
        self, name: str, labels: Mapping[str, str]
    ) -> tuple[Any, dict[str, str]]:
        """Ray's own object for a metric, and its labels with their values."""
        whole = f"raypipe_{name}"
        values = {**self._labels, **labels}
        tags = {label: values[label] for label in METRICS[whole].labels}
        return _instrument(whole), tags

    def add(self, amounts: Mapping[str, float], **labels: str) -> None:
        """Count up; by nothing, if there is nothing to count."""
        for name, amount in amounts.items():
            if amount > 0:
                counter, tags = self._instrument(name, labels)
                counter.inc(amount, tags)

    def reach(self, totals: Mapping[str, float], **labels: str) -> None:
        """Count up to running totals of the caller's, which start at 0."""
        for name, total in totals.items():
            key = (name, *labels.values())
            before = self._totals.get(key, 0.0)
            self.add({name: total - before}, **labels)
            self._totals[key] = max(total, before)

    def add_storage(self, role: str) -> None:
        """Count what this process has asked of object storage since it was last counted."""
        for operation, amounts in take_counts().items():
            named = {
                f"storage_{name}_total": amount for name, amount in amounts.items()
            }
            self.add(named, role=role, operation=operation)

    def set(self, values: Mapping[str, float], **labels: str) -> None:
        """Set gauges."""
        for name, value in values.items():
            gauge, tags = self._instrument(name, labels)
            gauge.set(value, tags)


class TrainerMetrics(Recorder, Observer):
    """Metrics of one rank; only rank 0 has those of the whole run.

    While a stream is open, a thread sets the gauges once a second, so that they last while the rank waits.

    Args:
        sample: asks for the utilization of the rank's device, once a second; None = it is not known.
        info: labels of `raypipe_run_info`.
    """

    def __init__(
        self,
        run: str,
        rank: int,
        sample: Callable[[], float | None] = lambda: None,
        **info: str,
    ) -> None:
        super().__init__(run, rank=str(rank), **info)
        self._sample = sample
        self._rank = rank
        self._gauges: dict[str, float] = {"run_info": 1} if info and rank == 0 else {}
        self._recorded_at = 0.0
        self._keeping: Repeating | None = None

    def opened(self, supervisor: Any) -> None:
        self.ended()
        self._gauges |= {"trainer_last_batch_timestamp_seconds": time.time()}
        self._keeping = Repeating(self._keep, _PERIOD_S, "raypipe-metrics")
        self._keeping.start()

    def _keep(self) -> None:
        self.sample()
        self.set(self._gauges)

    def ended(self) -> None:
        if self._keeping:
            self._keeping.left.set()
            self._keeping = None
            self.set(self._gauges)

    def sample(self) -> None:
        """Ask for the utilization of the device, and show it."""
        if (share := self._sample()) is not None:
            self._gauges = self._gauges | {"trainer_gpu_utilization": share}

    def is_due(self) -> bool:
        """Return whether a second has passed since `record`."""
        return time.monotonic() - self._recorded_at >= _PERIOD_S

    def recorded(self, kind: str, line: str, values: Mapping[str, Any]) -> None:
        if kind == "fault":  # others are counted where they are seen
            self.add({"stream_faults_total": 1}, kind="notice")
        self._show(
            {
                _GAUGES[kind, name]: value
                for name, value in values.items()
                if (kind, name) in _GAUGES
            }
        )

    def checkpointed(self) -> None:
        self._show({"trainer_last_checkpoint_timestamp_seconds": time.time()})

    def _show(self, values: Mapping[str, float]) -> None:
        """Show these gauges of the run from now on, on rank 0."""
        if self._rank == 0:
            # a new dict: the thread may be reading the old one
            self._gauges = self._gauges | dict(values)

    def record(
        self,
        times: Mapping[Split, StageTimes],
        *,
        first_batch_s: float,
        steps: int,
        **of_run: float,
    ) -> None:
        """Record where this rank stands, which has just got a micro-batch.

        Args:
            times: of each split, since the rank started.
            first_batch_s: from the start of the loader to its first batch.
            steps: since the rank started.
            of_run: gauges of the whole run, which only rank 0 shows.
        """
        self._recorded_at = time.monotonic()
        self.add_storage("trainer")
        for split, of_split in times.items():
            seconds = {
                f"trainer_{stage}_seconds_total": getattr(of_split, f"{stage}_s")
                for stage in STAGES
            }
            counts = {
                f"trainer_{name}_total": getattr(of_split, name)
                for name in ("images", "micro_batches", "drained")
            }
            self.reach(seconds | counts, split=split)
        self.reach({"trainer_steps_total": steps})
        of_rank = {
            "trainer_first_batch_seconds": first_batch_s,
            "trainer_last_batch_timestamp_seconds": time.time(),
        }
        self._gauges = self._gauges | of_rank
        self._show(of_run)


class StreamMetrics(Recorder):
    """Metrics of one execution of a stream."""

    def show(
        self, finished: int, in_flight: int = 0, waiting: int = 0, actors: Any = None
    ) -> None:
        """Show where it stands.

        Args:
            finished: blocks that its pool has finished, so far.
            in_flight: blocks that are worked on, or wait finished.
            waiting: the finished ones among these.
            actors: has their number by state: running, restarting, pending; None = there are none.
        """
        self.reach({"stream_blocks_total": finished})
        self.set({"stream_in_flight": in_flight, "stream_waiting": waiting})
        for state in ("running", "restarting", "pending"):
            self.set({"stream_actors": getattr(actors, state, 0)}, state=state)
