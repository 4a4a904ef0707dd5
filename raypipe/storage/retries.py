"""Retries for remote file systems: one policy for every operation, with counts of the operations.

    error                              retried for                               then raises
    503, 500, 429, timeouts,           RAYPIPE_STORAGE_PATIENCE_S (300)          OutageError, which counts
    connections, host names                                                      as a death
    401, 403, expired tokens           a fifth of that, with credentials that    the error, which is final
                                       are read again each time
    404, no bucket, wrong names        not at all                                the error, which is final

Below this policy, pyarrow makes three attempts at a request, which take two seconds if all are answered, and at
most a minute if none is. Logs show the start of a wait, its progress every half minute, and its end.
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
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, ClassVar, TypeVar

import pyarrow as pa

from raypipe.background import attended
from raypipe.environment import variable
from raypipe.errors import ConfigError, OutageError, RaypipeError

logger = logging.getLogger(__name__)

_S = TypeVar("_S")
_T = TypeVar("_T")

NUM_REQUESTS = 16
"""Concurrent requests of one store: each takes about 20 to 50 ms, and a store may have thousands of objects."""

_PATIENCE_S = 300.0
_DENIED_SHARE = 0.2  # fraction of the patience for denied credentials
_FIRST_S = 0.25
_LONGEST_S = 5.0  # pause before the second attempt, and the longest pause
_LOG_AFTER_S = 3.0
_LOG_EVERY_S = 30.0
_TICK_S = 0.5  # interval at which a pause calls `report_progress`, so that it is not counted as a slow sample

# Texts in the messages of pyarrow and the SDKs below it for transient errors.
_TRANSIENT = re.compile(
    r"HTTP status (408|425|429|5(?!01)\d\d)|SLOW_DOWN|INTERNAL_FAILURE|SERVICE_UNAVAILABLE|THROTTLING"
    r"|REQUEST_TIMEOUT|NETWORK_CONNECTION|UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED"
    r"|\b(429|50[0234]) [A-Z]|ServerBusy|timed? ?out|[Cc]onnection ?(reset|refused|aborted|closed|[Ee]rror)"
    r"|resolve host|name resolution",
)
# A HEAD request has no body, so an expired token is a bare 400.
_DENIED = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY_ID|INVALID_CLIENT_TOKEN_ID|SIGNATURE_DOES_NOT_MATCH|ExpiredToken"
    r"|HTTP status 40[013]|\b40[13] [A-Z]|PERMISSION_DENIED|UNAUTHENTICATED|OAuth2|DefaultAzureCredential"
)
# A reply longer than the requested range is dropped, so this error may hide a denial.
_HIDDEN = "Failed to flush response stream"
# Texts in an error's message → the remedy.
_ADVICE = {
    (
        "NO_SUCH_BUCKET",
        "not found. To create buckets",
    ): "create the bucket, or correct the address",
    ("NETWORK_CONNECTION",): "check the network, and AWS_ENDPOINT_URL if it is set",
    (
        "HTTP status 503",
        "SLOW_DOWN",
    ): "the server is down, or limits the request rate: use fewer nodes",
    (
        "ACCESS_DENIED",
        "INVALID_ACCESS_KEY_ID",
        "SIGNATURE_DOES_NOT_MATCH",
        "ExpiredToken",
        "HTTP status 403",
    ): ("check the credentials, which every node needs"),
    ("OAuth2", "DefaultAzureCredential"): (
        "check the credentials, which every node needs: GOOGLE_APPLICATION_CREDENTIALS or AZURE_STORAGE_KEY"
    ),
}

on_progress: list[Callable[[], None]] = []
"""Callbacks during a download, or a wait for storage or another process: this time is not a transform's."""

_NEVER = threading.Event()
_ALWAYS = threading.Event()
_ALWAYS.set()
# Set once this thread waits for no storage: of its `Threads`, or one of those two.
_given_up: ContextVar[threading.Event] = ContextVar("given up", default=_NEVER)


# operation → name of the count → count
_counts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
_counts_lock = threading.Lock()


def take_counts() -> dict[str, dict[str, float]]:
    """Return and reset this process's counts, by operation: requests, seconds, bytes, retries, errors.

    Seconds include waits. A request with all its attempts counts once; only raised errors count.
    """
    with _counts_lock:
        counts = {operation: dict(amounts) for operation, amounts in _counts.items()}
        _counts.clear()
    return counts


def count(operation: str, **amounts: float) -> None:
    with _counts_lock:
        for name, amount in amounts.items():
            _counts[operation][name] += amount


class _OutageClock:
    """Clock of the time in which this process waits for storage that does not answer.

    Several waits at one time count once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_waits = 0
        self._looked_s = 0.0
        self._seconds = 0.0

    def seconds(self, new_waits: int = 0) -> float:
        """Return the seconds so far; from now on there are so many more waits."""
        with self._lock:
            now_s = time.monotonic()
            if self._num_waits:
                self._seconds += now_s - self._looked_s
            self._looked_s = now_s
            self._num_waits += new_waits
            return self._seconds


_outages = _OutageClock()


def outages_s() -> float:
    """Return for how many seconds this process has waited, in all, for storage that did not answer."""
    return _outages.seconds()


def report_progress() -> None:
    """Call the callbacks of `on_progress`, to show that this process waits for a reason."""
    for call in on_progress:
        call()


def patience_s() -> float:
    """Return RAYPIPE_STORAGE_PATIENCE_S in seconds; raise ConfigError if it is not a number."""
    text = variable("RAYPIPE_STORAGE_PATIENCE_S") or str(_PATIENCE_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(
            f"RAYPIPE_STORAGE_PATIENCE_S must be a number of seconds, got {text!r}"
        )
    return seconds


@contextlib.contextmanager
def without_retries() -> Iterator[None]:
    """Context manager: no retries in this thread, for optional operations and those that are repeated soon."""
    token = _given_up.set(_ALWAYS)
    try:
        yield
    finally:
        _given_up.reset(token)


@contextlib.contextmanager
def tried_once() -> Iterator[None]:
    """Context manager for an optional operation: without retries, and without an error if storage fails."""
    with (
        contextlib.suppress(pa.ArrowException, OSError, RaypipeError),
        without_retries(),
    ):
        yield


_lost = threading.Event()  # set while this process waits for no storage
_LOST_S = 2.0  # limit of each request then


def stop_retries() -> None:
    """End all waits for storage in this process, and let none begin, until `allow_retries`."""
    _lost.set()


def allow_retries() -> None:
    """Wait for storage again, as `patience_s` says."""
    _lost.clear()


def error_reason(error: BaseException) -> str:
    """Return the reason of a file system's error on one line, with a remedy if one is known."""
    reason = " ".join(str(error).split())
    for texts, advice in _ADVICE.items():
        if any(text in reason for text in texts):
            return f"{reason}; {advice}"
    return reason


def retried(
    operation: str,
    address: str,
    do: Callable[[], _T],
    renew: Callable[[], object] | None = None,
) -> _T:
    """Call `do` until it succeeds, and return its result.

    Args:
        operation: open, read, list, …; the name of its count.
        address: the address, for logs and errors.
        do: the operation, which raises if it fails. It may be called several times; retries run in other
            threads.
        renew: makes `do` read credentials again; None = no credentials.

    Raises:
        OutageError: `do` failed with transient errors for `patience_s`.
        OSError, ArrowException: `do` failed with any other error.
    """
    begun = time.monotonic()
    wait: _Wait | None = None
    try:
        while True:
            try:
                if wait is None and not _lost.is_set():
                    answer = do()
                else:
                    answer = _attended(do, wait.tick if wait else report_progress)
                break
            except (OSError, pa.ArrowException) as error:
                is_denied = renew is not None and bool(_DENIED.search(str(error)))
                if _is_given_up() or not (is_denied or _is_transient(error)):
                    raise
                if wait is None:
                    wait = _Wait(operation, address)
                    _outages.seconds(new_waits=1)
                wait.after(error, is_denied)
                if renew and (is_denied or _HIDDEN in str(error)):
                    renew()
                count(operation, retries=1)
        if wait:
            wait.log_end()
        return answer
    except BaseException as error:
        count(operation, errors=not isinstance(error, FileNotFoundError))
        raise
    finally:
        if wait:
            _outages.seconds(new_waits=-1)
        count(operation, requests=1, seconds=time.monotonic() - begun)


_log_lock = threading.Lock()


class _Wait:
    """A failed operation that is being retried.

    Attributes:
        logged_s: when a wait of this process was last logged, by `time.monotonic`; None = not since the last end.
    """

    logged_s: ClassVar[float | None] = None

    def __init__(self, operation: str, address: str) -> None:
        self._operation = operation
        self._address = address
        self._since_s = time.monotonic()
        self._denied_s = 0.0
        self._attempts = 0
        self._deadline_s = 0.0
        self._reason = ""

    def after(self, error: BaseException, is_denied: bool) -> None:
        """Sleep until the next attempt; raise if there is none."""
        now_s = time.monotonic()
        limit_s = patience_s() * (_DENIED_SHARE if is_denied else 1)
        self._denied_s = (self._denied_s or now_s) if is_denied else 0.0
        self._deadline_s = (self._denied_s or self._since_s) + limit_s
        self._reason = error_reason(error)
        if now_s >= self._deadline_s and is_denied:
            raise OSError(
                f"{self._reason}; denied for {limit_s:g} s, with credentials read again each time"
            ) from error
        if now_s >= self._deadline_s:
            raise OutageError(
                f"{self._address} was unavailable for {limit_s:g} s (RAYPIPE_STORAGE_PATIENCE_S): "
                f"{self._operation}: {self._reason}"
            ) from error
        pause_s = min(_LONGEST_S, _FIRST_S * 2**self._attempts)
        self._attempts += 1
        until_s = min(now_s + pause_s * random.uniform(0.5, 1), self._deadline_s)
        while (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _TICK_S))
            self.tick()
            if _is_given_up():
                raise error

    def tick(self) -> None:
        """Call `report_progress`, and log the wait if it is time."""
        report_progress()
        now_s = time.monotonic()
        with _log_lock:
            last_s = _Wait.logged_s or -_LOG_EVERY_S
            if now_s < max(self._since_s + _LOG_AFTER_S, last_s + _LOG_EVERY_S):
                return
            _Wait.logged_s = now_s
        logger.warning(
            "waiting for %s, for up to %.0f s more (RAYPIPE_STORAGE_PATIENCE_S): %s: %s",
            self._address,
            max(0.0, self._deadline_s - now_s),
            self._operation,
            self._reason,
        )

    def log_end(self) -> None:
        """Log that the storage answers, if the wait was logged."""
        with _log_lock:
            is_logged = _Wait.logged_s is not None
            _Wait.logged_s = None
        if is_logged:
            waited_s = time.monotonic() - self._since_s
            logger.warning("%s answers again, after %.0f s", self._address, waited_s)


class Threads(ThreadPoolExecutor):
    """Threads for requests to a file system; Ctrl-C or an error in the `with` statement ends their waits."""

    def __init__(self, num: int) -> None:
        self._given_up = threading.Event()
        super().__init__(num, initializer=_given_up.set, initargs=(self._given_up,))

    def give_up(self) -> None:
        """Start no more requests, and end all waits."""
        self._given_up.set()
        self.shutdown(wait=False, cancel_futures=True)

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind:
            self.give_up()
        super().__exit__(kind, *error)


def in_threads(
    do: Callable[[_S], _T], items: Iterable[_S], num: int = NUM_REQUESTS
) -> list[_T]:
    """Return `do(item)` for each item, in order, from several threads."""
    work = list(items)
    if len(work) < 2:
        return list(map(do, work))
    with Threads(min(num, len(work))) as pool:
        return list(pool.map(do, work))


def _is_given_up() -> bool:
    return _lost.is_set() or _given_up.get().is_set()


def _is_transient(error: BaseException) -> bool:
    return isinstance(error, ConnectionError | TimeoutError) or (
        getattr(error, "errno", None) is None and bool(_TRANSIENT.search(str(error)))
    )


def _attended(do: Callable[[], _T], tick: Callable[[], None]) -> _T:
    """Call `do` in another thread; leave it soon if the process is about to end."""
    begun = time.monotonic()

    def look() -> None:
        tick()
        if _lost.is_set() and time.monotonic() - begun > _LOST_S:
            raise TimeoutError(
                f"no answer within {_LOST_S:g} s, and the process is about to end"
            )

    return attended("raypipe-storage", do, look)
