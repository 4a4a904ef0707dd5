"""Threads of which one runs at a time: which one, and for how long, a seed decides.

What the standard library has for threads stands here once more, with the same meaning, as far as the device side
uses it. Each call is a point at which any other thread may go on, and nothing happens between two such points: a
schedule is a pure function of its seed. A timeout never passes.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class StuckError(RuntimeError):
    """No thread can go on, and no stream has work that could change that."""


class _Task:
    def __init__(self) -> None:
        self.go, self.until, self.done = threading.Semaphore(0), _always, False


def _always() -> bool:
    return True


class Host:
    """The threads of one simulated process, of which the caller's is the first.

    Args:
        rng: decides.
        advance: lets the device do something; True = also what it would rather do later. Says whether it did.
    """

    def __init__(self, rng: random.Random, advance: Callable[[bool], bool]) -> None:
        self._rng, self._advance = rng, advance
        self._running = _Task()
        self._tasks, self._stuck = [self._running], False
        # How often a thread is interrupted, and how much the device does in between: from never to all it can.
        self._restless, self._device = (
            rng.choice([0.02, 0.2, 0.6]),
            rng.choice([0.0, 0.2, 0.5, 0.9]),
        )

    def pause(self, until: Callable[[], bool] | None = None) -> None:
        """Anything may happen here, as long as `until` does not hold."""
        if self._stuck:
            raise StuckError
        while self._rng.random() < self._device and self._advance(False):
            pass
        if until is None and self._rng.random() > self._restless:
            return
        me, me.until = self._running, until or _always  # type: ignore[misc]
        if (other := self._next()) is not me:
            self._running = other
            other.go.release()
            assert me.go.acquire(timeout=600)
            if self._stuck:
                raise StuckError

    def _next(self) -> _Task:
        while not (ready := [task for task in self._tasks if task.until()]):
            if not self._advance(True):
                self._stuck = True
                for task in self._tasks:
                    task.go.release()
                raise StuckError
        return self._rng.choice(ready)

    def start(self, target: Callable[[], None]) -> _Task:
        """A thread that begins when it is its turn."""
        task = _Task()

        def run() -> None:
            task.go.acquire()
            try:
                if not self._stuck:
                    target()
            except StuckError:
                pass  # the others are told
            finally:
                task.done = True
                self._tasks.remove(task)
                if not self._stuck:
                    try:
                        self._running = self._next()
                        self._running.go.release()
                    except StuckError:
                        pass

        self._tasks.append(task)
        threading.Thread(target=run, daemon=True).start()
        self.pause()
        return task

    def names(self) -> dict[str, Any]:
        """What the modules of the device side import from the standard library, made of these threads."""
        made: dict[str, Any] = {}
        for kind in (_SimpleQueue, _Semaphore, _Event, _Thread, _Executor):
            made[kind.__name__.lstrip("_")] = lambda *args, kind=kind, **options: kind(
                self, *args, **options
            )
        threads = {name: made[name] for name in ("Semaphore", "Event", "Thread")}
        return {
            "SimpleQueue": made["SimpleQueue"],
            "threading": SimpleNamespace(**threads),
            "ThreadPoolExecutor": made["Executor"],
            "wait": lambda futures, timeout: [
                self.pause(lambda f=f: f.done) for f in futures
            ],  # type: ignore[misc]
        }


class _SimpleQueue:
    def __init__(self, host: Host) -> None:
        self._host, self._items = host, deque[Any]()

    def put(self, item: Any) -> None:
        self._items.append(item)
        del item
        self._host.pause()

    def get(self) -> Any:
        self._host.pause(lambda: bool(self._items))
        return self._items.popleft()


class _Semaphore:
    def __init__(self, host: Host, value: int) -> None:
        self._host, self._value = host, value

    def acquire(self) -> None:
        self._host.pause(lambda: self._value > 0)
        self._value -= 1

    def release(self) -> None:
        self._value += 1
        self._host.pause()


class _Event:
    def __init__(self, host: Host) -> None:
        self._host, self._set = host, False

    def set(self) -> None:
        self._set = True
        self._host.pause()

    def is_set(self) -> bool:
        self._host.pause()
        return self._set


class _Thread:
    def __init__(
        self, host: Host, target: Any, args: Any, daemon: bool, name: str
    ) -> None:
        self._host, self._call = host, (target, args)
        assert daemon and name

    def start(self) -> None:
        (target, args), self._call = self._call, (None, ())
        # The frame of a thread that has ended holds nothing.
        self._task = self._host.start(
            lambda call=[(target, args)]: (lambda f, a: f(*a))(*call.pop())
        )  # type: ignore[misc]

    def join(self, timeout: float) -> None:
        self._host.pause(lambda: self._task.done)


class _Future:
    def __init__(self, host: Host, call: Callable[[], Any]) -> None:
        self._host, self.call, self.done = host, call, False
        self.value: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.value = self.call()
        except Exception as error:
            self.error = error
        self.done = True

    def result(self) -> Any:
        self._host.pause(lambda: self.done)
        if self.error is not None:
            raise self.error
        return self.value

    def cancel(self) -> None:
        self.call = lambda: None


class _Executor:
    """With one thread."""

    def __init__(self, host: Host, threads: int, thread_name_prefix: str) -> None:
        assert threads == 1 and thread_name_prefix
        self._host, self._calls, self._ended = host, deque[_Future](), False
        host.start(self._work)

    def _work(self) -> None:
        while True:
            self._host.pause(lambda: bool(self._calls) or self._ended)
            if not self._calls:
                return
            self._calls[0].run()
            self._calls.popleft()

    def submit(self, call: Callable[[], Any]) -> _Future:
        self._calls.append(_Future(self._host, call))
        future = self._calls[-1]
        self._host.pause()
        return future

    def shutdown(self, wait: bool) -> None:
        self._ended = True
        self._host.pause()
