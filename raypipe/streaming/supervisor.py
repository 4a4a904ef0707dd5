"""The supervisor of a stream: an actor to which the stream's processes report, and which answers them.

It holds, as parts that know nothing of Ray: deaths and the samples that caused them (`Faults`), the size of blocks
(`Sizes`), and what happened (`Events`). It also keeps how many ranks wait, the CPUs that the pool takes and leaves
to others, rank 0's messages to the other ranks, and the events of a trace.

It also ends processes of the stream that were stopped, see `raypipe.rayext.watchdog`. Ranks end a stopped
supervisor, too.

Its knowledge outlives its process, see `raypipe.rayext.kv_store`. A restarted one lacks only the blocks in work,
which their actors announce again, and what ranks and executions tell each second.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import ray

from raypipe.logs import LogFormat, configure_logs
from raypipe.metrics.chrome_trace import Chunk
from raypipe.metrics.prometheus import Recorder
from raypipe.metrics.tracer import add_slice, clock_us, happened
from raypipe.plan.places import Split
from raypipe.rayext.iteration import coordinator_of
from raypipe.rayext.kv_store import Memory, forget, publish, published
from raypipe.rayext.processes import Process, on_this_node, this_process
from raypipe.rayext.trace_sender import HeldTrace
from raypipe.rayext.watchdog import StreamWatchdog
from raypipe.streaming.blocks import Sizes
from raypipe.streaming.faults import Faults, Orders, named

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 6
"""Deaths at one block, or of readers at one row group, that end the run. Nodes that are lost by chance hardly hit
one block so often; a block that does not fit in memory is hit each time, at the cost of a process start each."""
POOL = "pool"
"""The name of rank 0's message: the iterators of all ranks, and the most actors; or the error of their start."""
# Rank 0 reads events every second. Beyond this number the oldest are forgotten.
_MAX_EVENTS = 10_000
# So many of the last events outlive the process: those before have been read.
_EVENTS_REMEMBERED = 200
_PATIENCE_S = 5.0  # wait for an answer, at a run's end
_WAITS_S = 1.0  # a rank's wait that counts for the size of the pool
_REMEMBERED = (
    "_faults",
    "_sizes",
    "_left",
    "_given",
    "_pool_awaits",
    "_pool_gives",
    "_has_begun",
    "_least_cpus",
    "_lacks_room",
    "_shared",
    "_validating",
    "_is_validation_told",
    "_events",
)


class Heard(NamedTuple):
    """Answer to a rank.

    Attributes:
        process: the Supervisor's process, if it watches.
        lacks_room: whether the pool waits for CPUs, and no actor runs.
    """

    process: Process | None
    lacks_room: bool


class Word(NamedTuple):
    """Answer to an execution.

    Attributes:
        num_waiting: ranks that have waited for more than a second, for whatever reason.
        given_cpus: CPUs that its pool is to leave to other streams of the job.
    """

    num_waiting: int
    given_cpus: float


class Events:
    """Events of a stream, in order: kind, "fault" or "scale", and text."""

    def __init__(self) -> None:
        self._last = deque[tuple[str, str]](maxlen=_MAX_EVENTS)
        self._num = 0

    def __getstate__(self) -> dict[str, Any]:
        last = list(self._last)[-_EVENTS_REMEMBERED:]
        return {"_num": self._num, "_last": deque(last, _MAX_EVENTS)}

    def add(self, kind: str, text: str) -> None:
        """Add one."""
        self._last.append((kind, text))
        self._num += 1

    def has(self, kind: str, text: str) -> bool:
        """Return whether there was the same one before."""
        return (kind, text) in self._last

    def since(self, first: int) -> list[tuple[str, str]]:
        """The events from number `first` on."""
        num_forgotten = self._num - len(self._last)
        return list(self._last)[max(0, first - num_forgotten) :]


class Supervisor:
    """Supervisor of one stream. `start_supervisor` starts it as an actor.

    Args:
        max_attempts: most deaths at one block, see `Faults`.
        run: name of the run, for metrics and logs.
        log_format: format of its log lines; empty = as this process has it.
        watches: whether it runs as an actor. Then it ends stopped processes of the stream while the stream makes
            no progress, and remembers what its earlier processes knew.
        trainer: process of rank 0, in a train function; it may stop before it calls.
        num_ranks: W; in a train function the other ranks announce themselves, see `announce_trainer`.
    """

    def __init__(
        self,
        max_attempts: int,
        run: str = "",
        log_format: LogFormat | Literal[""] = "",
        watches: bool = False,
        trainer: Process | None = None,
        num_ranks: int = 1,
    ) -> None:
        if log_format:
            configure_logs(log_format, run=run)
        self._metrics = Recorder(run)
        self._faults = Faults(max_attempts)
        self._sizes = Sizes()
        self._events = Events()
        self._left: set[int] = set()  # ranks
        self._given = 0.0  # CPUs left to other streams
        self._told = 0.0  # what the pool knows of them
        self._pool_awaits = 0.0  # CPUs
        self._pool_gives = 0.0  # CPUs of actors that it will release
        self._has_begun = False  # the execution that has the pool
        self._least_cpus = 0.0  # the pool keeps these if other streams ask
        self._lacks_room = False
        self._shared: dict[str, bytes] = {}
        # (epoch, whether it iterates the validation) → ranks
        self._validating: dict[tuple[int, bool], set[int]] = {}
        self._is_validation_told = False
        # execution that has brought blocks → what it is at
        self._stands: dict[str, str] = {}
        self._ready = 0.0
        # sum over the executions' looks, one a second, and their number
        self._num_looks = 0
        # rank → since when it has waited for a batch
        self._waits: dict[int, float] = {}
        self._watch = StreamWatchdog(
            self.note, self._work_of, self._newcomers, self._is_awaited
        )
        self._unknown = set(range(1, num_ranks)) if trainer else set[int]()
        if trainer:
            self._watch.add(trainer.role, trainer)
            self._watch.rank_called(0)
        self._trace = HeldTrace()
        self._process = this_process("supervisor") if watches else None
        self._memory = Memory() if watches else None
        if self._memory and self._memory.lived_before:
            self._restore(self._memory.load())
        if watches:
            self._watch.start()

    def _restore(self, state: dict[str, Any] | None) -> None:
        if state:
            self._watch.restore(state.pop("watched"))
            vars(self).update(state)
        restarted = "the stream's supervisor died, and was restarted"
        self.note(restarted, "supervisor_restarted")

    def _remember(self) -> None:
        """Save what a restarted Supervisor needs, after each change but those that come with every block."""
        if self._memory:
            state = {name: getattr(self, name) for name in _REMEMBERED}
            self._memory.save(state | {"watched": self._watch.state()})

    # The stream's processes

    def _watches(self, key: str, process: Process | None) -> None:
        if process and self._watch.add(key, process):
            self._remember()

    def process_joined(self, key: str, process: Process) -> None:
        """A process of the stream is there, which is known by this key."""
        self._watches(key, process)

    def _newcomers(self) -> dict[int, Process]:
        """Return the trainers that have announced themselves since the last call, by rank."""
        stream = ray.get_runtime_context().get_actor_id() or ""
        found = {rank: published(_key_of(stream, rank)) for rank in self._unknown}
        joined = {rank: process for rank, process in found.items() if process}
        self._unknown -= joined.keys()
        return joined

    def process_left(self, key: str) -> None:
        """A process, or an execution, is no more part of the stream."""
        self._stands.pop(key, None)
        self._watch.remove(key)
        self._remember()

    def _work_of(self, actor: str) -> str:
        work = self._faults.work_of(actor)
        return f"in {named(work.block)}" if work else ""

    def actor_started(self, actor: str, home: str, was_restarted: bool = False) -> bool:
        """An actor has started; returns whether an earlier process of it has died, see `Faults`."""
        work = self._faults.work_of(actor)
        event = self._faults.actor_started(actor, home, was_restarted)
        if work:
            track = f"lost work, {work.home}"
            add_slice("died", work.began_us, clock_us(), work.block, track)
        if event:
            self.note(event, "actor_died")
        self._remember()
        return bool(event)

    def has_actors(self) -> bool:
        """Return whether an actor has started."""
        return self._faults.has_actors

    def block_started(
        self, actor: str, micro_batches: list[str], process: Process | None = None
    ) -> Orders:
        """An actor begins a block of these micro-batches, in this process."""
        self._watches(actor, process)
        return self._faults.block_started(actor, micro_batches, clock_us())

    def announce_sample(self, actor: str, position: str, index: int) -> None:
        """A careful actor is about to decode and transform a sample of a micro-batch, or a substitute."""
        self._faults.announce_sample(actor, position, index)

    def block_finished(self, actor: str) -> None:
        """A careful actor has finished its block."""
        self._faults.block_finished(actor)

    def reader_started(
        self, task: str, share: str, process: Process | None = None
    ) -> bool:
        """A reader begins a share; returns whether it was restarted, and must say what it reads, see `Faults`."""
        event = self._faults.reader_started(task, share)
        self._watches(task, process)
        if event:
            self.note(event, "reader_restarted")
        return bool(event)

    def announce_read(self, task: str, reading: str) -> str:
        """A reader is about to read something; returns why it must not, or ""."""
        error = self._faults.announce_read(task, reading)
        self._remember()
        return error

    def reader_finished(self, task: str) -> None:
        """A reader has finished its share. Its process stays watched: it may stop before it has begun the next."""
        self._faults.reader_finished(task)
        self._remember()

    # The size of blocks

    def block_measured(self, split: str, seconds: float, num_bytes: int) -> None:
        """Record that an actor has made a block: the seconds and bytes of a micro-batch."""
        self._sizes.measured(split, seconds, num_bytes)

    def split_remembered(self, split: Split) -> None:
        """Record that micro-batches of a split are remembered, so that later epochs need not make them."""
        self._sizes.remembered(split)
        self._remember()

    def sizes(
        self, task: str, max_size: int, max_bytes: int, max_bytes_remembered: int
    ) -> dict[Split, int]:
        """Return the micro-batches per block of a reader's task, by split, see `Sizes`."""
        sizes = self._sizes.of_task(task, max_size, max_bytes, max_bytes_remembered)
        self._remember()
        return sizes

    # The pool and the ranks

    def rank_waits(self, rank: int, waited_s: float) -> Heard:
        """A rank has waited for a batch for so long, 0 = it does not wait."""
        self._watch.rank_called(rank)
        self._waits[rank] = time.monotonic() - waited_s if waited_s else math.inf
        return Heard(self._process, self._lacks_room)

    def num_joined(self) -> int:
        """Return the number of ranks that have called."""
        return len(self._waits.keys() | self._left)

    def _is_awaited(self) -> bool:
        """Return whether a rank waits for a batch, or none has called yet."""
        waits = list(self._waits.values())
        return not waits or min(waits) < math.inf

    def execution_progress(
        self,
        execution: str,
        still_s: float,
        process: Process | None = None,
        standing: str = "",
        ready: float = 0.0,
    ) -> Word:
        """An execution runs, as it says each second; no rank has taken a block from it for so long.

        Args:
            standing: what its blocks are at; empty = it has brought none yet.
            ready: share of the ranks that have a finished block to take now.
        """
        if self._watch.execution_progress(execution, still_s, process):
            self._remember()
        if standing:
            self._stands[execution] = standing
            self._ready += ready
            self._num_looks += 1
        now = time.monotonic()
        self._told = self._given
        return Word(
            sum(now - since > _WAITS_S for since in self._waits.values()), self._given
        )

    def ready_share(self) -> float:
        """Return the mean share of the ranks that had a finished block to take, over the stream so far."""
        return self._ready / self._num_looks if self._num_looks else 0.0

    def give_way(self, cpus: float) -> None:
        """Let the pool leave so many CPUs more to other streams of the job; fewer, if the number is negative."""
        self._given = max(0.0, self._given + cpus)
        self._remember()

    def pool_planned(self, cpus: float, least_cpus: float) -> None:
        """The pool is to take so many CPUs once its execution begins, or with its first block."""
        if not self._has_begun:
            self._pool_awaits = cpus
            self._least_cpus = least_cpus
            self._remember()

    def pool_awaits(self, cpus: float, giving_cpus: float) -> None:
        """The pool's execution has begun; its actors still need these CPUs, and it will release those."""
        self._has_begun = True
        self._pool_awaits = cpus
        self._pool_gives = giving_cpus
        self._remember()

    def giving_cpus(self) -> float:
        """Return the CPUs that the pool will release for other streams, or is still to be asked for."""
        return self._pool_gives if self._told == self._given else self._given

    def awaited_cpus(self) -> float:
        """Return the CPUs that the pool will still take, less those that it leaves to other streams."""
        if self._has_begun:
            return self._pool_awaits
        return max(self._least_cpus, self._pool_awaits - self._given)

    def share(self, name: str, message: bytes) -> None:
        """Keep a message of rank 0 for the other ranks."""
        self._shared[name] = message
        self._remember()

    def shared(self, name: str) -> bytes:
        """Return a message of rank 0; empty = there is none yet."""
        return self._shared.get(name, b"")

    def validates(self, rank: int, epoch: int, takes: bool) -> None:
        """A rank iterates an epoch's validation, or leaves it out; warns once if others do not do the same."""
        self._validating.setdefault((epoch, takes), set()).add(rank)
        taking = self._validating.get((epoch, True))
        leaving = self._validating.get((epoch, False))
        if taking and leaving and not self._is_validation_told:
            self._is_validation_told = True
            self.note(
                f"rank {min(taking)} iterates the validation of epoch {epoch}, and rank {min(leaving)} does not: "
                "each rank has a share of the samples, and the shares of ranks that leave it out are missing. "
                "Iterate epoch.val on all ranks, and sum over them (docs/training-loop.md)"
            )
        self._remember()

    def rank_done(self, rank: int) -> int:
        """A rank will read no more; returns how many have said so."""
        self._left.add(rank)
        self._waits.pop(rank, None)
        self._remember()
        return len(self._left)

    # What happened

    def note(self, event: str, kind: str = "other") -> None:
        """Record a fault, or that it was recovered from, for the log and the metrics."""
        logger.warning("%s", event, extra={"values": {"fault": kind}})
        happened("fault", event)
        self._metrics.add({"stream_faults_total": 1}, kind=kind)
        self._record("fault", event)

    def packages_differ(self, event: str) -> None:
        """Record that a node has other packages than the driver, once for all of its actors."""
        if not self._events.has("fault", event):
            self.note(event, "versions")

    def pool_scaled(self, event: str) -> None:
        """Record a decision on the pool's size."""
        logger.info("%s", event)
        happened("size of the pool", event)
        self._record("scale", event)

    def pool_waits(self, event: str) -> None:
        """Record that the pool waits for nodes."""
        logger.warning("%s", event)
        self._record("scale", event)

    def pool_lacks_room(self, lacks_room: bool) -> None:
        """Record whether no actor runs and those that are to start find no CPUs."""
        self._lacks_room = lacks_room
        self._remember()

    def traced(self, chunk: Chunk) -> bool:
        """Take a process's events for the trace; return whether it continues."""
        return self._trace.add(chunk)

    def take_trace(self) -> list[Chunk]:
        """Remove the trace's events so far, for rank 0, which writes them."""
        return self._trace.take(self._process)

    def end_trace(self) -> None:
        """Tell all processes, as they send their next events, that no more are wanted."""
        self._trace.end()

    def _record(self, kind: str, event: str) -> None:
        self._events.add(kind, event)
        self._remember()

    def describe_progress(self) -> str:
        """State of the stream, by its executions, or by its processes before the first batch."""
        return "; ".join(self._stands.values()) or self._faults.describe()

    def events(self, first: int) -> list[tuple[str, str]]:
        """The events from number `first` on, in order: kind, "fault" or "scale", and text."""
        return self._events.since(first)


def start_supervisor(
    run: str = "",
    log_format: LogFormat = "text",
    watches: bool = True,
    trainer: Process | None = None,
    num_ranks: int = 1,
) -> Any:
    """A handle of a Supervisor that runs as an actor, on the node of the caller."""
    actor = ray.remote(Supervisor).options(
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        scheduling_strategy=on_this_node(),
    )
    return actor.remote(MAX_ATTEMPTS, run, log_format, watches, trainer, num_ranks)


def announce_trainer(supervisor: Any, rank: int) -> None:
    """Let a Supervisor know this process as the trainer of a rank from now on.

    The head keeps it: a call would wait for the Supervisor's start, and never arrive if this process froze before.
    """
    trainer = this_process(f"trainer {rank}")
    publish(_key_of(stream_name(supervisor), rank), trainer)


def _key_of(stream: str, rank: int) -> str:
    return f"{stream} trainer {rank}"


def stream_name(supervisor: Any) -> str:
    """Return a name of the supervisor's stream that no other stream has."""
    return supervisor._actor_id.hex()


def end_actors(
    supervisor: Any, iterators: Sequence[Any], rank: int, world_size: int
) -> None:
    """End the actors of a stream once all of its ranks have left it; each calls this when it does.

    They are killed, since any other handle, such as one in an object of Ray Data, would keep them alive.

    Args:
        supervisor: the handle of the stream's Supervisor.
        iterators: iterator of each rank, see `pipeline.splits`; none if this rank left before it had them.
        rank, world_size: number of this rank, and W.
    """
    if not ray.is_initialized():  # a call would restart it, and its actors are gone
        return
    with contextlib.suppress(ray.exceptions.RayError):
        if world_size > 1:
            num_done = ray.get(supervisor.rank_done.remote(rank), timeout=_PATIENCE_S)
            if num_done < world_size:
                return
            message = ray.get(supervisor.shared.remote(POOL), timeout=_PATIENCE_S)
            if message and not iterators:
                shared = ray.cloudpickle.loads(message)
                iterators = shared[0] if isinstance(shared, tuple) else []
        for actor in {*filter(None, map(coordinator_of, iterators)), supervisor}:
            ray.kill(actor)
        forget(supervisor)
