"""How long a file system elsewhere is waited for, and a file system that waits: one policy for every operation.

    error                              tried again                               then
    503, 500, 429, time-outs,          RAYPIPE_STORAGE_PATIENCE_S (300)          OutageError, which counts
    connections, names of hosts                                                  as something that died
    401, 403, expired tokens           a fifth of that, with credentials that    the error, which is final
                                       are read anew each time
    404, no bucket, wrong names        not at all                                the error, which is final

Below it, pyarrow makes three attempts at a request: two seconds in all where each is answered, and a minute at
most where none is. A line tells when the waiting begins, one every half minute that it goes on, and one that it is
over.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import random
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.fs

from raypipe.errors import ConfigError, OutageError

logger = logging.getLogger(__name__)

T = TypeVar("T")

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
_counting = threading.Lock()


def progress() -> None:
    """Tell whoever watches over this process that it has a reason to take its time."""
    for call in on_progress:
        call()


def patience_s() -> float:
    """RAYPIPE_STORAGE_PATIENCE_S, seconds; ConfigError where it is no number."""
    text = os.environ.get("RAYPIPE_STORAGE_PATIENCE_S") or str(_PATIENCE_S)
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


def take_counts() -> dict[str, dict[str, float]]:
    """What this process has done since the last call: by operation its requests, seconds, bytes, retries, errors.

    Seconds include the waiting. A request counts once, with all its attempts; an error is one that was raised.
    """
    with _counting:
        taken: dict[str, dict[str, float]] = {}
        for (operation, name), value in _counts.items():
            taken.setdefault(operation, {})[name] = value
        _counts.clear()
    return taken


def count(operation: str, **amounts: float) -> None:
    with _counting:
        for name, amount in amounts.items():
            _counts[operation, name] += amount


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
            do: raises OSError or ArrowException where it fails. It may be called several times, from the second on
                in other threads.
            renew: makes `do` read credentials anew; None = it has none.

        Raises:
            OutageError: it has failed for `patience_s`, in ways that pass.
            OSError, ArrowException: it has failed in another way.
        """
        begun, waiting = time.monotonic(), None
        try:
            while True:
                try:
                    found = do() if waiting is None else _beside(do, waiting.tick)
                except (pa.ArrowException, OSError) as error:
                    is_denied = renew is not None and bool(_DENIED.search(str(error)))
                    if _impatient.get() or not (is_denied or _is_transient(error)):
                        raise
                    waiting = waiting or _Wait(self, operation, address)
                    waiting.after(error, is_denied)
                    if renew and (is_denied or _HIDDEN in str(error)):
                        renew()
                    count(operation, retries=1)
                else:
                    if waiting:
                        self._answered(waiting)
                    return found
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
            raise OSError(f"{self.reason}; refused for {limit:g} s, though they were read anew") from error
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


class PatientFileSystem(pyarrow.fs.PyFileSystem):
    """A file system elsewhere, each of whose operations waits.

    To be tried again, what is written to `open_output_stream` stays in memory until it is closed; what `write` and
    `upload` are given is there anyway.

    Args:
        scheme, host: of its addresses.
        make: makes pyarrow's own, with the credentials of the moment.

    Raises:
        OSError, ArrowException, OutageError: it cannot be made.
    """

    def __init__(self, scheme: str, host: str, make: Callable[[str, str], pyarrow.fs.FileSystem]) -> None:
        self._made_by = scheme, host, make
        super().__init__(_Handler(scheme, host, make))
        self.handler.call("open", host, lambda inner: None)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._made_by

    @property
    def inner(self) -> pyarrow.fs.FileSystem:
        """pyarrow's own, which does not wait."""
        return self.handler.inner()

    def open_input_file(self, path: str) -> PatientInput:
        return PatientInput(self.handler, path)

    def read_by(self, path: str, read: Callable[[pa.NativeFile], T]) -> T:
        """What `read` makes of an object, which is opened again for each attempt."""

        def do(inner: pyarrow.fs.FileSystem) -> T:
            with inner.open_input_file(path) as file:
                return read(file)

        return self.handler.call("read", path, do)

    def write(self, path: str, content: bytes | memoryview) -> None:
        """Write an object, which is there once it is written whole."""
        self.handler.write(path, content)

    def upload(self, local: str, path: str) -> None:
        """Copy a local file, or a folder with all that is in it."""
        self.handler.call("write", path, lambda inner: upload(local, inner, path))


def upload(local: str, filesystem: pyarrow.fs.FileSystem, path: str) -> None:
    """Copy a local file, or a folder with all that is in it, to a file system."""
    if isinstance(filesystem, PatientFileSystem):
        filesystem.upload(local, path)
        return
    here = pyarrow.fs.LocalFileSystem()
    # One thread, as Ray Train does for S3: uploads take threads of the same pool.
    pyarrow.fs.copy_files(
        local, path, source_filesystem=here, destination_filesystem=filesystem, use_threads=False
    )


class PatientInput(io.RawIOBase):
    """An object, open for reading; threads may call `read_at` at one time."""

    def __init__(self, handler: _Handler, path: str) -> None:
        self._handler, self._path, self._at = handler, path, 0
        self._opened: tuple[Any, Any] = (None, None)  # by which file system, and the file
        self._size: int = handler.call("open", path, lambda inner: self._native(inner).size())

    def _native(self, inner: pyarrow.fs.FileSystem) -> pa.NativeFile:
        opened_by, file = self._opened
        if opened_by is not inner:  # that has other credentials
            file = inner.open_input_file(self._path)
            self._opened = inner, file
        return file

    def size(self) -> int:
        return self._size

    def metadata(self) -> Any:
        return self._handler.call("open", self._path, lambda inner: self._native(inner).metadata())

    def read_at(self, num_bytes: int, start: int) -> bytes:
        """Bytes from a place on, fewer at the end."""
        data: bytes = self._handler.call(
            "read", self._path, lambda inner: self._native(inner).read_at(num_bytes, start)
        )
        count("read", bytes=len(data))
        return data

    def read(self, num_bytes: int | None = -1) -> bytes:
        left = max(0, self._size - self._at)
        data = self.read_at(left if num_bytes is None or num_bytes < 0 else min(num_bytes, left), self._at)
        self._at += len(data)
        return data

    def seek(self, at: int, whence: int = os.SEEK_SET) -> int:
        self._at = at + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed and (file := self._opened[1]):
            file.close()
        super().close()


class _Output:
    """What becomes an object when it is closed, as `pa.PythonFile` writes it."""

    def __init__(self, handler: _Handler, path: str) -> None:
        self._handler, self._path, self._content, self.closed = handler, path, bytearray(), False

    def write(self, data: bytes) -> int:
        self._content += data
        return len(data)

    def tell(self) -> int:
        return len(self._content)

    def flush(self) -> None: ...

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._handler.write(self._path, memoryview(self._content))


class _Handler(pyarrow.fs.FileSystemHandler):
    """What pyarrow calls; see `PatientFileSystem`."""

    def __init__(self, scheme: str, host: str, make: Callable[[str, str], pyarrow.fs.FileSystem]) -> None:
        self._scheme, self._make = scheme, lambda: make(scheme, host)
        self._renew = None if host.startswith("anonymous@") else self._forget
        self._made: pyarrow.fs.FileSystem | None = None
        self._patience, self._lock = Patience(), threading.Lock()

    def inner(self) -> pyarrow.fs.FileSystem:
        with self._lock:
            self._made = self._made or self._make()
            return self._made

    def _forget(self) -> None:
        self._made = None

    def call(self, operation: str, path: str, do: Callable[[pyarrow.fs.FileSystem], T]) -> T:
        return self._patience.call(operation, f"{self._scheme}://{path}", lambda: do(self.inner()), self._renew)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Handler) and self.inner().equals(other.inner())

    def get_type_name(self) -> str:
        return self._scheme

    def normalize_path(self, path: str) -> str:
        return self.inner().normalize_path(path)

    def get_file_info(self, paths: list[str]) -> Any:
        return self.call("info", paths[0], lambda inner: inner.get_file_info(paths))

    def get_file_info_selector(self, selector: pyarrow.fs.FileSelector) -> Any:
        return self.call("list", selector.base_dir, lambda inner: inner.get_file_info(selector))

    def create_dir(self, path: str, recursive: bool) -> None:
        self.call("write", path, lambda inner: inner.create_dir(path, recursive=recursive))

    def _delete(self, path: str, do: Callable[[pyarrow.fs.FileSystem], None]) -> None:
        attempts = itertools.count()

        def delete(inner: pyarrow.fs.FileSystem) -> None:
            is_first = not next(attempts)
            try:
                do(inner)
            except FileNotFoundError:
                if is_first:  # else an earlier one has done it, whose answer was lost
                    raise

        self.call("delete", path, delete)

    def delete_dir(self, path: str) -> None:
        self._delete(path, lambda inner: inner.delete_dir(path))

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self._delete(path, lambda inner: inner.delete_dir_contents(path, missing_dir_ok=missing_dir_ok))

    def delete_root_dir_contents(self) -> None:
        raise OSError("nobody deletes all that there is")

    def delete_file(self, path: str) -> None:
        self._delete(path, lambda inner: inner.delete_file(path))

    def move(self, src: str, dest: str) -> None:
        self.call("write", dest, lambda inner: inner.move(src, dest))

    def copy_file(self, src: str, dest: str) -> None:
        self.call("write", dest, lambda inner: inner.copy_file(src, dest))

    def open_input_file(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(PatientInput(self, path), mode="r")

    open_input_stream = open_input_file

    def write(self, path: str, content: bytes | memoryview) -> None:
        def write(inner: pyarrow.fs.FileSystem) -> None:
            with inner.open_output_stream(path) as stream:
                stream.write(content)

        self.call("write", path, write)
        count("write", bytes=len(content))

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        return pa.PythonFile(_Output(self, path), mode="w")

    def open_append_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        raise OSError("objects are written whole")
