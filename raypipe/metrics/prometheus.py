"""What a run exports as metrics for Prometheus: every name, its labels and meaning, and who records it.

    TrainerMetrics   each rank: what it was given, where its time goes, how it learns
    StreamMetrics    the process in which Ray Data schedules: the pool, and what is in flight
    Recorder         each transform actor: what it has done; the supervisor: what went wrong

Ray collects them from every process and serves them on every node, under these names with `ray_` before them; see
docs/metrics.md. A recording takes some 10 µs, so it is made once for a micro-batch in an actor, and once a second
elsewhere. Ray drops a gauge that was not set for two of its export intervals, of 10 s: what is set once a second
lasts as long as somebody sets it, and a run that has died shows no loss.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ray.util.metrics import Counter, Gauge

from raypipe.logs import STAGES

if TYPE_CHECKING:
    from raypipe.metrics.timing import StageTimes
    from raypipe.plan.places import Split

_PERIOD_S = 1.0


class Metric(NamedTuple):
    """One metric. Counters, and they alone, end in _total; Ray adds labels of its own."""

    name: str
    labels: tuple[str, ...]
    meaning: str

    @property
    def kind(self) -> str:
        """Of Prometheus: counter or gauge."""
        return "counter" if self.name.endswith("_total") else "gauge"


_RUN, _SPLIT, _RANK = ("run",), ("run", "split"), ("run", "rank")
_RANK_SPLIT = (*_RANK, "split")
_ALL = (
    Metric("raypipe_trainer_images_total", _RANK_SPLIT, "Images that a rank was given, without padding."),
    Metric("raypipe_trainer_wait_seconds_total", _RANK_SPLIT, "Waiting for data, without the first batch."),
    Metric("raypipe_trainer_transfer_seconds_total", _RANK_SPLIT, "Copies to the device, beside other work."),
    Metric("raypipe_trainer_decode_seconds_total", _RANK_SPLIT, "Decoding on the device, beside other work."),
    Metric("raypipe_trainer_augment_seconds_total", _RANK_SPLIT, "Device augmentation."),
    Metric("raypipe_trainer_compute_seconds_total", _RANK_SPLIT, "Forward, backward and optimizer."),
    Metric("raypipe_trainer_checkpoint_seconds_total", _RANK_SPLIT, "Waiting for checkpoints."),
    Metric("raypipe_trainer_micro_batches_total", _RANK_SPLIT, "Micro-batches that a rank asked for."),
    Metric("raypipe_trainer_drained_total", _RANK_SPLIT, "Those before which the GPU had finished its work."),
    Metric("raypipe_trainer_steps_total", _RANK, "Training steps that a rank has done since its start."),
    Metric("raypipe_trainer_first_batch_seconds", _RANK, "From the start of a loader to its first batch."),
    Metric("raypipe_trainer_step", _RUN, "Training steps done, through all epochs."),
    Metric("raypipe_trainer_epoch", _RUN, "The epoch that the run is in, from 0."),
    Metric("raypipe_trainer_augment_strength", _RUN, "Strength of the augmentation, in [0, 1]."),
    Metric("raypipe_trainer_loss", _RUN, "Mean loss over all ranks, between lines of progress."),
    Metric("raypipe_trainer_learning_rate", _RUN, "Learning rate."),
    Metric("raypipe_validation_loss", _RUN, "Loss of the last validation."),
    Metric("raypipe_validation_accuracy", _RUN, "Accuracy of the last validation, in [0, 1]."),
    Metric("raypipe_stream_blocks_total", _RUN, "Blocks that the pool has finished."),
    Metric("raypipe_stream_in_flight", _RUN, "Blocks in work, or finished and not yet taken."),
    Metric("raypipe_stream_waiting", _RUN, "Finished blocks that no rank has taken yet."),
    Metric("raypipe_stream_actors", (*_RUN, "state"), "Transform actors: running, restarting, pending."),
    Metric("raypipe_stream_faults_total", (*_RUN, "kind"), "Faults that were recovered from."),
    Metric("raypipe_actor_micro_batches_total", _SPLIT, "Micro-batches that actors have made, repeats included."),
    Metric("raypipe_actor_read_seconds_total", _SPLIT, "Actors' time for reading the store."),
    Metric("raypipe_actor_work_seconds_total", _SPLIT, "Actors' time for reading, decoding, transforming."),
    Metric("raypipe_cache_hits_total", _SPLIT, "Samples that an actor found decoded in its node's cache."),
    Metric("raypipe_cache_misses_total", _SPLIT, "Samples that it did not find there, if there is a cache."),
    Metric("raypipe_bad_samples_total", _SPLIT, "Samples that could not be decoded or transformed."),
    Metric("raypipe_substituted_samples_total", _SPLIT, "Bad samples that were replaced by others."),
)
METRICS = {metric.name: metric for metric in _ALL}
"""By name. A label has few values: runs, ranks, splits, and what this module names."""


@functools.cache
def _instrument(name: str) -> Any:
    """Ray's own object, one in a process."""
    metric = METRICS[name]
    make = Counter if metric.kind == "counter" else Gauge
    return make(name, metric.meaning, metric.labels)


class Recorder:
    """Records metrics of a run, by their names without raypipe_, under labels that partly do not change."""

    def __init__(self, run: str, **labels: str) -> None:
        self._labels = {"run": run, **labels}
        self._totals: dict[tuple[str, ...], float] = {}

    def _tags(self, name: str, labels: Mapping[str, str]) -> dict[str, str]:
        values = {**self._labels, **labels}
        return {label: values[label] for label in METRICS[name].labels}

    def add(self, amounts: Mapping[str, float], **labels: str) -> None:
        """Count up; by nothing, if there is nothing to count."""
        for name, amount in amounts.items():
            if amount > 0:
                _instrument(f"raypipe_{name}").inc(amount, self._tags(f"raypipe_{name}", labels))

    def reach(self, totals: Mapping[str, float], **labels: str) -> None:
        """Count up to running totals of the caller's, which start at 0."""
        for name, total in totals.items():
            key = (name, *labels.values())
            before = self._totals.get(key, 0.0)
            self.add({name: total - before}, **labels)
            self._totals[key] = max(total, before)

    def set(self, values: Mapping[str, float], **labels: str) -> None:
        """Set gauges."""
        for name, value in values.items():
            _instrument(f"raypipe_{name}").set(value, self._tags(f"raypipe_{name}", labels))


class TrainerMetrics(Recorder):
    """Of one rank; rank 0 alone tells what is the same for all."""

    def __init__(self, run: str, rank: int) -> None:
        super().__init__(run, rank=str(rank))
        self._rank = rank
        self._learnt: dict[str, float] = {}
        self._recorded_at = 0.0

    def is_due(self) -> bool:
        """Whether a second has passed since `record`."""
        return time.monotonic() - self._recorded_at >= _PERIOD_S

    def learnt(self, **values: float) -> None:
        """What to show from now on: trainer_loss, validation_accuracy, …"""
        self._learnt |= values

    def record(
        self, times: Mapping[Split, StageTimes], *, first_batch_s: float, steps: int, **of_run: float
    ) -> None:
        """Record where this rank stands.

        Args:
            times: of each split, since the rank started.
            first_batch_s: from the start of the loader to its first batch.
            steps: since the rank started.
            of_run: what is the same for all ranks, as of `learnt`.
        """
        self._recorded_at = time.monotonic()
        for split, of in times.items():
            seconds = {f"trainer_{stage}_seconds_total": getattr(of, f"{stage}_s") for stage in STAGES}
            counts = {
                f"trainer_{name}_total": getattr(of, name) for name in ("images", "micro_batches", "drained")
            }
            self.reach(seconds | counts, split=split)
        self.reach({"trainer_steps_total": steps})
        self.set({"trainer_first_batch_seconds": first_batch_s})
        if self._rank == 0:
            self.set(of_run | self._learnt)


class StreamMetrics(Recorder):
    """Of one execution of a stream."""

    def show(self, made: int, in_flight: int = 0, waiting: int = 0, actors: Any = None) -> None:
        """Show where it stands.

        Args:
            made: blocks that its pool has finished, so far.
            in_flight: blocks that are worked on, or wait finished.
            waiting: of these, those that wait finished.
            actors: has their number by state: running, restarting, pending; None = there are none.
        """
        self.reach({"stream_blocks_total": made})
        self.set({"stream_in_flight": in_flight, "stream_waiting": waiting})
        for state in ("running", "restarting", "pending"):
            self.set({"stream_actors": getattr(actors, state, 0)}, state=state)
