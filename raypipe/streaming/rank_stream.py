"""Stream of one rank: its batches on the device, from any place of the schedule on.

It is opened where a batch is asked for, and read on. For a place that it does not reach, or that is far, it is
opened again, there. Ranks that share an execution of Ray must do the same, and none asks another: they all open
again behind a training that they leave far from its end, and a rank reads a validation that it leaves out.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice, takewhile
from typing import Any, NamedTuple

from raypipe.background import in_background
from raypipe.device.prefetcher import Batch
from raypipe.errors import CursorError, RaypipeError
from raypipe.plan.places import MicroBatchId
from raypipe.plan.schedule import Plan
from raypipe.streaming.lifetime import (
    EXHAUSTED,
    GAVE_WAY,
    GOES_ON,
    MOVED,
    HeadStartLostError,
    Open,
    PoolLostError,
    all_streams,
    begun,
    close_from_any_thread,
    of_ray,
)
from raypipe.streaming.metrics import LoaderMetrics
from raypipe.streaming.shares import Share
from raypipe.transform.fields import MicroBatch

# Images that an actor makes while a stream starts: 5 s pass until its first batch, at 1 ms for a photo.
_START_IMAGES = 5_000


class HostSource(NamedTuple):
    """A rank's stream in host memory.

    Attributes:
        open_at: the stream, as a function of a place.
        pool: the `RayStreams` that open it; None = this process makes it.
        draws_globally: whether the thread that asks for a batch makes it, from the process's generators.
    """

    open_at: Open
    pool: Any = None
    draws_globally: bool = False


class RankStream:
    """Stream of one rank. It has no reference to the loader, and ends when that is dropped.

    Args:
        plan: the run's plan.
        share: the rank's.
        source: the stream in host memory.
        on_device: brings micro-batches onto the device, see `raypipe.device.prefetcher`.
        metrics: metrics of the rank.

    Attributes:
        why: reason of its end; EXHAUSTED = it was read to its end; None = it has not ended.
    """

    def __init__(
        self,
        plan: Plan,
        share: Share,
        source: HostSource,
        on_device: Callable[[Iterator[MicroBatch]], Iterator[Batch]],
        metrics: LoaderMetrics,
    ) -> None:
        self._plan = plan
        self._rank = share.rank
        self._world_size = share.world_size
        self._open_at = source.open_at
        self._pool = source.pool
        self._on_device = on_device
        self._metrics = metrics
        self._batches: Iterator[Batch] | None = None
        # The place that comes next, and those after it; None = all were taken.
        self._next: MicroBatchId | None = None
        self._behind: Iterator[MicroBatchId] = iter(())
        self.why: str | None = None
        # thread that asked for the last batch; at first the one that may ask
        self._reader = threading.get_ident()
        self._ends = ExitStack()
        self._one_by_one = threading.RLock()
        all_streams.add(self)

    @property
    def supervisor(self) -> Any:
        """Handle of the stream's Supervisor; None = it has none, or is not connected to Ray yet."""
        return self._pool.supervisor if self._pool else None

    @property
    def has_begun(self) -> bool:
        """True once the pool makes batches; always, if there is none."""
        return self._pool is None or self._pool.has_begun

    @property
    def is_running(self) -> bool:
        """True from its first start to its end."""
        return self._batches is not None and self.why is None

    def open(self, start: MicroBatchId | None) -> None:
        """Open the stream at the step of a place; None = nothing is left of the schedule."""
        host: Iterator[MicroBatch] = iter(())
        pool = self._pool if start else None
        self._next = None
        if start:
            if pool:
                pool.on_start = self._started
                pool.waited_s = self._metrics.run_log.waited_s
            with self.failing():
                host = self._open_at(start)
            self._behind = self._places(start)
            self._next = next(self._behind, None)
        self._batches = batches = self._on_device(host)
        self.why = None
        self._ends.callback(self._close, host)
        self._ends.callback(self._metrics.tell, "ended")
        self._ends.callback(self._close, batches, host)
        if pool:
            # neither is to keep the other once the stream has ended
            self._ends.callback(setattr, pool, "on_start", _nothing)
            self._metrics.actors = pool.actors
        begun(self, pool is not None)
        if pool is None:
            self._metrics.tell("opened", None)

    def _places(self, start: MicroBatchId, first: int = 0) -> Iterator[MicroBatchId]:
        """This rank's places from the step of one on, without the first few."""
        share = (self._rank, self._world_size)
        return self._plan.micro_batches(start, first, share)

    def _started(self) -> None:
        """The pool of the stream starts."""
        pool = self._pool
        assert pool
        self._metrics.actors = pool.actors
        self._metrics.readers = pool.num_readers
        of_ray[self] = pool.supervisor
        self._metrics.tell("opened", pool.supervisor)

    def end(self, why: str) -> None:
        """End the stream, if it has not ended; its record continues."""
        with self._one_by_one:
            if self.why is None or (self.why in GOES_ON and why not in GOES_ON):
                self.why = why
            self._ends.close()
            of_ray.pop(self, None)

    def close(self, why: str = "the program ends") -> None:
        """End the stream and its record."""
        with self._one_by_one:
            self.end(why)
            self._metrics.tell("closed")

    def drop(self) -> None:
        """Close the stream, since nobody holds it: Python may find that out in a thread that its end waits for."""
        if threading.get_ident() == self._reader:
            self.close()
        else:
            in_background("raypipe-end", self.close)

    def _close(self, batches: Any, source: Any = None) -> None:
        """Close batches, and their source before if another thread is in them."""

        def close_source() -> None:
            with contextlib.suppress(ValueError):
                getattr(source, "close", lambda: None)()

        close_from_any_thread(batches, self._reader, close_source)

    def check(self) -> None:
        """Raise an error if the stream was not opened, or has ended for good."""
        if self._batches is None:
            raise CursorError(
                "the latest checkpoint has no place of the stream: make checkpoints with loader.report or "
                "loader.save(folder), or call loader.load_state_dict before the first batch; to start over "
                "anyway, raypipe.loader(spec, cursor=spec.plan.start())"
            )
        if (why := self.why) and why not in GOES_ON:
            raise RaypipeError(
                f"the stream has ended, since {why}: loader.load_state_dict(loader.state_dict()) restarts "
                "it after the last whole step"
            )

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Context manager: an error in it, which may be Ctrl-C, ends the stream."""
        try:
            yield
        except BaseException as error:
            self.end(f"its next batch failed with {type(error).__name__}")
            # another thread could not
            self._close(self._batches)
            raise

    def take(self, position: MicroBatchId) -> Batch:
        """Return the batch of a place."""
        self.check()
        self._reader = threading.get_ident()
        with self._metrics.waiting(position, self._awaited):
            batch = self._batch(position)
        if batch is None:
            self.check()
        if batch is None or batch.position != position:
            got = "ended" if batch is None else f"brought {batch.position}"
            raise RaypipeError(
                f"rank {self._rank} expected {position}, the stream {got}: please report this as a bug"
            )
        return batch

    def finish(self) -> None:
        """End the stream: all epochs were handed out, and the last one was left."""
        if self.why is not None:
            return
        try:
            if self._is_shared:
                # the other ranks read it, too
                self._leave_training()
                self._discard_until(None)
            if self._next is None:
                # it may do something more at its end
                further = self._take()
                assert further is None, "the stream is longer than the plan"
        except PoolLostError as lost:
            lost.accept()
        self.end(EXHAUSTED)

    def _batch(self, position: MicroBatchId) -> Batch | None:
        """The batch of a place; None = the stream has ended."""
        while True:
            try:
                self._reach(position)
                batch = self._take()
            except (HeadStartLostError, PoolLostError):
                self.end(MOVED)
                continue
            if batch is not None or self.why != GAVE_WAY:
                return batch

    def _take(self) -> Batch | None:
        """The stream's next batch; None = it has ended."""
        assert self._batches is not None
        batch = next(self._batches, None)
        if batch is not None:
            self._next = next(self._behind, None)
        return batch

    def _awaited(self) -> str:
        """Name what holds up a batch."""
        if self.why is not None:
            return "the stream starts again for it"
        if self._pool and (awaited := self._pool.awaited()):
            return awaited
        return self._metrics.run_log.awaited(self.supervisor)

    def _reach(self, position: MicroBatchId) -> None:
        """Go to a place of the schedule, so that its micro-batch comes next."""
        if not self.is_running:
            self._open_again(position)
        if self._is_shared and self._next and _pass(self._next) < _pass(position):
            self._leave_training()
        if not self._comes_soon(position):
            self._open_again(position)
        self._discard_until(position)
        self._tell_of_validation(True)

    @property
    def _is_shared(self) -> bool:
        """True if other ranks have shares of the same execution."""
        return self._pool is not None and self._pool.is_shared

    def _tell_of_validation(self, takes: bool) -> None:
        """Tell the Supervisor if a validation begins, which this rank takes, or leaves out."""
        upcoming = self._next
        if not (self._is_shared and upcoming and upcoming.split == "val"):
            return
        if upcoming.step == 0 and upcoming.micro == self._rank:
            self.supervisor.validates.remote(self._rank, upcoming.epoch, takes)

    def _leave_training(self) -> None:
        """Open the stream again behind the training under way if that is far: all ranks do, which share it."""
        upcoming = self._next
        if upcoming is None or upcoming.split != "train":
            return
        training = self._plan.training_of(upcoming.epoch, upcoming.step)
        num_images = training.num_delivered * self._plan.global_batch_size
        if num_images > self._start_images:
            self.end(MOVED)
            behind = self._plan.cursor(upcoming.epoch, self._plan.steps_per_epoch)
            self.open(next(self._plan.micro_batches(behind), None))

    @property
    def _start_images(self) -> int:
        """Images that the pool makes in the time that its start takes: a skip of fewer reads on."""
        return _START_IMAGES * self._pool.actors if self._pool else 0

    def _comes_soon(self, position: MicroBatchId) -> bool:
        """Return whether a place comes, and is near; for ranks that share an execution none is far."""
        upcoming = self._next
        if upcoming is None or upcoming == position:
            return upcoming is not None
        most = None
        if not self._is_shared:
            per_place = self._world_size * self._plan.config.micro_batch_size
            most = self._start_images // per_place + 1
        places = self._places(upcoming, upcoming.micro // self._world_size)
        of_passes = takewhile(lambda place: _pass(place) <= _pass(position), places)
        return position in islice(of_passes, most)

    def _open_again(self, position: MicroBatchId) -> None:
        """Open the stream at the step of a micro-batch."""
        self.end(MOVED)
        self.open(position)

    def _discard_until(self, position: MicroBatchId | None) -> None:
        """Read on until a place comes next; None = to the stream's end."""
        while self._next != position:
            self._tell_of_validation(False)
            if self._take() is None:
                self.check()
                raise RaypipeError(
                    f"rank {self._rank}: the stream ended early: please report this as a bug"
                )


def _nothing() -> None:
    """Do nothing: the stream of a pool that starts too late has ended."""


def _pass(place: MicroBatchId) -> tuple[int, bool]:
    """The order of the pass of a place: its epoch, and whether it is the validation."""
    return place.epoch, place.split == "val"
