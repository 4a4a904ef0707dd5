"""Remote file systems that retry each operation, see `storage.retries`."""

from __future__ import annotations

import io
import itertools
import os
import shutil
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.fs

from raypipe.storage.retries import count, retried

_T = TypeVar("_T")

_CHUNK_BYTES = 8 << 20

MakeFileSystem = Callable[[str, str], pyarrow.fs.FileSystem]
"""Function that makes pyarrow's file system for a scheme and a host, with the current credentials."""


class RetryingFileSystem(pyarrow.fs.PyFileSystem):
    """A remote file system that retries each operation.

    For retries, a stream of `open_output_stream` stays in memory until it is closed; the
    handler's `write`, and `upload`, need no copy.

    Args:
        scheme, host: scheme and host of its addresses.
        make: see above.

    Raises:
        OSError, ArrowException, OutageError: it cannot be made.
    """

    def __init__(self, scheme: str, host: str, make: MakeFileSystem) -> None:
        self._made_by = scheme, host, make
        super().__init__(_Handler(scheme, host, make))
        self.handler.call("open", host, lambda inner: None)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._made_by

    def open_input_file(self, path: str) -> RetryingInput:
        return RetryingInput(self.handler, path)


def upload(local: str, filesystem: pyarrow.fs.FileSystem, path: str) -> None:
    """Copy a local file, or a folder with its contents, to a file system."""
    if isinstance(filesystem, RetryingFileSystem):
        filesystem.handler.call("write", path, lambda inner: upload(local, inner, path))
        return
    # pyarrow's copy_files is not used, since in pyarrow 26 it ignores objects that it cannot write.
    root = Path(local)
    if root.is_dir():
        filesystem.create_dir(path, recursive=True)
        for file in sorted(root.iterdir()):
            upload(str(file), filesystem, f"{path}/{file.name}")
        return

    with root.open("rb") as source:
        _write(filesystem, path, source)


def _write(inner: pyarrow.fs.FileSystem, path: str, source: Any) -> None:
    """Write a file that appears only when it is complete, as objects do: elsewhere under another name first."""
    are_objects = not isinstance(
        inner, pyarrow.fs.HadoopFileSystem | pyarrow.fs.PyFileSystem
    )
    unfinished = path
    if not are_objects:
        unfinished = f"{path}.{uuid.uuid4().hex}.part"
        inner.create_dir(path.rpartition("/")[0] or "/", recursive=True)
    # .gz would be compressed
    with inner.open_output_stream(unfinished, compression=None) as target:
        shutil.copyfileobj(source, target, _CHUNK_BYTES)
    if are_objects:
        return
    if inner.get_file_info(path).type == pyarrow.fs.FileType.File:
        # not every server replaces a file by a move
        inner.delete_file(path)
    inner.move(unfinished, path)


class RangeInput(io.RawIOBase):
    """A file that is read by ranges, open for reading from a position on; subclasses have `read_at`.

    Args:
        num_bytes: its size.
    """

    def __init__(self, num_bytes: int) -> None:
        self._size = num_bytes
        self._position = 0

    def read_at(self, num_bytes: int, start: int) -> bytes:
        """Return bytes from an offset on, fewer at the end."""
        raise NotImplementedError

    def read(self, num_bytes: int | None = -1) -> bytes:
        left = max(0, self._size - self._position)
        data = self.read_at(
            left if num_bytes is None or num_bytes < 0 else min(num_bytes, left),
            self._position,
        )
        self._position += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = (
            offset
            + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[
                whence
            ]
        )
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


class RetryingInput(RangeInput):
    """An object, open for reading; threads may call `read_at` concurrently."""

    def __init__(self, handler: _Handler, path: str) -> None:
        self._handler = handler
        self._path = path
        # the file system that opened the file, and the file
        self._opened: tuple[Any, Any] = (None, None)
        super().__init__(self._call("open", lambda file: file.size()))

    def _call(self, operation: str, do: Callable[[pa.NativeFile], _T]) -> _T:
        return self._handler.call(
            operation, self._path, lambda inner: do(self._native(inner))
        )

    def _native(self, inner: pyarrow.fs.FileSystem) -> pa.NativeFile:
        opened_by, file = self._opened
        if opened_by is not inner:  # a new file system has new credentials
            file = inner.open_input_file(self._path)
            self._opened = inner, file
        return file

    def size(self) -> int:
        return self._size

    def metadata(self) -> Any:
        return self._call("open", lambda file: file.metadata())

    def read_at(self, num_bytes: int, start: int) -> bytes:
        """Return bytes from an offset on, fewer at the end."""
        data = self._call("read", lambda file: file.read_at(num_bytes, start))
        count("read", bytes=len(data))
        return data

    def close(self) -> None:
        if not self.closed and (file := self._opened[1]):
            file.close()
        super().close()


class _Output(io.BytesIO):
    """A buffer of `pa.PythonFile` that is written as an object when it is closed."""

    def __init__(self, handler: _Handler, path: str) -> None:
        super().__init__()
        self._handler = handler
        self._path = path

    def close(self) -> None:
        try:
            if not self.closed:
                self._handler.write(self._path, self.getvalue())
        finally:
            super().close()


def _waiting(operation: str, name: str, *keywords: str) -> Any:
    """Return a method that calls pyarrow's method `name`; `keywords` are names of its last arguments."""

    def method(self: _Handler, first: Any, *values: Any) -> Any:
        if isinstance(first, list):
            path = first[0]
        else:
            path = getattr(first, "base_dir", first)
        arguments = values[: len(values) - len(keywords)]
        options = dict(zip(keywords, values[len(arguments) :], strict=True))
        attempts = itertools.count()

        def do(inner: pyarrow.fs.FileSystem) -> Any:
            is_first = not next(attempts)
            try:
                return getattr(inner, name)(first, *arguments, **options)
            except FileNotFoundError:
                # An earlier attempt deleted the file, and its reply was lost.
                if is_first or operation != "delete":
                    raise

        return self.call(operation, path, do)

    return method


class _Handler(pyarrow.fs.FileSystemHandler):
    """The handler that pyarrow calls; see `RetryingFileSystem`."""

    def __init__(self, scheme: str, host: str, make: MakeFileSystem) -> None:
        self._scheme = scheme
        self._make = lambda: make(scheme, host)
        self._renew = None if host.startswith("anonymous@") else self._forget
        self._inner: pyarrow.fs.FileSystem | None = None
        self._lock = threading.Lock()

    def inner(self) -> pyarrow.fs.FileSystem:
        with self._lock:
            self._inner = self._inner or self._make()
            return self._inner

    def _forget(self) -> None:
        self._inner = None

    def call(
        self, operation: str, path: str, do: Callable[[pyarrow.fs.FileSystem], _T]
    ) -> _T:
        """Return `do(pyarrow's file system)`; `do` may be called several times."""
        # fsspec's paths on web servers are addresses
        address = path if "://" in path else f"{self._scheme}://{path}"
        return retried(operation, address, lambda: do(self.inner()), self._renew)

    def __eq__(self, handler: object) -> bool:
        return isinstance(handler, _Handler) and self.inner().equals(handler.inner())

    def get_type_name(self) -> str:
        return self._scheme

    def normalize_path(self, path: str) -> str:
        return self.inner().normalize_path(path)

    get_file_info = _waiting("info", "get_file_info")
    get_file_info_selector = _waiting("list", "get_file_info")
    create_dir = _waiting("write", "create_dir", "recursive")
    delete_dir = _waiting("delete", "delete_dir")
    delete_dir_contents = _waiting("delete", "delete_dir_contents", "missing_dir_ok")
    delete_file = _waiting("delete", "delete_file")
    move = _waiting("write", "move")
    copy_file = _waiting("write", "copy_file")

    def delete_root_dir_contents(self) -> None:
        raise OSError("raypipe never deletes the contents of a whole file system")

    def open_input_file(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(RetryingInput(self, path), mode="r")

    open_input_stream = open_input_file

    def write(self, path: str, content: bytes | memoryview) -> None:
        """Write an object, which appears only when it is complete."""
        self.call(
            "write", path, lambda inner: _write(inner, path, pa.BufferReader(content))
        )
        count("write", bytes=len(content))

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        return pa.PythonFile(_Output(self, path), mode="w")

    def open_append_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        raise OSError("objects cannot be appended to")
