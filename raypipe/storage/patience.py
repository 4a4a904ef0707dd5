"""How long a file system elsewhere is waited for: one policy for every operation; and counts of these.

    error                              tried again                               then
    503, 500, 429, time-outs,          RAYPIPE_STORAGE_PATIENCE_S (300)          OutageError, which counts
    connections, names of hosts                                                  as something that died
    401, 403, expired tokens           a fifth of that, with credentials that    the error, which is final
                                       are read again each time
    404, no bucket, wrong names        not at all                                the error, which is final

Below it, pyarrow makes three attempts at a request: two seconds in all where each is answered, and a minute at
most where none is. A line tells when the waiting begins, one every half minute that it goes on, and one that it is
over.
"""

from __future__ import annotations

import contextlib
import logging
import random
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from typing import Any, TypeVar

import pyarrow as pa

from raypipe.environment import variable
from raypipe.errors import ConfigError, OutageError, RaypipeError

logger = logging.getLogger(__name__)

S = TypeVar("S")
T = TypeVar("T")

NUM_REQUESTS = 16
"""Of one store, under way at a time: each takes some 20 to 50 ms, and a store may have thousands of objects."""

_PATIENCE_S = 300.0
_DENIED_SHARE = 0.2  # of it, for credentials
_FIRST_S, _LONGEST_S = 0.25, 5.0  # before the second attempt, and before any later one
_TELL_AFTER_S, _TELL_EVERY_S = 3.0, 30.0
_TICK_S = 0.5  # in which a wait shows that it is none of the sample's

# Parts of the texts in which pyarrow, the SDKs below it and the Hub's client tell of what passes.
_TRANSIENT = re.compile(
    r"HTTP status (408|425|429|5(?!01)\d\d)|SLOW_DOWN|INTERNAL_FAILURE|SERVICE_UNAVAILABLE|THROTTLING"
    r"|REQUEST_TIMEOUT|NETWORK_CONNECTION|UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED"
    r"|\b(429|50[0234]) [A-Z]|ServerBusy|timed? ?out|[Cc]onnection ?(reset|refused|aborted|closed|[Ee]rror)"
    r"|Connect(ion)?Error|ReadTimeout|RemoteProtocolError|resolve host|name resolution",
)
# HEAD has no body: an expired token is then a bare 400.
_DENIED = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY_ID|INVALID_CLIENT_TOKEN_ID|SIGNATURE_DOES_NOT_MATCH|ExpiredToken"
    r"|HTTP status 40[013]|\b40[13] [A-Z]|PERMISSION_DENIED|UNAUTHENTICATED|OAuth2|DefaultAzureCredential"
)
# A reason that is longer than what was asked for does not fit, and may be a denial.
_HIDDEN = "Failed to flush response stream"
# Parts of an error's text → what to do about it.
_ADVICE = {
    ("NO_SUCH_BUCKET", "not found. To create buckets"): "make the bucket, or mend the address",
    ("NETWORK_CONNECTION",): "check the network, and AWS_ENDPOINT_URL if it is set",
    ("HTTP status 503", "SLOW_DOWN"): "the server is down, or asks for fewer requests: use fewer nodes",
    ("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", "ExpiredToken", "HTTP status 403"): (
        "check the credentials, which every node needs"
    ),
    ("401 Client Error", "403 Client Error"): "check HF_TOKEN, which every node needs",
    ("OAuth2", "DefaultAzureCredential"): (
        "check the credentials, which every node needs: GOOGLE_APPLICATION_CREDENTIALS or AZURE_STORAGE_KEY"
    ),
}

on_progress: list[Callable[[], None]] = []
"""Called while a download, or a wait for storage or another process, goes on; such time is no transform's."""

_impatient: ContextVar[bool] = ContextVar("impatient", default=False)
_given_up: ContextVar[threading.Event | None] = ContextVar("given up", default=None)  # of the thread's `Threads`


_counts: dict[tuple[str, str], float] = defaultdict(float)  # by operation and what is counted
_counts_lock = threading.Lock()


def take_counts() -> dict[str, dict[str, float]]:
    """What this process has done since the last call: by operation its requests, seconds, bytes, retries, errors.

    Seconds include the waiting. A request counts once, with all its attempts; an error is one that was raised.
    """
    with _counts_lock:
        operations: dict[str, dict[str, float]] = {}
        for (operation, name), amount in _counts.items():
            operations.setdefault(operation, {})[name] = amount
        _counts.clear()
    return operations


def count(operation: str, **amounts: float) -> None:
    with _counts_lock:
        for name, amount in amounts.items():
            _counts[operation, name] += amount


def progress() -> None:
    """Tell whoever watches over this process that it has a reason to take its time."""
    for call in on_progress:
        call()


def patience_s() -> float:
    """RAYPIPE_STORAGE_PATIENCE_S, seconds; ConfigError where it is no number."""
    text = variable("RAYPIPE_STORAGE_PATIENCE_S") or str(_PATIENCE_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"RAYPIPE_STORAGE_PATIENCE_S must be a number of seconds, got {text!r}")
    return seconds


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Within, in this thread, nothing is waited for: for what can be left out, or is tried again soon."""
    token = _impatient.set(True)
    try:
        yield
    finally:
        _impatient.reset(token)


def one_line(error: BaseException) -> str:
    """The reason that a file system gives, with what to do about it where that is known."""
    reason = " ".join(str(error).split())
    advice = next((advice for parts, advice in _ADVICE.items() if any(part in reason for part in parts)), "")
    return f"{reason}; {advice}" if advice else reason


class Patience:
    """Waits for one file system, for all threads of a process, whose lines are those of one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told_at: float | None = None

    def call(
        self, operation: str, address: str, do: Callable[[], T], renew: Callable[[], object] | None = None
    ) -> T:
        """What `do` returns, as soon as it does.

        Args:
            operation: open, read, list, …; it is counted under this name.
            address: what is asked for, in lines and errors.
            do: fails by an exception. It may be called several times, from the second on in other threads.
            renew: makes `do` read its credentials again; None = it has none.

        Raises:
            OutageError: it has failed for `patience_s`, in ways that pass.
            OSError, ArrowException: it has failed in another way.
        """
        begun, waiting = time.monotonic(), None
        try:
            while True:
                try:
                    answer = do() if waiting is None else _beside(do, waiting.tick)
                except RaypipeError:
                    raise
                except Exception as raised:
                    error = _as_oserror(raised)
                    is_denied = renew is not None and bool(_DENIED.search(str(error)))
                    if _impatient.get() or not (is_denied or _is_transient(error)):
                        raise error from (None if error is raised else raised)
                    waiting = waiting or _Wait(self, operation, address)
                    waiting.after(error, is_denied)
                    if renew and (is_denied or _HIDDEN in str(error)):
                        renew()
                    count(operation, retries=1)
                else:
                    if waiting:
                        self._answered(waiting)
                    return answer
        except BaseException as error:
            count(operation, errors=not isinstance(error, FileNotFoundError))
            raise
        finally:
            count(operation, requests=1, seconds=time.monotonic() - begun)

    def tell(self, waiting: _Wait) -> None:
        """Log a line if it is time for one."""
        now = time.monotonic()
        with self._lock:
            if now - waiting.since < _TELL_AFTER_S or now - (self._told_at or -_TELL_EVERY_S) < _TELL_EVERY_S:
                return
            self._told_at = now
        left = max(0.0, waiting.deadline - now)
        logger.warning(
            "waiting for %s, for %.0f s more at most (RAYPIPE_STORAGE_PATIENCE_S): %s: %s",
            *(waiting.address, left, waiting.operation, waiting.reason),
        )

    def _answered(self, waiting: _Wait) -> None:
        with self._lock:
            is_told, self._told_at = self._told_at is not None, None
        if is_told:
            logger.warning("%s answers again, after %.0f s", waiting.address, time.monotonic() - waiting.since)


class _Wait:
    """One operation that has failed, and is tried again."""

    def __init__(self, patience: Patience, operation: str, address: str) -> None:
        self._patience, self.operation, self.address = patience, operation, address
        self.since, self._denied_at, self._attempts = time.monotonic(), 0.0, 0
        self.deadline, self.reason = 0.0, ""

    def after(self, error: BaseException, is_denied: bool) -> None:
        """Return when it is time for the next attempt; raise where there is none."""
        now, limit = time.monotonic(), patience_s() * (_DENIED_SHARE if is_denied else 1)
        self._denied_at = (self._denied_at or now) if is_denied else 0.0
        self.deadline, self.reason = (self._denied_at or self.since) + limit, one_line(error)
        if now >= self.deadline and is_denied:
            raise OSError(f"{self.reason}; refused for {limit:g} s, though they were read again") from error
        if now >= self.deadline:
            raise OutageError(
                f"{self.address} was waited for in vain, for {limit:g} s (RAYPIPE_STORAGE_PATIENCE_S): "
                f"{self.operation}: {self.reason}"
            ) from error
        pause = min(_LONGEST_S, _FIRST_S * 2**self._attempts) * random.uniform(0.5, 1)
        self._attempts += 1
        until = min(now + pause, self.deadline)
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _TICK_S))
            self.tick()
            if (given_up := _given_up.get()) and given_up.is_set():
                raise error

    def tick(self) -> None:
        """Show that this process waits, and for what."""
        progress()
        self._patience.tell(self)


class Threads(ThreadPoolExecutor):
    """Threads that ask a file system; their waiting ends where Ctrl-C or an error leaves the `with` statement."""

    def __init__(self, num: int) -> None:
        self._given_up = threading.Event()
        super().__init__(num, initializer=_given_up.set, initargs=(self._given_up,))

    def give_up(self) -> None:
        """Begin nothing more, and wait for nothing more."""
        self._given_up.set()
        self.shutdown(wait=False, cancel_futures=True)

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind:
            self.give_up()
        super().__exit__(kind, *rest)


def _as_oserror(error: Exception) -> Exception:
    """The error as pyarrow's file systems raise it; the Hub's client has half a dozen types of its own."""
    if isinstance(error, OSError | pa.ArrowException):
        return error
    return OSError(f"{type(error).__name__}: {error}")


def in_threads(do: Callable[[S], T], items: Iterable[S], num: int = NUM_REQUESTS) -> list[T]:
    """What `do` makes of each item, in their order, several at a time."""
    work = list(items)
    if len(work) < 2:
        return list(map(do, work))
    with Threads(min(num, len(work))) as pool:
        return list(pool.map(do, work))


def _is_transient(error: BaseException) -> bool:
    return isinstance(error, ConnectionError | TimeoutError) or (
        getattr(error, "errno", None) is None and bool(_TRANSIENT.search(str(error)))
    )


def _beside(do: Callable[[], T], tick: Callable[[], None]) -> T:
    """Call it in another thread: a server that is silent keeps nobody from Ctrl-C, nor from a sign of life."""
    outcome = Future[T]()

    def run() -> None:
        try:
            outcome.set_result(do())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True, name="raypipe-storage").start()
    while not wait([outcome], _TICK_S).done:
        tick()
    return outcome.result()
