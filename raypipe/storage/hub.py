"""The Hugging Face Hub as one of pyarrow's file systems, read-only: hf://datasets/OWNER/NAME@REVISION/path.

Its client lists each folder once in a process, so a data set that changes while it is read is best named with a
revision, such as a commit. Reads are ranges of a file and nothing around them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.fs


def hub_filesystem() -> pyarrow.fs.FileSystem:
    """The Hub, with HF_TOKEN or the login of this machine; ImportError where its client is not installed."""
    from huggingface_hub import HfFileSystem

    # As AWS_ENDPOINT_URL is, for a mirror: the client itself looks at it only when it is imported.
    client = HfFileSystem(endpoint=os.environ.get("HF_ENDPOINT"), skip_instance_cache=True)
    return pyarrow.fs.PyFileSystem(_Hub(client))


@contextlib.contextmanager
def _as_oserror() -> Iterator[None]:
    """Within, what the client raises becomes an OSError, as the file systems of pyarrow raise it."""
    try:
        yield
    except (OSError, pa.ArrowException):
        raise
    except Exception as error:  # of half a dozen types, by the version of its HTTP library
        raise OSError(f"{type(error).__name__}: {error}") from error


class _Hub(pyarrow.fs.FSSpecHandler):
    """Its requests have one kind of error; it writes nothing."""

    def get_file_info(self, paths: list[str]) -> Any:
        with _as_oserror():
            return super().get_file_info(paths)

    def get_file_info_selector(self, selector: pyarrow.fs.FileSelector) -> Any:
        with _as_oserror():
            return super().get_file_info_selector(selector)

    def open_input_file(self, path: str) -> pa.NativeFile:
        with _as_oserror():
            if not self.fs.isfile(path):
                raise FileNotFoundError(path)
            return pa.PythonFile(_File(self.fs.open(path, "rb", cache_type="none")), mode="r")

    open_input_stream = open_input_file

    def _refuse(self, *args: Any) -> Any:
        raise OSError("the Hub is only read; write to a disk or to a bucket, and upload it by `hf upload`")

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = _refuse
    move = copy_file = open_output_stream = open_append_stream = _refuse


class _File:
    """A file of the Hub, as `pa.PythonFile` reads it."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.seek, self.tell, self.close = file.seek, file.tell, file.close

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)

    def read(self, num_bytes: int = -1) -> bytes:
        with _as_oserror():
            return bytes(self._file.read(num_bytes))
