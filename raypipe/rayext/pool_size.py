"""How many transform actors a stream should have: a pure rule over what is seen of it, second by second.

    the ranks wait, and the actors are busy        the pool grows by a factor
    the ranks do not wait, and actors are idle     it shrinks to those that are busy, with some to spare

A pool that has filled the buffer while the trainers are busy is not waited for, so it never grows, whatever CPU it
uses; one that is waited for although its actors are idle (a slow reader, a straggler) would not be helped by more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Share of the actors that must be at work for more of them to help.
_BUSY = 0.8
# Share of the time for which ranks may wait, and still be said not to.
_CALM = 0.05
# Actors that are left beside the busy ones when the pool shrinks. Busy ones are λ·t by Little's law; how many are
# busy at once varies about that.
_SPARE = 1.25


@dataclass(frozen=True)
class SizeRules:
    """What bounds and paces a pool; see PoolConfig, which names them.

    Attributes:
        min_actors, max_actors: bounds.
        grow_wait: share of the time for which ranks may wait before the pool grows.
        grow_after_s: seconds over which waiting is measured, and the least between two growths.
        grow_factor: the pool grows to at most so many times its size.
        shrink_after_s: the cool-down: seconds without waiting before the pool shrinks, and between two times.
    """

    min_actors: int
    max_actors: int
    grow_wait: float = 0.5
    grow_after_s: float = 5.0
    grow_factor: float = 2.0
    shrink_after_s: float = 60.0


@dataclass(frozen=True)
class Decision:
    """A new size, and why."""

    size: int
    reason: str


class _Window:
    """Means over the time since it began."""

    def __init__(self, now: float) -> None:
        self.since = now
        self.seconds = self._waiting = self._active = self._running = 0.0

    def add(self, seconds: float, waiting: float, active: int, running: int) -> None:
        self.seconds += seconds
        self._waiting += waiting * seconds
        self._active += active * seconds
        self._running += running * seconds

    @property
    def waiting(self) -> float:
        return self._waiting / self.seconds

    @property
    def active(self) -> float:
        return self._active / self.seconds

    @property
    def busy(self) -> float:
        return self._active / self._running if self._running else 0.0


class PoolSizer:
    """Decides on a pool's size.

    Args:
        rules: bounds and pace.
        now: seconds of a monotonic clock.
    """

    def __init__(self, rules: SizeRules, now: float) -> None:
        self._rules = rules
        self._at = now
        self._growth, self._shrinkage = _Window(now), _Window(now)

    def observe(self, now: float, *, waiting: float, active: int, running: int, pending: int) -> Decision | None:
        """What is seen at a moment, and held since the last one; returns a new size where there should be one.

        Args:
            now: seconds of a monotonic clock.
            waiting: share of the ranks for which no finished micro-batch is there, in [0, 1].
            active: actors at work.
            running: actors that have started.
            pending: actors that have not yet, for want of a node or of time.
        """
        for window in (self._growth, self._shrinkage):
            window.add(now - self._at, waiting, active, running)
        self._at = now
        rules, size = self._rules, running + pending
        decision = None
        if self._growth.seconds >= rules.grow_after_s:
            growth, self._growth = self._growth, _Window(now)
            if growth.waiting > rules.grow_wait:
                self._shrinkage = _Window(now)
                if not pending and growth.busy > _BUSY and size < rules.max_actors:
                    grown = min(rules.max_actors, max(size + 1, math.floor(size * rules.grow_factor)))
                    decision = Decision(
                        grown,
                        f"the ranks waited for {growth.waiting:.0%} of the last {growth.seconds:.0f} s, and "
                        f"{growth.busy:.0%} of the actors were busy",
                    )
        if decision is None and self._shrinkage.seconds >= rules.shrink_after_s:
            calm, self._shrinkage = self._shrinkage, _Window(now)
            enough = max(rules.min_actors, math.ceil(calm.active * _SPARE))
            if enough < size and calm.waiting <= _CALM:
                decision = Decision(
                    enough,
                    f"the ranks waited for {calm.waiting:.0%} of the last {calm.seconds:.0f} s, in which "
                    f"{calm.active:.1f} actors were busy",
                )
        return decision
