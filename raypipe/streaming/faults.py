"""Deaths of a stream's actors and readers: their causes, and the next attempts. Pure.

A process that crashes or hangs on a sample would be restarted, and would crash again, forever. So actors
announce their work, and a restarted one asks for the history of its block:

    first death in a block             it is tried again, carefully: each sample is announced before it is touched
    second careful death at a sample   the sample is bad; the block is tried again without it
    `max_attempts` deaths without that,
    or more bad samples than that in
    one of its micro-batches           the run ends with one error

Deaths by other causes (a lost node, a kill) cost an attempt, and do not change the result.

A restarted reader also announces each read. A row group cannot be substituted, so
`max_attempts` deaths at one, for one micro-batch, end the run, with the file and the row group in the error.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_DEATHS_AT_A_SAMPLE = 2
_LOOK = "look for `out of memory` or a crash in the logs of Ray's workers (`ray logs`)"


@dataclass(frozen=True)
class Orders:
    """Instructions for an actor's work on a block.

    Attributes:
        careful: announce each sample before it is touched.
        bad: indices of samples of this split that have killed their process.
        error: reason for which the run must end; empty = it need not.
    """

    careful: bool = False
    bad: tuple[int, ...] = ()
    error: str = ""


NO_ORDERS = Orders()


class Work(NamedTuple):
    """Work of an actor.

    Attributes:
        home: its process, for people.
        block: its micro-batches.
        began_us: its begin, of `tracer.clock_us`.
        sample: micro-batch and index of the sample that it has announced.
    """

    home: str
    block: tuple[str, ...]
    began_us: float
    sample: tuple[str, int] | None = None


@dataclass
class _History:
    """The history of a block in which an actor has died: deaths since the last bad sample was found, and where."""

    deaths: int = 0
    all_deaths: int = 0
    at_sample: Counter[int] = field(default_factory=Counter)
    bad_in: Counter[str] = field(default_factory=Counter)  # micro-batch → number


class Faults:
    """Deaths of a stream's actors and readers. Its copies lack the blocks in work, which actors announce again.

    Args:
        max_attempts: most deaths at one block, see above.
    """

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._homes: dict[str, str] = {}  # actor → where it runs
        self._working: dict[str, Work] = {}  # actor → its work
        self._bad: dict[str, set[int]] = {}  # split → indices
        self._histories: dict[tuple[str, ...], _History] = {}
        # task of a reader → what it reads; empty = it has not told
        self._reading: dict[str, str] = {}
        self._deaths_reading: Counter[str] = Counter()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_working": {}}

    def work_of(self, actor: str) -> Work | None:
        """The block that an actor is at; None = none."""
        return self._working.get(actor)

    @property
    def has_actors(self) -> bool:
        """True once an actor has started."""
        return bool(self._homes)

    def actor_started(self, actor: str, home: str, was_restarted: bool) -> str:
        """An actor has started; return a sentence if an earlier process of it has died, else "".

        Args:
            home: its process, for people.
            was_restarted: whether Ray says so. The earlier process may have died before it had called this.
        """
        old_home = self._homes.get(actor)
        self._homes[actor] = home
        work = self._working.pop(actor, None)
        if old_home is None:
            died = f"a transform actor died in its start, and was restarted ({home})"
            return died if was_restarted else ""
        place = "between two blocks"
        if work:
            place = f"in {named(work.block)}"
            history = self._histories.setdefault(work.block, _History())
            history.deaths += 1
            history.all_deaths += 1
            if work.sample:
                position, index = work.sample
                place = f"in {position}, at its sample {index}"
                self._died_at(history, position, index)
        return (
            f"a transform actor died {place} ({old_home}), and was restarted ({home})"
        )

    def _died_at(self, history: _History, position: str, index: int) -> None:
        history.at_sample[index] += 1
        if history.at_sample[index] == _DEATHS_AT_A_SAMPLE:
            self._bad.setdefault(_split(position), set()).add(index)
            history.bad_in[position] += 1
            history.deaths = 0

    def block_started(
        self, actor: str, micro_batches: list[str], began_us: float
    ) -> Orders:
        """An actor begins a block of these micro-batches."""
        block = tuple(micro_batches)
        self._working[actor] = Work(self._homes.get(actor, ""), block, began_us)
        history = self._histories.get(block)
        bad = tuple(sorted(self._bad.get(_split(block[0]), ())))
        if history is None:
            return Orders(bad=bad)
        error = ""
        if (
            history.deaths >= self._max_attempts
            or max(history.bad_in.values(), default=0) > self._max_attempts
        ):
            num_bad = history.bad_in.total()
            blame = f"{num_bad} samples are" if num_bad else "no single sample is"
            error = (
                f"{history.all_deaths} transform actors have died in {named(block)}, the last one before "
                f"{self._homes.get(actor, '')}; {blame} to blame: {_LOOK}, or lower plan.micro_batch_size"
            )
        return Orders(careful=True, bad=bad, error=error)

    def announce_sample(self, actor: str, position: str, index: int) -> None:
        """A careful actor is about to touch a sample of a micro-batch, or a substitute."""
        if actor in self._working:
            work = self._working[actor]
            self._working[actor] = work._replace(sample=(position, index))

    def block_finished(self, actor: str) -> None:
        """A careful actor has finished its block."""
        self._working.pop(actor, None)

    def reader_started(self, task: str, share: str) -> str:
        """A reader begins a share of the schedule; return a sentence if it was restarted, else "".

        Args:
            task: its id, which is the same when it is restarted.
        """
        last_read = self._reading.get(task)
        self._reading[task] = ""
        if last_read is None:
            return ""
        if last_read:
            self._deaths_reading[last_read] += 1
        work = f" while it read {last_read}" if last_read else ""
        return f"the reader of {share} died{work}, and was restarted"

    def announce_read(self, task: str, reading: str) -> str:
        """A reader is about to read something: a row group, for a micro-batch; return why it must not, or ""."""
        self._reading[task] = reading
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

    def describe(self) -> str:
        """State of the stream's processes before its first batch."""
        actors = f"{len(self._homes)} started, {len(self._working)} at work"
        reader = "started" if self._reading else "not started"
        return f"transform actors: {actors}; reader: {reader}"


def named(block: tuple[str, ...]) -> str:
    """The name of a block, as people read it."""
    return block[0] if len(block) == 1 else f"{block[0]} to {block[-1]}"


def _split(position: str) -> str:
    return position.partition("-")[0]
