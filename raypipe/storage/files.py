"""Files at a local path or URI: read with one clear error, written atomically, and identified by a digest."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.fs

from raypipe.errors import ConfigError, StoreError
from raypipe.storage.filesystem import (
    check_bucket,
    check_lasting,
    errors_as,
    is_remote,
    open_filesystem,
)
from raypipe.storage.local_file import regular_path, written_facts
from raypipe.storage.retrying_filesystem import RetryingFileSystem

_T = TypeVar("_T")

# The size of a scan of 14 million members; the digests of the longest runs take a tenth of it.
_MAX_JSON_BYTES = 1 << 30


def open_input(filesystem: pyarrow.fs.FileSystem, path: str) -> pa.NativeFile:
    """Open a file for reading; raise OSError for a local path that is not a regular file."""
    if not isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        return filesystem.open_input_file(path)
    with regular_path(path) as checked_path:
        return filesystem.open_input_file(checked_path)


def read_by(
    filesystem: pyarrow.fs.FileSystem, path: str, read: Callable[[pa.NativeFile], _T]
) -> _T:
    """Return `read(file)`. For a remote file, `read` runs in pyarrow's threads, and may be called again."""
    if isinstance(filesystem, RetryingFileSystem):
        return filesystem.handler.call(
            "read", path, lambda inner: read_by(inner, path, read)
        )
    with open_input(filesystem, path) as file:
        return read(file)


def read_whole(
    address: str, filesystem: pyarrow.fs.FileSystem | None = None
) -> bytes | None:
    """Return a file's content, None if it does not exist; raise ConfigError if it cannot be read.

    Args:
        address: address of the file, or its path on the file system.
    """
    with errors_as(ConfigError, f"{address} cannot be read"):
        try:
            place = (filesystem, address) if filesystem else open_filesystem(address)
            with open_input(*place) as file:
                return file.read()
        except FileNotFoundError:
            return None


def read_json(address: str | Path) -> Any:
    """Return the JSON of a file; raise ConfigError if it cannot be read, exceeds 1 GiB, or is not JSON."""
    text = read_text(address, _MAX_JSON_BYTES)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{address} is not JSON: {error}") from error


def read_text(address: str | Path, max_bytes: int) -> str:
    """Return the text of a file; raise ConfigError if it cannot be read, is larger, or is not UTF-8."""
    with (
        errors_as(ConfigError, f"{address} cannot be read"),
        open_input(*open_filesystem(address)) as file,
    ):
        if file.size() > max_bytes:
            raise ConfigError(
                f"{address} cannot be read: it has more than {max_bytes:,} bytes"
            )
        content = file.read()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{address} is not text: {error}") from error


def names_of_lines(folder: str) -> list[str]:
    """The names of a folder's files of JSON lines, without their ending; empty where there is no folder."""
    filesystem, path = open_filesystem(folder)
    selector = pyarrow.fs.FileSelector(path, allow_not_found=True)
    names = (info.base_name for info in filesystem.get_file_info(selector))
    return [name.removesuffix(".jsonl") for name in names if name.endswith(".jsonl")]


def write_json(address: str | Path, content: dict[str, Any]) -> None:
    """Write an object as JSON, see `write_bytes`."""
    write_text(address, json.dumps(content, indent=1))


def write_text(address: str | Path, text: str) -> None:
    """Write a text, see `write_bytes`."""
    write_bytes(address, text.encode())


def write_bytes(address: str | Path, content: bytes) -> None:
    """Write a file, or replace an old one atomically; raise ConfigError if it cannot be written."""
    with errors_as(ConfigError, f"{address} cannot be written"):
        filesystem, path = open_filesystem(address)
        if is_remote(address):  # an object only appears when it is complete
            write_synced(filesystem, path, content)
            return
        partial = Path(path).with_name(
            f".{Path(path).name}.partial-{secrets.token_hex(4)}"
        )
        try:
            write_synced(filesystem, str(partial), content)
            partial.replace(path)
            sync_folder(filesystem, str(partial.parent))
        finally:
            partial.unlink(missing_ok=True)


def write_synced(
    filesystem: pyarrow.fs.FileSystem, path: str, content: bytes | memoryview
) -> None:
    """Write a new file and wait until its content is on the disk, not only in memory."""
    if isinstance(filesystem, RetryingFileSystem):
        filesystem.handler.write(path, content)
        return
    if not isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        # Ray Train's, of an own loop
        with filesystem.open_output_stream(path) as output:
            output.write(content)
        return
    with Path(path).open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(filesystem: pyarrow.fs.FileSystem, path: str) -> None:
    """Write a local folder's list of files to the disk; object storage does not need this."""
    if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_place(address: str | Path) -> None:
    """Raise ConfigError if a file cannot be written, before the work of making its content."""
    with errors_as(ConfigError, f"{address} cannot be written"):
        _, path = open_filesystem(address)
        check_lasting(str(address), "the file to write")
    if is_remote(address):
        check_bucket(str(address))
        return
    folder = Path(path).parent
    if not folder.is_dir() or Path(path).is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(
            f"{address} cannot be written: it must be a file in an existing, writable folder"
        )


@dataclass(frozen=True)
class RemoteFile:
    """An object as it was when its store was opened or, before its lookup, as a listing describes it.

    Attributes:
        address: its URI.
        num_bytes: its size; -1 = unknown.
        version: the object store's ETag, or the time of the last change, which stays equal as long as the object
            is the same; "" before the lookup.
        digest: `digest_of_file` of its content, if its writer recorded it; else "".
    """

    address: str
    num_bytes: int = -1
    version: str = ""
    digest: str = ""

    @property
    def written(self) -> tuple[int, str]:
        """Facts that change when the object is replaced."""
        return self.num_bytes, self.version

    @property
    def key(self) -> str:
        """A name that is equal for the same object."""
        return short_hash(f"{self.address} {self.written} {self.digest}")

    def checked(self, now: RemoteFile) -> RemoteFile:
        """Return the object as it is now, with the recorded digest; raise StoreError if its size differs."""
        if self.num_bytes not in (-1, now.num_bytes):
            raise StoreError(
                f"{self.address} has {now.num_bytes} bytes, but was written with {self.num_bytes}: convert it "
                "again"
            )
        return replace(now, digest=self.digest)

    def check_same(self, now: RemoteFile) -> None:
        """Raise StoreError if the address now has a different object."""
        if (now.num_bytes, now.version) != (self.num_bytes, self.version):
            raise StoreError(
                f"{self.address} has changed since the store was opened: {self.num_bytes} bytes of version "
                f"{self.version} then, {now.num_bytes} of {now.version} now. Start a new run, or put the old "
                "object back"
            )


def look_up(address: str) -> RemoteFile:
    """Look up an object with one request; raise StoreError if it does not exist or cannot be reached."""
    with open_object(address) as (_, file):
        return file


@contextlib.contextmanager
def open_object(address: str) -> Iterator[tuple[pa.NativeFile, RemoteFile]]:
    """Context manager: open an object for ranged reads, with its identity; its errors become StoreError."""
    with errors_as(StoreError, f"{address} cannot be read"):
        where = open_filesystem(address)
        try:
            file = open_input(*where)
        except FileNotFoundError:
            raise StoreError(f"{address} or its bucket does not exist") from None
        with file:
            yield file, RemoteFile(address, file.size(), version_of(file, *where))


def version_of(
    file: pa.NativeFile, filesystem: pyarrow.fs.FileSystem, path: str
) -> str:
    """Return the version of an open object, see `RemoteFile`; for a local file, `written_facts` as a text."""
    if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        return repr(written_facts(Path(path).stat()))
    metadata = {
        name.lower(): value.decode() for name, value in (file.metadata() or {}).items()
    }
    version = metadata.get("etag") or str(filesystem.get_file_info(path).mtime_ns)
    return version.strip('"')


def short_hash(text: str) -> str:
    """Return blake2b of a text, as 32 hex digits."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def digest_of_file(path: Path) -> str:
    """Return blake2b of a file's content, as 32 hex digits."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
    return digest.hexdigest()
