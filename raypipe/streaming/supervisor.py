"""The supervisor of transform actors: each actor's work, its deaths, and the samples that caused them.

A process that crashes or hangs on a sample would be restarted, and would crash again, forever. So actors
announce their work to a supervisor, and a restarted one asks it for the history of its block:

    first death in a block             it is tried again, carefully: each sample is announced before it is touched
    second careful death at a sample   the sample is bad; the block is tried again without it
    `MAX_ATTEMPTS` deaths without that,
    or more bad samples than that in
    one of its micro-batches           the run ends with one error

Deaths by other causes (a lost node, a kill) cost an attempt, and do not change the result.

A restarted reader also announces each read. A row group cannot be substituted, so
`MAX_ATTEMPTS` deaths at one, for one micro-batch, end the run, with the file and the row group in the error.

The supervisor also sets the size of blocks, from actors' reports about their first ones. Each ReadTask gets it
at its start, and a restarted one gets the same size, since its blocks must not change.

It also ends processes of the stream that were stopped, see `raypipe.rayext.watchdog`. Ranks end a stopped
supervisor, too.

Its knowledge outlives its process, see `raypipe.rayext.kv_store`: whom it watches, which samples are bad, how
large blocks are, and what happened. A restarted one lacks only the blocks that were in work,
which their actors announce again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import ray

from raypipe.logs import LogFormat, configure_logs
from raypipe.metrics.chrome_trace import Chunk
from raypipe.metrics.prometheus import Recorder
from raypipe.metrics.tracer import add_slice, clock_us, happened
from raypipe.plan.places import Split
from raypipe.rayext.iteration import coordinator_of
from raypipe.rayext.kv_store import Memory, forget
from raypipe.rayext.processes import Process, on_this_node, this_process
from raypipe.rayext.trace_sender import HeldTrace, TraceAnswer
from raypipe.rayext.watchdog import StreamWatchdog
from raypipe.streaming.blocks import REMEMBERED_FACTOR, fitting
from raypipe.streaming.moves import Answer, Move, Moves
from raypipe.streaming.start.takeover import Takeover

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 6
"""Deaths at one block, or of readers at one row group, that end the run. Nodes that are lost by chance hardly hit
one block so often; a block that does not fit in memory is hit each time, at the cost of a process start each."""
_DEATHS_AT_A_SAMPLE = 2
# Rank 0 reads events every second. Beyond this number the oldest are forgotten, so many at once.
_MAX_EVENTS = 10_000
_FORGOTTEN = 1_000
_NUM_MEASURED = 32
_PATIENCE_S = 5.0  # wait for an answer, at a run's end
_WAITS_S = 1.0  # a rank's wait that counts for the size of the pool
# A restarted Supervisor remembers these, and so many of the last events: those before have been read.
_REMEMBERED = (
    "_homes",
    "_bad",
    "_histories",
    "_reading",
    "_deaths_reading",
    "_sizes",
    "_remembered_splits",
    "_left",
    "_moves",
    "_given",
    "_pool_awaits",
    "_has_begun",
    "_least_cpus",
    "_takeover",
    "_shared",
)
_EVENTS_REMEMBERED = 200
_LOOK = "look for `out of memory` or a crash in the logs of Ray's workers (`ray logs`)"


@dataclass(frozen=True)
class Orders:
    """Instructions for an actor's work on a block."""

    careful: bool = False  # announce each sample before it is touched
    bad: tuple[
        int, ...
    ] = ()  # indices of samples of this split that have killed their process
    error: str = ""  # why the run must end; empty = it need not


NO_ORDERS = Orders()


class Word(NamedTuple):
    """Answer to an execution.

    Attributes:
        num_waiting: ranks that have waited for more than a second, for whatever reason.
        given_cpus: CPUs that its pool is to leave to other streams of the job.
    """

    num_waiting: int
    given_cpus: float


@dataclass
class _History:
    """The history of a block in which an actor has died: deaths since the last bad sample was found, and where."""

    deaths: int = 0
    all_deaths: int = 0
    at_sample: Counter[int] = field(default_factory=Counter)
    bad_in: Counter[str] = field(default_factory=Counter)  # by micro-batch


class Supervisor:
    """Ledger of one stream's faults. `start_supervisor` starts it as an actor.

    Args:
        max_attempts: most deaths at one block, see above.
        run: name of the run, for metrics and logs.
        log_format: format of its log lines; empty = as this process has it.
        watches: whether it runs as an actor. Then it ends stopped processes of the stream while the stream makes
            no progress, and remembers what its earlier processes knew.
        memory: memory of an actor; None = a new one if it watches, else none.
    """

    def __init__(
        self,
        max_attempts: int,
        run: str = "",
        log_format: LogFormat | Literal[""] = "",
        watches: bool = False,
        memory: Memory | None = None,
    ) -> None:
        if log_format:
            configure_logs(log_format, run=run)
        self._metrics = Recorder(run)
        self._max_attempts = max_attempts
        self._homes: dict[str, str] = {}  # actor → where it runs
        self._doing: dict[
            str, tuple[str, ...]
        ] = {}  # actor → the micro-batches of its block
        self._began_us: dict[str, float] = {}  # actor → the begin of that block
        self._samples: dict[
            str, tuple[str, int]
        ] = {}  # actor → micro-batch and index, while it is careful
        self._bad: dict[str, set[int]] = defaultdict(set)  # split → indices
        self._histories: dict[tuple[str, ...], _History] = {}
        self._reading: dict[
            str, str
        ] = {}  # task of a reader → what it reads; empty = it has not told
        self._deaths_reading: Counter[str] = Counter()
        self._events: list[tuple[str, str]] = []
        # number of the first of them; those before are forgotten
        self._first_event = 0
        # by split
        self._seconds: dict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=_NUM_MEASURED)
        )
        self._num_bytes: dict[str, deque[int]] = defaultdict(
            lambda: deque(maxlen=_NUM_MEASURED)
        )
        self._sizes: dict[
            str, dict[Split, int]
        ] = {}  # task of a reader → k of each split
        self._remembered_splits: set[Split] = set()
        self._left: set[int] = set()  # ranks
        self._moves: Moves | None = None
        self._given = 0.0  # CPUs left to other streams
        self._pool_awaits = 0.0  # CPUs
        self._has_begun = False  # the execution that has the pool
        self._least_cpus = 0.0  # the pool keeps these if other streams ask
        self._takeover = Takeover()
        self._shared = b""
        self._stands: dict[
            str, str
        ] = {}  # execution that has brought blocks → what it is at
        self._ready = 0.0
        # sum over the executions' looks, one a second, and their number
        self._num_looks = 0
        self._waits: dict[
            int, float
        ] = {}  # rank → since when it has waited for a batch
        self._watch = StreamWatchdog(self.note, self._work_of)
        self._trace = HeldTrace()
        self._process = this_process("supervisor") if watches else None
        self._memory = memory or (Memory() if watches else None)
        if self._memory and self._memory.lived_before:
            self._restore(self._memory.load())
        if watches:
            self._watch.start()

    def _restore(self, state: dict[str, Any] | None) -> None:
        if state:
            vars(self).update({name: state[name] for name in _REMEMBERED})
            self._first_event, self._events = state["events"]
            self._watch.restore(state["watched"])
        self.note(
            "the stream's supervisor died, and was restarted", "supervisor_restarted"
        )

    def _remember(self, at_once: bool = False) -> None:
        """Save what a restarted Supervisor needs, after each change but those that come with every block.

        Args:
            at_once: before the caller is answered, since it never tells or asks for this again.
        """
        if self._memory:
            last = self._events[-_EVENTS_REMEMBERED:]
            state = {name: getattr(self, name) for name in _REMEMBERED}
            state["events"] = self._first_event + len(self._events) - len(last), last
            self._memory.save(state | {"watched": self._watch.state()}, at_once)

    def _watches(self, key: str, process: Process | None) -> None:
        if process and self._watch.add(key, process):
            self._remember()

    def process_joined(self, key: str, process: Process) -> None:
        """A process of the stream is there, which is known by this key."""
        self._watches(key, process)

    def rank_waits(self, rank: int, waited_s: float) -> Process | None:
        """A rank has waited for a batch for so long, 0 = it does not wait; returns this process."""
        self._watch.rank_called(rank)
        self._waits[rank] = time.monotonic() - waited_s if waited_s else math.inf
        return self._process

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

    def pool_awaits(self, cpus: float) -> None:
        """The pool's execution has begun; its actors that have not started need so many CPUs."""
        self._has_begun = True
        self._pool_awaits = cpus
        self._remember()

    def awaited_cpus(self) -> float:
        """Return the CPUs that the pool will still take, less those that it leaves to other streams."""
        if self._has_begun:
            return self._pool_awaits
        return max(self._least_cpus, self._pool_awaits - self._given)

    def process_left(self, key: str) -> None:
        """A process, or an execution, is no more part of the stream."""
        self._stands.pop(key, None)
        self._watch.remove(key)
        self._remember()

    def _work_of(self, actor: str) -> str:
        block = self._doing.get(actor)
        return f"in {_named(block)}" if block else ""

    def actor_started(self, actor: str, home: str, was_restarted: bool = False) -> bool:
        """An actor has started; returns whether an earlier process of it has died.

        Args:
            home: its process, for people.
            was_restarted: whether Ray says so. The earlier process may have died before it had called this.
        """
        old_home = self._homes.get(actor)
        self._homes[actor] = home
        block = self._doing.pop(actor, None)
        sample = self._samples.pop(actor, None)
        if old_home is None:
            if was_restarted:
                self.note(
                    f"a transform actor died in its start, and was restarted ({home})",
                    "actor_died",
                )
            # the pool begins only once an actor is known, and this one does not call again
            self._remember(at_once=True)
            return was_restarted
        work = "between two blocks"
        if block is not None:
            work = f"in {_named(block)}"
            history = self._histories.setdefault(block, _History())
            history.deaths += 1
            history.all_deaths += 1
            begun_us = self._began_us.get(actor, clock_us())
            add_slice("died", begun_us, clock_us(), block, f"lost work, {old_home}")
            if sample is not None:
                position, index = sample
                work = f"in {position}, at its sample {index}"
                history.at_sample[index] += 1
                if history.at_sample[index] == _DEATHS_AT_A_SAMPLE:
                    self._bad[_split(position)].add(index)
                    history.bad_in[position] += 1
                    history.deaths = 0
        self.note(
            f"a transform actor died {work} ({old_home}), and was restarted ({home})",
            "actor_died",
        )
        return True

    def block_started(
        self, actor: str, micro_batches: list[str], process: Process | None = None
    ) -> Orders:
        """An actor begins a block of these micro-batches, in this process."""
        self._watches(actor, process)
        self._doing[actor] = block = tuple(micro_batches)
        self._began_us[actor] = clock_us()
        self._samples.pop(actor, None)
        history = self._histories.get(block)
        bad = tuple(sorted(self._bad[_split(block[0])]))
        if history is None:
            return Orders(bad=bad)
        error = ""
        if (
            history.deaths >= self._max_attempts
            or max(history.bad_in.values(), default=0) > self._max_attempts
        ):
            num_bad = history.bad_in.total()
            if num_bad:
                blame = f"{num_bad} samples are"
            else:
                blame = "no single sample is"
            error = (
                f"{history.all_deaths} transform actors have died in {_named(block)}, the last one before "
                f"{self._homes.get(actor, '')}; {blame} to blame: {_LOOK}, or lower plan.micro_batch_size"
            )
        return Orders(careful=True, bad=bad, error=error)

    def announce_sample(self, actor: str, position: str, index: int) -> None:
        """A careful actor is about to decode and transform a sample of a micro-batch, or a substitute."""
        self._samples[actor] = position, index

    def block_finished(self, actor: str) -> None:
        """A careful actor has finished its block."""
        self._doing.pop(actor, None)
        self._samples.pop(actor, None)

    def reader_started(
        self, task: str, share: str, process: Process | None = None
    ) -> bool:
        """A reader begins a share of the schedule; returns whether it was restarted, and must say what it reads.

        Args:
            task: its id, which is the same when it is restarted.
        """
        last_read = self._reading.get(task)
        self._reading[task] = ""
        self._watches(task, process)
        if last_read is None:
            return False
        if last_read:
            self._deaths_reading[last_read] += 1
        work = f" while it read {last_read}" if last_read else ""
        self.note(
            f"the reader of {share} died{work}, and was restarted", "reader_restarted"
        )
        return True

    def block_measured(self, split: str, seconds: float, num_bytes: int) -> None:
        """Record that an actor has made a block: the seconds and bytes of a micro-batch."""
        self._seconds[split].append(seconds)
        self._num_bytes[split].append(num_bytes)

    def split_remembered(self, split: Split) -> None:
        """Record that micro-batches of a split are remembered, so that later epochs need not make them."""
        self._remembered_splits.add(split)
        self._remember()

    def sizes(
        self, task: str, max_size: int, max_bytes: int, max_bytes_remembered: int
    ) -> dict[Split, int]:
        """Return the micro-batches per block of a reader's task, by split.

        Args:
            max_size: limit from its share.
            max_bytes: most bytes of a block.
            max_bytes_remembered: most bytes of a block of a split that is remembered.
        """
        if task not in self._sizes:
            splits: tuple[Split, ...] = ("train", "val")
            self._sizes[task] = {
                split: min(max_size, self._size(split, max_bytes, max_bytes_remembered))
                for split in splits
            }
            self._remember()
            logger.debug("%s micro-batches in a block from now on", self._sizes[task])
        return self._sizes[task]

    def _size(self, split: Split, max_bytes: int, max_bytes_remembered: int) -> int:
        num_bytes = self._num_bytes[split]
        size = fitting(self._seconds[split], num_bytes, max_bytes)
        if num_bytes and split in self._remembered_splits:
            most = max(size, max_bytes_remembered // max(1, *num_bytes))
            size = min(size * REMEMBERED_FACTOR, most)
        return size

    def announce_read(self, task: str, reading: str) -> str:
        """A reader is about to read something: a row group, for a micro-batch; returns why it must not, or ""."""
        self._reading[task] = reading
        self._remember()
        deaths = self._deaths_reading[reading]
        if deaths < self._max_attempts:
            return ""
        return (
            f"a reader has died {deaths} times while it read {reading}: {_LOOK}; check the file with `raypipe "
            "verify`, or convert it again with smaller row groups"
        )

    def reader_finished(self, task: str) -> None:
        """A reader has finished its share; if it runs again, its results were lost."""
        self._reading.pop(task, None)
        self._watch.remove(task)
        self._remember()

    def head_extends(self, num: int) -> tuple[int, bool, bytes]:
        """Rank 0 makes so many micro-batches itself; returns what holds, as `takeover`."""
        self._takeover.extend(num)
        self._remember()
        return self._takeover.state

    def head_ends(self, num: int) -> tuple[int, bool, bytes]:
        """A rank makes no more than so many itself; returns what holds, as `takeover`."""
        self._takeover.end(num)
        self._remember()
        return self._takeover.state

    def takeover(self) -> tuple[int, bool, bytes]:
        """Return where the pool takes over, whether that is final, and the pickled error of a pool that failed."""
        return self._takeover.state

    def pool_failed(self, error: bytes) -> None:
        """The pool has failed with a pickled error: all ranks end with it, also those in their head start."""
        self._takeover.error = self._takeover.error or error
        self._remember()

    def pool_begins(self) -> int | None:
        """Return how many micro-batches of each rank come before the pool's; None = no actor has started yet."""
        if not self._homes:
            return None
        if not self._takeover.is_final:
            self._takeover.fix()
            self._remember(at_once=True)
        return self._takeover.num

    def share(self, message: bytes) -> None:
        """Keep rank 0's message for the other ranks."""
        self._shared = message
        self._remember()

    def shared(self) -> bytes:
        """Return rank 0's message; empty = there is none yet."""
        return self._shared

    def rank_moves(self, rank: int, world_size: int, move: Move) -> None:
        """A rank says where it goes, see `Moves`."""
        self._moves = self._moves or Moves(world_size)
        if warning := self._moves.says(rank, move):
            self.note(warning)
        self._remember()

    def answer(self, rank: int, is_last: bool = False) -> Answer:
        """Answer a rank that would leave the execution, see `Moves`."""
        if self._moves:
            answer = self._moves.answer(rank, is_last)
        else:
            answer = "read on"
        if answer == "read on":  # the others are not to leave, whoever answers them
            self._remember()
        return answer

    def rank_done(self, rank: int) -> int:
        """A rank will read no more; returns how many have said so."""
        self._left.add(rank)
        self._waits.pop(rank, None)
        self._remember()
        return len(self._left)

    def note(self, event: str, kind: str = "other") -> None:
        """Record a fault, or that it was recovered from, for the log and the metrics."""
        logger.warning("%s", event, extra={"values": {"fault": kind}})
        happened("fault", event)
        self._metrics.add({"stream_faults_total": 1}, kind=kind)
        self._record("fault", event)

    def packages_differ(self, event: str) -> None:
        """Record that a node has other packages than the driver, once for all of its actors."""
        if ("fault", event) not in self._events:
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

    def traced(self, chunk: Chunk) -> TraceAnswer:
        """Take a process's events for the trace."""
        return self._trace.add(chunk, self._process)

    def take_trace(self) -> list[Chunk]:
        """Remove the trace's events so far, for rank 0, which writes them."""
        return self._trace.take(self._process)

    def end_trace(self) -> None:
        """Tell all processes, as they send their next events, that no more are wanted."""
        self._trace.end()

    def _record(self, kind: str, event: str) -> None:
        self._events.append((kind, event))
        if len(self._events) > _MAX_EVENTS:
            del self._events[:_FORGOTTEN]
            self._first_event += _FORGOTTEN
        self._remember()

    def describe_progress(self) -> str:
        """State of the stream, by its executions, or by its processes before the first batch."""
        if self._stands:
            return "; ".join(self._stands.values())
        started = f"{len(self._homes)} transform actor{'s have' if len(self._homes) > 1 else ' has'} started"
        if self._doing:
            return f"{started}, and {len(self._doing)} of them make{'s' * (len(self._doing) == 1)} blocks"
        if self._homes:
            return f"{started}, and {'so has the reader' if self._reading else 'the reader has not'}"
        if self._reading:
            reader = "and the reader has"
        else:
            reader = "nor has the reader"
        return f"no transform actor has started yet, {reader}"

    def events(self, first: int) -> list[tuple[str, str]]:
        """The events from number `first` on, in order: kind, "fault" or "scale", and text."""
        return self._events[max(0, first - self._first_event) :]


def _named(block: tuple[str, ...]) -> str:
    return block[0] if len(block) == 1 else f"{block[0]} to {block[-1]}"


def _split(position: str) -> str:
    return position.partition("-")[0]


def start_supervisor(
    run: str = "", log_format: LogFormat = "text", watches: bool = True
) -> Any:
    """A handle of a Supervisor that runs as an actor, on the node of the caller."""
    actor = ray.remote(Supervisor).options(
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        scheduling_strategy=on_this_node(),
    )
    return actor.remote(MAX_ATTEMPTS, run, log_format, watches)


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
            message = ray.get(supervisor.shared.remote(), timeout=_PATIENCE_S)
            if message and not iterators:
                iterators, _ = ray.cloudpickle.loads(message)
        for actor in {*filter(None, map(coordinator_of, iterators)), supervisor}:
            ray.kill(actor)
        forget(supervisor)
