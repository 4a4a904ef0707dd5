"""Times of a run's stages, and advice on the slowest of them.

    mark → StageClock, which never waits for the device → StageTimes of a rank → diagnose: sentences

On CUDA `wait` is the time for which the compute stream had nothing to do because the next micro-batch was not
there: from the end of the last one's work to the arrival of the next. The host's work meanwhile does not count.

A device that is faster than the host which gives it work also has nothing to do now and then, between one launch
and the next. No mark shows that, since marks are launched as well: such time counts as augment and compute. What
shows it is a device that has finished its work when the next micro-batch is asked for, see `has_drained`.

So does the GPU's utilization: the share of the time for which it executes kernels, as NVML counts it. torch asks
NVML through the package `nvidia-ml-py`, the extra `gpu`. Without it, on a CPU, and where a device does not count
(a part of one, by MIG), there is no utilization, and all that shows it leaves it out.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from raypipe.metrics.observer import Cause, Observer

if TYPE_CHECKING:
    from raypipe.plan.places import MicroBatchId, Split

logger = logging.getLogger(__name__)


def mark(device: torch.device) -> Any:
    """Return a mark of this moment: a recorded torch.cuda.Event of the current stream, or time.perf_counter()."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def has_drained(asked: Any) -> bool:
    """Return whether the device has passed a mark already, without waiting for it; False on a CPU.

    Called when the next micro-batch is there, on a mark that was made when it was asked for. The host takes
    about 50 µs in between, in which an idle device passes the mark. A device at work does not: a micro-batch takes
    milliseconds.
    """
    return not isinstance(asked, float) and bool(asked.query())


@dataclass(frozen=True)
class StageTimes:
    """Sums over a stretch of training, which add up by `+`.

    Attributes:
        images: delivered.
        wait_s: the device had nothing to do.
        transfer_s: copies from host to device; they overlap with the other stages.
        decode_s: with transform.decode "device", decoding and resizing; it overlaps with the other stages, too.
        augment_s: device augmentation.
        compute_s: forward, backward, optimizer.
        read_s: in the actors, reading encoded samples, or in the readers before them.
        work_s: in the actors, all of a micro-batch: reading, if they read, decoding, transforming.
        micro_batches: delivered, but for the very first.
        drained: on CUDA, those before which the device had finished all its work when they were asked for.
        checkpoint_s: the device had nothing to do because of a checkpoint.
        outage_s: part of the actors' reading, waiting for object storage that did not answer.
        remembered: images among them that were made before, and not again.
        utilization_sum: sum of the samples of the device's utilization, each in [0, 1].
        utilization_samples: their number: one a second, where NVML counts it.
    """

    images: int = 0
    wait_s: float = 0.0
    transfer_s: float = 0.0
    augment_s: float = 0.0
    compute_s: float = 0.0
    read_s: float = 0.0
    work_s: float = 0.0
    micro_batches: int = 0
    drained: int = 0
    checkpoint_s: float = 0.0
    outage_s: float = 0.0
    decode_s: float = 0.0
    remembered: int = 0
    utilization_sum: float = 0.0
    utilization_samples: int = 0

    def __add__(self, times: StageTimes) -> StageTimes:
        return self._with(times, 1)

    def __sub__(self, times: StageTimes) -> StageTimes:
        return self._with(times, -1)

    def _with(self, times: StageTimes, sign: int) -> StageTimes:
        sums = {
            name: amount + sign * getattr(times, name)
            for name, amount in vars(self).items()
        }
        return StageTimes(**sums)

    @property
    def step_s(self) -> float:
        """Time of the training process: wait, augment, compute and checkpoint follow each other."""
        return self.wait_s + self.augment_s + self.compute_s + self.checkpoint_s

    @property
    def busy_s(self) -> float:
        """Time in which the device had work of the training: augment and compute."""
        return self.augment_s + self.compute_s

    @property
    def wait_fraction(self) -> float:
        """Share of the training time that was spent waiting for the stream."""
        return _share(self.wait_s, self.step_s)

    @property
    def remembered_fraction(self) -> float:
        """Share of the images that were made before, by this stream or by another one."""
        return _share(self.remembered, self.images)

    @property
    def checkpoint_fraction(self) -> float:
        """Share of the training time that was spent on checkpoints."""
        return _share(self.checkpoint_s, self.step_s)

    @property
    def drained_fraction(self) -> float:
        """Share of the micro-batches for which the device had finished its work when they were asked for."""
        return _share(self.drained, self.micro_batches)

    @property
    def gpu_utilization(self) -> float | None:
        """Share of the time for which the device executed kernels; None = not known."""
        if not self.utilization_samples:
            return None
        return self.utilization_sum / self.utilization_samples


def _share(part: float, whole: float) -> float:
    """Return a part's share of the whole; 0 of nothing."""
    return part / whole if whole else 0.0


OnStage = Callable[[str, Any, Any, "MicroBatchId | None"], None]
"""Is told of a stage of one micro-batch: its name, and its two marks."""


def _not_traced(
    stage: str, start: Any, end: Any, position: MicroBatchId | None
) -> None:
    pass


class StageClock(Observer):
    """Sums over a run, by split. Marks on CUDA are read when the device has passed them, so the newest may be
    missing.

    Args:
        device: the device whose time is measured.

    Attributes:
        first_batch_s: seconds from the start of the stream to its first batch; 0 before it.
        gpu_utilization: the last sample, in [0, 1]; None = there is none.
        on_stage: called with each stage, its two marks, and its micro-batch, if it is one's; on CUDA once the
            device has passed them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: deque[tuple[Split, str, Any, Any, MicroBatchId | None]] = deque()
        # Sums by their names: a micro-batch adds to them five times.
        self._sums: dict[Split, dict[str, Any]] = {"train": {}, "val": {}}
        self._asked: Any = None  # the mark of the last request
        self._arrived: Any = None  # the mark of its batch
        # the batch that is computed, and the mark of its beginning
        self._computing: tuple[MicroBatchId, Any] | None = None
        # The batch whose compute a checkpoint interrupts.
        self._suspended: MicroBatchId | None = None
        self.on_stage: OnStage = _not_traced
        self.gpu_utilization: float | None = None
        self._is_utilization_known = device.type == "cuda"
        self._split: Split = "train"
        self.begin()

    def begin(self) -> None:
        """The wait for the first batch begins."""
        self._created = time.perf_counter()
        self.first_batch_s = 0.0

    def add(
        self,
        split: Split,
        stage: str,
        start: Any,
        end: Any,
        position: MicroBatchId | None = None,
    ) -> None:
        """Count the time between two marks. May be called from any thread."""
        self._pending.append((split, stage, start, end, position))
        if isinstance(end, float):
            self.on_stage(stage, start, end, position)

    def count(self, split: Split, **amounts: Any) -> None:
        """Add to sums, by their names."""
        sums = self._sums[split]
        for name, amount in amounts.items():
            sums[name] = sums.get(name, 0) + amount

    def times(self, split: Split) -> StageTimes:
        """The sums so far."""
        for _ in range(len(self._pending)):
            pending = self._pending.popleft()
            of_split, stage, start, end, position = pending
            if isinstance(end, float):
                seconds = end - start
            elif end.query():
                seconds = start.elapsed_time(end) / 1000
                self.on_stage(stage, start, end, position)
            else:
                self._pending.append(pending)
                continue
            self.count(of_split, **{f"{stage}_s": seconds})
        return StageTimes(**self._sums[split])

    def sample(self) -> float | None:
        """Ask for the device's utilization now, and count it; None where nobody knows it. Takes below 1 ms.

        A thread calls it about once a second.
        """
        if not self._is_utilization_known:
            return None
        try:
            percent = torch.cuda.utilization(self._device)
        except Exception as error:
            # no package, no permission, or a device that does not count
            self._is_utilization_known = False
            logger.debug("the utilization is not known: %r", error)
            return None
        share = min(100, max(0, percent)) / 100
        self.count(self._split, utilization_sum=share, utilization_samples=1)
        self.gpu_utilization = share
        return share

    def asked(self, split: Split, name: str, cause: Cause) -> None:
        self._split = split
        self._end_compute()

    def arrived(self, split: Split) -> None:
        drained = has_drained(self._asked)
        self._arrived = mark(self._device)
        if self.first_batch_s:
            self.add(split, "wait", self._asked, self._arrived)
            self.count(split, micro_batches=1, drained=drained)
        else:  # the start of the run is reported apart
            now = self._arrived
            if not isinstance(now, float):
                now = time.perf_counter()
            self.first_batch_s = now - self._created
            self.on_stage("first batch", self._created, now, None)

    def handed_out(self, position: MicroBatchId, amounts: Mapping[str, Any]) -> None:
        self.count(position.split, **amounts)
        now = mark(self._device)
        self.add(position.split, "augment", self._arrived, now)
        self._computing = position, now

    def saving(self, cause: Cause) -> None:
        self._suspended = self._computing[0] if self._computing else None
        self._end_compute()

    def saved(self) -> None:
        now = mark(self._device)
        self.add("train", "checkpoint", self._asked, now)
        if self._suspended:
            self._computing = self._suspended, now

    def ended(self) -> None:
        self.times(self._split)

    def _end_compute(self) -> None:
        """The loop has launched the work of the last batch, and waits for something."""
        self._asked = mark(self._device)
        if self._computing:
            position, since = self._computing
            self.add(position.split, "compute", since, self._asked, position)
            self._computing = None


# The pool at most doubles every pool.grow_after_s (5 s), and blocks find their size meanwhile. So what limits a
# run of less than a minute may be gone a moment later.
_SETTLED_S = 60.0
# Below this share of waiting a run is not limited by its input; the rest is jitter.
_WAIT_IS_NOTHING = 0.10
# A host that is ahead finds the device at work nearly always; one that is behind, nearly never.
_DRAINED_IS_BEHIND = 0.5
# A GPU that is fed and well used executes kernels for over 0.9 of the time; a launch-bound one, for half of it.
_UTILIZATION_IS_LOW = 0.7
# Below this share of the time checkpoints are not worth a sentence.
_CHECKPOINTS_ARE_NOTHING = 0.05
# Above this share of an actor's time outages of storage are the cause, and not the store's kind or place.
_OUTAGES_LIMIT = 0.25
# Finished blocks that lie ready for this share of the time are made fast enough; they arrive late.
_READY_IS_MADE = 0.5
# A reader that reads for more of the time than this has no more to give.
_READS_ALWAYS = 0.7
# Actors to spare, so that a slow micro-batch does not show.
_HEADROOM = 1.15


@dataclass(frozen=True)
class Situation:
    """Circumstances of a rank's times.

    Attributes:
        world_size: W.
        actors: transform actors that the pool has at most; 0 = the trainers make the stream themselves.
        device: type of the training device.
        readers: that read the store at one time; 0 = the actors do.
        ready: share of the time for which a rank had a finished block to take.
        spilled_bytes: that the cluster's object store has written to disk since the cluster began.
        is_run: whether `raypipe train` trains, which has settings for what a loop of one's own decides itself.
    """

    world_size: int
    actors: int
    device: str = "cpu"
    readers: int = 0
    ready: float = 0.0
    spilled_bytes: int = 0
    is_run: bool = True

    @property
    def name(self) -> str:
        """The training device, in words."""
        return "GPU" if self.device == "cuda" else "trainer"


_SPEED = (
    "{images_per_s:,.0f} images/s; the time of a {name} is {wait:.0%} wait, {augment:.0%} augment, "
    "{compute:.0%} compute"
)
_SAVING = ", {checkpoint:.0%} checkpoint"
_USED = "; it executes kernels for {used:.0%} of it"
_SHORT = "After its first batch the run took {step_s:.0f} s, too short to say what limits it."
_CHECKPOINTS = "Checkpoints hold up the run for {checkpoint:.0%} of its time: {cheaper_checkpoints}."
_AUGMENTATION = (
    "The device augmentation limits the run: choose a lighter augment.preset, or move operations to the CPU "
    "transform."
)
_MODEL = "The model limits the run: the stream keeps up."
_LAUNCHES = (
    "The host limits the run, not the model: the {name} had finished its work before {drained:.0%} of the "
    "micro-batches were asked for. "
)
_GAPS = (
    "Neither the input nor the speed of the {name} limits the run: {wait:.0%} of its time goes by waiting for "
    "data, and it executes kernels for {used:.0%}. Its kernels are too short for the host to launch in time, or "
    "the model waits for the host. "
)
_FEWER_LAUNCHES = (
    "Let nothing in the loop wait for the {name} (loss.item(), print of a tensor); then {lighter}give each launch "
    "more to do (a larger plan.micro_batch_size), or launch less ({compiled}, or a step captured as a CUDA graph, "
    "docs/performance.md)."
)
_POOL = "{enough} {actor_noun} would be enough, {share}; {pool}."
_WAITING = "{cause}, {wait:.0%} of the {name}'s time goes by waiting: {advice}."
# What limits a run that waits for its input, and what to do about it.
_INPUT = {
    "outages": (
        "Outages of object storage limit the run, with {outage:.0%} of {reading_time}",
        "look at its status and its limits of requests, or keep the store on the nodes (RAYPIPE_CACHE)",
    ),
    "copy": (
        "The copy to the device limits the run",
        "send fewer bytes (a smaller transform.size), or have fewer ranks per host",
    ),
    "decoding": (
        "Decoding on the {name} limits the run",
        "convert the store with --short-side, or set transform.decode=cpu in a new run",
    ),
    "no actors": (
        "The {name} makes its micro-batches itself, which limits the run",
        "set pool.engine=ray, so that actors make them, or raise pool.max_actors",
    ),
    "reader": (
        "Reading the store limits the run: its reader reads for {reads:.0%} of the time",
        "convert the store to LMDB, which the actors read, or keep it on a local disk",
    ),
    "object store": (
        "The object store is full, and Ray has written {spilled_gb:.1f} GB to disk: blocks are finished in time, "
        "and come back late",
        "give the nodes more of it (ray start --object-store-memory), or lower pool.max_in_flight",
    ),
    "network": (
        "The network to the trainers limits the run: a finished block lay ready for {ready:.0%} of the time",
        "send fewer bytes (transform.decode=device, a smaller transform.size), run actors on the trainers' own "
        "nodes, or give these a faster link",
    ),
    "blocks": (
        "The stream brings micro-batches late although its actors could make them in time",
        "raise pool.max_in_flight",
    ),
    "reading": (
        "Reading the store limits the run, with {read:.0%} of an actor's time",
        "convert the store to LMDB or keep the store on a local disk, or raise pool.max_actors",
    ),
    "transform": (
        "Decoding and transforming on CPUs limits the run",
        "raise pool.max_actors and give the cluster the CPUs, convert the store with --short-side, or choose a "
        "lighter transform",
    ),
}
# Settings that a loop of one's own lacks.
_OF_RUN = {
    "cheaper_checkpoints": "choose a faster storage_path, or make them less often (train.checkpoint_interval)",
    "compiled": "compile: true in train.model",
}
_OF_LOOP = {
    "cheaper_checkpoints": "write them to faster storage, or call loader.report less often",
    "compiled": "torch.compile",
}


def diagnose(times: StageTimes, situation: Situation) -> list[str]:
    """Say what limits the run, how many actors would be enough, and what to change. Pure.

    Little's law, per micro-batch and rank: actors = work / (augment + compute), with 15 % to spare. A run that has
    just begun gets no advice.

    Args:
        times: of one rank; the others' are alike, since each step waits for all.
    """
    if not times.images or not times.step_s:
        return ["Nothing was measured yet."]
    values = _values(times, situation)
    speed = _SPEED + (_SAVING if times.checkpoint_s else "")
    if times.gpu_utilization is not None:
        speed += _USED
    sentences = [f"{speed}."]
    if times.step_s < _SETTLED_S:
        sentences.append(_SHORT)
    else:
        if times.checkpoint_fraction > _CHECKPOINTS_ARE_NOTHING:
            sentences.append(_CHECKPOINTS)
        sentences += filter(None, [_limit(times, situation, values)])
        if times.busy_s:
            sentences.append(_POOL)
    return [text.format(**values) for text in sentences]


def _values(times: StageTimes, situation: Situation) -> dict[str, Any]:
    """Return the values that the sentences name, and by which they are chosen."""
    of_stages = {
        stage: getattr(times, f"{stage}_s") / times.step_s
        for stage in ("wait", "augment", "compute", "checkpoint")
    }
    name = situation.name
    world_size = situation.world_size
    share = f"for this {name}"
    enough = 0
    if times.busy_s:
        needed = times.work_s / times.busy_s * _HEADROOM * world_size
        enough = max(1, math.ceil(needed))
        if world_size > 1:
            share = f"{needed / world_size:.1f} per {name}"
    pool = f"the pool has up to {situation.actors}"
    if not situation.actors:
        pool = "there are none (pool.engine=inline)"
    elif enough < situation.actors and times.wait_fraction <= _WAIT_IS_NOTHING:
        pool += " (the pool may shrink)"
    source_s = times.work_s
    reads = 0.0
    if situation.readers:
        source_s = times.read_s
        reads = source_s * world_size / times.step_s / situation.readers
    return {
        **of_stages,
        **(_OF_RUN if situation.is_run else _OF_LOOP),
        "name": name,
        "images_per_s": times.images * world_size / times.step_s,
        "step_s": times.step_s,
        "used": times.gpu_utilization,
        "drained": times.drained_fraction,
        "lighter": "choose a lighter augment.preset, " * _is_augmenting(times),
        "enough": enough,
        "actor_noun": "CPU actor" if enough == 1 else "CPU actors",
        "share": share,
        "pool": pool,
        "outage": _share(times.outage_s, source_s),
        "reading_time": "the reading time" if situation.readers else "an actor's time",
        "reads": min(1.0, reads),
        "spilled_gb": situation.spilled_bytes / 1e9,
        "ready": situation.ready,
        "read": _share(times.read_s, times.work_s),
    }


def _is_augmenting(times: StageTimes) -> bool:
    return times.augment_s > times.compute_s


def _limit(times: StageTimes, situation: Situation, values: dict[str, Any]) -> str:
    """Return the sentence on the stage that limits the run; empty if checkpoints do, which have their own."""
    used = times.gpu_utilization
    if times.wait_fraction > _WAIT_IS_NOTHING:
        cause, advice = _INPUT[_limit_of_input(times, situation, values)]
        return _WAITING.replace("{cause}", cause).replace("{advice}", advice)
    if times.drained_fraction > _DRAINED_IS_BEHIND:
        return _LAUNCHES + _FEWER_LAUNCHES
    if used is not None and used < _UTILIZATION_IS_LOW - times.checkpoint_fraction:
        return _GAPS + _FEWER_LAUNCHES
    if times.checkpoint_s > max(times.augment_s, times.compute_s):
        return ""
    return _AUGMENTATION if _is_augmenting(times) else _MODEL


def _limit_of_input(
    times: StageTimes, situation: Situation, values: dict[str, Any]
) -> str:
    """Return which of `_INPUT` a rank waits for."""
    is_ready = situation.ready > _READY_IS_MADE
    reads = values["reads"]
    causes = {
        "outages": values["outage"] > _OUTAGES_LIMIT,
        "copy": times.transfer_s > times.busy_s,
        "decoding": times.decode_s > times.busy_s,
        "no actors": not situation.actors,
        "reader": reads > _READS_ALWAYS,
        "object store": is_ready and situation.spilled_bytes,
        "network": is_ready,
        "blocks": times.work_s and 0 < values["enough"] <= situation.actors,
        "reading": not reads and times.read_s > 0.5 * times.work_s,
        "transform": True,
    }
    return next(name for name, limits in causes.items() if limits)
