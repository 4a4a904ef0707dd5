"""Stream of one rank: its batches on the device, from any place of the schedule on.

It is opened where a batch is asked for, and read on. To a place that it does not reach, or that is far, it starts
again, there; where other ranks share it, only if all of them go there, see `raypipe.streaming.moves`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from raypipe.device.prefetcher import Batch
from raypipe.errors import CursorError, RaypipeError
from raypipe.plan.places import Cursor, MicroBatchId
from raypipe.plan.schedule import Plan, Segment
from raypipe.rayext.watchdog import SupervisorWatchdog
from raypipe.streaming.hashes import hashed
from raypipe.streaming.lifetime import (
    EXHAUSTED,
    GAVE_WAY,
    GOES_ON,
    MOVED,
    HostStream,
    Lifetime,
)
from raypipe.streaming.metrics import LoaderMetrics
from raypipe.streaming.moves import END, Move, stream_place
from raypipe.streaming.remaining import Remaining
from raypipe.streaming.start.takeover import HeadStartLostError

_LEAVE_S = 5.0  # time for another thread to leave its wait for a batch


class RankStream:
    """Stream of one rank. It has no reference to the loader, and ends when that is dropped.

    Args:
        plan: the run's plan.
        rank, world_size: number of this rank, and W.
        open_at: starts the stream at a cursor; a second argument is the only segment that it shall bring.
        on_device: brings micro-batches onto the device, see `raypipe.device.prefetcher`.
        metrics: metrics of the rank.
        is_hashed: whether micro-batches get a hash before that.

    Attributes:
        lifetime: its owner, which ends it.
        supervisor: handle of its Supervisor, if it has one.
        has_begun: returns whether its pool has begun, see `HostStream`.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        world_size: int,
        open_at: Callable[..., HostStream],
        on_device: Callable[..., Iterator[Batch]],
        metrics: LoaderMetrics,
        is_hashed: bool = False,
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._world_size = world_size
        self._open_at = open_at
        self._on_device = on_device
        self._metrics = metrics
        self._is_hashed = is_hashed
        self._batches: Iterator[Batch] | None = None
        self.lifetime = Lifetime(lambda: metrics.tell("closed"))
        self.supervisor: Any = None
        self.has_begun: Callable[[], bool] = lambda: False

    @property
    def is_running(self) -> bool:
        """True from its first start to its end."""
        return self._batches is not None and self.lifetime.why is None

    def open(self, start: Cursor, only: Segment | None = None) -> None:
        """Open the stream.

        Args:
            start: its first place.
            only: the one segment that it brings; None = all from there on.
        """
        # Of the host's no more is held than these: its execution is to be collected once it has ended.
        if only:
            host = self._open_at(start, only)
            plan = self._plan.only(only)
        else:
            host = self._open_at(start)
            plan = self._plan
        self._remaining = Remaining(
            plan.segments(start), plan.config.per_step, self._rank, self._world_size
        )
        self._take_facts(host)
        batches = self._transferred(host)
        self._batches = batches
        watchdogs = list[SupervisorWatchdog]()
        ends = ExitStack()
        ends.callback(host.end)
        # before its Supervisor ends, and after the last wait for a batch
        ends.callback(_stop_all, watchdogs)
        ends.callback(self._metrics.tell, "ended")
        for iterator in (host.batches, batches):
            ends.callback(_close, self.lifetime, host.stop, iterator)
        self.lifetime.begin(ends, host.needs_ray)
        if host.starts is None:
            self._metrics.tell("opened", None)
            return

        start_images = host.start_images

        def connected(supervisor: Any, actors: int) -> None:
            self.supervisor = supervisor
            self._start_images = start_images * actors
            self._metrics.actors = actors
            self._metrics.readers = host.readers()
            waited_s = self._metrics.run_log.waited_s
            watchdog = SupervisorWatchdog(supervisor, self._rank, waited_s)
            watchdog.start()
            watchdogs.append(watchdog)
            self.lifetime.has_actors(supervisor)
            self._metrics.tell("opened", supervisor)

        with self.failing():
            host.starts(connected)

    def _transferred(self, host: HostStream) -> Iterator[Batch]:
        """The micro-batches of a stream on the device."""
        batches = hashed(host.batches) if self._is_hashed else host.batches
        # generators that threads share are drawn from by the thread of the loop
        ring = False if host.draws_globally else None
        return self._on_device(batches, ring=ring)

    def _take_facts(self, host: HostStream) -> None:
        """Take over the facts of a stream, but not its batches and its execution."""
        self._start_images = host.start_images
        self._moves = host.moves
        self._describe = host.describe
        self.has_begun = host.has_begun
        self.supervisor = None
        self._metrics.actors = host.actors

    def check(self) -> None:
        """Raise an error if the stream was not opened, or has ended for good."""
        if self._batches is None:
            raise CursorError(
                "the latest checkpoint has no place of the stream: make checkpoints with loader.report or "
                "loader.save(folder), or call loader.load_state_dict before the first batch; to start over "
                "anyway, raypipe.loader(spec, cursor=spec.plan.start())"
            )
        if (why := self.lifetime.why) and why not in GOES_ON:
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
            self.lifetime.end(f"its next batch failed with {type(error).__name__}")
            # another thread could not
            _close(self.lifetime, lambda: None, self._batches)
            raise

    def take(self, position: MicroBatchId, continues: bool) -> Batch:
        """Return the batch of a place.

        Args:
            continues: whether the next epoch comes after a validation.
        """
        self.check()
        self.lifetime.reader = threading.get_ident()
        with self._metrics.waiting(position, self._awaited):
            batch = self._batch(position, continues)
        if batch is None:
            self.check()
        if batch is None or batch.position != position:
            got = "ended" if batch is None else f"brought {batch.position}"
            raise RaypipeError(
                f"rank {self._rank} expected {position}, the stream {got}: please report this as a bug"
            )
        self._remaining.take()
        return batch

    def finish(self) -> None:
        """End the stream: all epochs were handed out, and the last one was left."""
        if self.lifetime.why is not None:
            return
        stands = self._remaining.next
        if stands is None:
            further = self._next()
            assert further is None, "the stream is longer than the plan"
            if self._moves:
                self._moves(Move(END, END))
        elif self._moves and not self._moves(
            Move(stream_place(stands), END, leaves=True)
        ):
            while self._remaining.next:
                self._discard()
        self.lifetime.end(EXHAUSTED)

    def _batch(self, position: MicroBatchId, continues: bool) -> Batch | None:
        """The batch of a place; None = the stream has ended."""
        while True:
            self._reach(position, continues)
            try:
                batch = self._next()
            except HeadStartLostError as lost:
                if self._moves:  # the others go on
                    raise lost.error from None
                self.lifetime.end(MOVED)
                continue
            if batch is not None or self.lifetime.why != GAVE_WAY:
                return batch

    def _next(self) -> Batch | None:
        assert self._batches is not None
        return next(self._batches, None)

    def _awaited(self) -> str:
        """Name what holds up a batch."""
        if self.lifetime.why is not None:
            return "the stream starts again for it"
        if described := self._describe():
            return described
        return self._metrics.run_log.awaited(self.supervisor)

    def _reach(self, position: MicroBatchId, continues: bool) -> None:
        """Go to a place of the schedule, so that its micro-batch comes next.

        A stream can start anywhere. It is read on where that costs less than a start.
        """
        if self.is_running:
            num = self._remaining.before(position)
        else:
            num = None
        if num is None or not self._reads_on(position, num):
            self._seek(position, continues)
            num = self._remaining.before(position)
            assert num is not None, "a stream begins at the step that it was opened for"
        for _ in range(num):
            self._discard()

    def _reads_on(self, position: MicroBatchId, num: int) -> bool:
        """Return whether to read on, over a number of batches, and not to start again behind them."""
        num_images = num * self._world_size * self._plan.config.micro_batch_size
        is_far = num_images > self._start_images
        stands = self._remaining.next
        if not self._moves or stands is None:
            return not is_far
        if num or self._remaining.is_at_start:
            return not self._moves(
                Move(stream_place(stands), stream_place(position), leaves=is_far)
            )
        # where batches come one after the other, nobody needs to know
        return True

    def _seek(self, position: MicroBatchId, continues: bool) -> None:
        """Start the stream again, at the step of a micro-batch."""
        self.lifetime.end(MOVED)
        plan = self._plan
        if position.split == "train":
            self.open(plan.cursor(position.epoch, position.step))
            return
        after_training = plan.cursor(position.epoch, plan.steps_per_epoch)
        if continues and position.step == 0:
            self.open(after_training)
        else:
            validation = Segment("val", position.epoch, position.step, plan.val_steps)
            self.open(after_training, validation)

    def _discard(self) -> None:
        if self._next() is None:
            self.check()
            raise RaypipeError(
                f"rank {self._rank}: the stream ended early: please report this as a bug"
            )
        self._remaining.take()


def _stop_all(watchdogs: list[SupervisorWatchdog]) -> None:
    for watchdog in watchdogs:
        watchdog.stop()


def _close(lifetime: Lifetime, stop: Callable[[], None], batches: Any) -> None:
    """Close what may be a generator. If a thread is in it, stop that, and wait a little for it to leave."""
    deadline = time.monotonic() + _LEAVE_S
    while True:
        try:
            getattr(batches, "close", lambda: None)()
            return
        except ValueError:
            stop()
            if lifetime.reader == threading.get_ident() or time.monotonic() > deadline:
                return
            time.sleep(0.02)
