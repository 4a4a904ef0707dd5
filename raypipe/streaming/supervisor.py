"""What becomes of transform actors: who is at what, who died of what, and which sample it was.

A process that crashes or hangs on a sample would be restarted, and would crash again, for ever. So the actors tell
a supervisor what they begin, and ask it, once restarted, what is known of it:

    first death in a micro-batch       it is tried again, carefully: each sample is announced before it is touched
    second careful death at a sample   the sample is bad; the micro-batch is tried again without it
    `max_attempts` deaths without that,
    or more bad samples than that      the run ends with one error

Deaths by other causes (a lost node, a kill) cost an attempt, and change nothing in the result.

A reader that was restarted tells what it is about to read, too. There is no substitute for a row group, so
`max_attempts` deaths at one place of its share end the run, with the file and the row group in the error.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.logs import LogFormat, configure_logs
from raypipe.metrics.prometheus import Fault, FaultMetrics

logger = logging.getLogger(__name__)

_DEATHS_AT_A_SAMPLE = 2
# An execution passes on some 60 micro-batches/s, and each is announced to its Supervisor, which takes some 500/s.
_EXECUTIONS_EACH = 4
_MAX_EVENTS = 10_000
_PERIOD_S = 1.0
_PATIENCE_S = 5.0  # for the last events, at a run's end


@dataclass(frozen=True)
class Orders:
    """How an actor is to go about a micro-batch, or a reader about its share."""

    careful: bool = False  # announce each sample, or row group, before it is touched
    bad: tuple[int, ...] = ()  # indices of samples of this split that have killed their process
    error: str = ""  # why the run must end; empty = it need not
    place: int = 0  # of a reader: where it is to raise that error


@dataclass
class _History:
    """Of one micro-batch in which an actor has died: deaths since the last bad sample was found, and at which."""

    deaths: int = 0
    all_deaths: int = 0
    at_sample: Counter[int] = field(default_factory=Counter)
    num_bad: int = 0


@dataclass
class _Reader:
    """Of a share of the schedule: where its reader is, and at what, as far as it tells; deaths at one place."""

    place: int | None = None
    what: str = ""
    died_at: int | None = None
    deaths: int = 0


class Supervisor:
    """The ledger of one stream's faults. As an actor, see `start_supervisor`.

    Args:
        max_attempts: deaths that one micro-batch may cost, see above.
        run: name of the run, for metrics and logs.
        log: format of its log lines; empty = as this process has it.
        chief: handle of a Supervisor that keeps the events of this one with its own; None = they are kept here.
    """

    def __init__(
        self, max_attempts: int, run: str = "", log: LogFormat | Literal[""] = "", chief: Any = None
    ) -> None:
        if log:
            configure_logs(log, run=run)
        self._metrics = FaultMetrics(run)
        self._max_attempts, self._chief = max_attempts, chief
        self._homes: dict[str, str] = {}  # actor → where it runs
        self._doing: dict[str, str] = {}  # actor → micro-batch
        self._samples: dict[str, int] = {}  # actor → index, while it is careful
        self._bad: dict[str, set[int]] = {}  # split → indices
        self._histories: dict[str, _History] = {}
        self._leaving: set[str] = set()
        self._readers: dict[str, _Reader] = {}  # task → what it reads
        self._events: list[tuple[str, str]] = []

    def arrived(self, actor: str, home: str) -> bool:
        """An actor has started, in a process that people find by `home`; returns whether it was restarted."""
        known, self._homes[actor] = self._homes.get(actor), home
        at, sample = self._doing.pop(actor, None), self._samples.pop(actor, None)
        if known is None:
            return False
        if actor in self._leaving:
            self._leaving.discard(actor)
            logger.info("the transform actor of %s was recycled, and is now %s", known, home)
            return True
        self._died(known, home, at, sample)
        return True

    def _died(self, known: str, home: str, at: str | None, sample: int | None) -> None:
        work = "between two micro-batches"
        if at is not None:
            work = f"in {at}"
            history = self._histories.setdefault(at, _History())
            history.deaths += 1
            history.all_deaths += 1
            if sample is not None:
                work += f", at its sample {sample}"
                history.at_sample[sample] += 1
                if history.at_sample[sample] == _DEATHS_AT_A_SAMPLE:
                    self._bad.setdefault(_split(at), set()).add(sample)
                    history.num_bad += 1
                    history.deaths = 0
        self.note(f"a transform actor died {work} ({known}), and was restarted ({home})", "actor_died")

    def begins(self, actor: str, at: str) -> Orders:
        """An actor begins a micro-batch."""
        self._doing[actor] = at
        self._samples.pop(actor, None)
        history = self._histories.get(at)
        bad = tuple(sorted(self._bad.get(_split(at), ())))
        if history is None:
            return Orders(bad=bad)
        error = ""
        if history.deaths >= self._max_attempts or history.num_bad > self._max_attempts:
            blame = f"{history.num_bad} samples are" if history.num_bad else "no single sample is"
            error = (
                f"{history.all_deaths} transform actors have died in {at}, the last one before "
                f"{self._homes.get(actor, '')}; {blame} to blame: look for `out of memory` or a crash in the logs "
                "of Ray's workers (`ray logs`), lower plan.micro_batch, or raise pool.max_attempts"
            )
        return Orders(careful=True, bad=bad, error=error)

    def touches(self, actor: str, index: int) -> None:
        """A careful actor is about to decode and transform a sample of its micro-batch, or a substitute."""
        self._samples[actor] = index

    def ended(self, actor: str) -> None:
        """A careful actor has come through its micro-batch."""
        self._doing.pop(actor, None)
        self._samples.pop(actor, None)

    def leaves(self, actor: str) -> None:
        """An actor is about to end itself, to be restarted with fresh memory."""
        self._leaving.add(actor)
        self.ended(actor)

    def reads(self, task: str, share: str) -> Orders:
        """A reader, by its task's id, the same when it is restarted, begins a share of the schedule."""
        reader = self._readers.get(task)
        if reader is None:
            self._readers[task] = _Reader()
            return Orders()
        # Where it died first, it has not told.
        reader.deaths = reader.deaths + 1 if reader.died_at in (None, reader.place) else 1
        work = f" while it read {reader.what}" if reader.what else ""
        self.note(f"the reader of {share} died{work}, and was restarted", "reader_restarted")
        error = ""
        if reader.place is not None and reader.deaths >= self._max_attempts:
            error = (
                f"a reader has died {reader.deaths} times, the last time{work}: look for `out of memory` or a "
                "crash in the logs of Ray's workers (`ray logs`); check the file by `raypipe inspect --verify`, "
                "ingest it again with smaller row groups, or raise pool.max_attempts"
            )
        orders = Orders(careful=True, error=error, place=reader.place or 0)
        reader.died_at, reader.place, reader.what = reader.place, None, ""
        return orders

    def reading(self, task: str, place: int, what: str) -> None:
        """A careful reader, so far in its share, is about to read something: a file and a row group."""
        reader = self._readers.get(task)
        if reader is not None:
            reader.place, reader.what = place, what

    def has_read(self, task: str) -> None:
        """A reader has come through its share; if it runs again, its results were lost."""
        self._readers.pop(task, None)

    def note(self, event: str, kind: Fault = "other") -> None:
        """Record what went wrong, or was mended, for the log and the metrics."""
        if self._chief is not None:
            self._chief.note.remote(event, kind)
            return
        logger.warning("%s", event, extra={"values": {"fault": kind}})
        self._metrics.happened(kind)
        self._record("fault", event)

    def scaled(self, event: str) -> None:
        """Record a decision on the pool's size."""
        if self._chief is not None:
            self._chief.scaled.remote(event)
            return
        logger.info("%s", event)
        self._record("scale", event)

    def _record(self, kind: str, event: str) -> None:
        if len(self._events) < _MAX_EVENTS:
            self._events.append((kind, event))

    def events(self, first: int) -> list[tuple[str, str]]:
        """The events from number `first` on, in order: kind, "fault" or "scale", and text."""
        return self._events[first:]


def _split(at: str) -> str:
    return at.partition("-")[0]


def start_supervisor(max_attempts: int, run: str = "", log: LogFormat = "text", chief: Any = None) -> Any:
    """A handle of a Supervisor that runs as an actor, on the node of the caller while that lives."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    actor = ray.remote(Supervisor).options(
        num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here
    )
    return actor.remote(max_attempts, run, log, chief)


def start_supervisors(max_attempts: int, run: str, log: LogFormat, chief: Any, executions: int) -> list[Any]:
    """The Supervisor of each of several executions, whose events all come to the chief."""
    others = [start_supervisor(max_attempts, run, log, chief) for _ in range((executions - 1) // _EXECUTIONS_EACH)]
    return [[chief, *others][index // _EXECUTIONS_EACH] for index in range(executions)]


class Follower:
    """Tells of each event of a stream within a second or two, whatever the stream waits for, until it is stopped.

    Args:
        supervisor: handle of the stream's; None = there are never any.
        tell: called with kind and text of each, see `Supervisor.events`, in a thread.
    """

    def __init__(self, supervisor: Any, tell: Callable[[str, str], None]) -> None:
        self._supervisor, self._tell = supervisor, tell
        self._num_told = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="raypipe-events", daemon=True)
        if supervisor is not None:
            self._thread.start()

    def _follow(self) -> None:
        while not self._stopped.wait(_PERIOD_S):
            self._pass_on(_PERIOD_S)
        self._pass_on(_PATIENCE_S)

    def _pass_on(self, wait_s: float) -> None:
        events: list[tuple[str, str]] = []
        with contextlib.suppress(ray.exceptions.RayError):  # the stream goes on without its chronicler
            events = ray.get(self._supervisor.events.remote(self._num_told), timeout=wait_s)
        self._num_told += len(events)
        for kind, text in events:
            self._tell(kind, text)

    def stop(self) -> None:
        """Tell of the last ones, and end."""
        self._stopped.set()
        if self._supervisor is not None:
            self._thread.join()
