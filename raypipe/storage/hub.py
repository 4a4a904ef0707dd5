"""The Hugging Face Hub as one of pyarrow's file systems, read-only: hf://datasets/OWNER/NAME@REVISION/path.

Its client lists each folder once in a process, so a data set that changes while it is read is best named with a
revision, such as a commit. Reads are ranges of a file and nothing around them.
"""

from __future__ import annotations

import os
from typing import Any

import pyarrow as pa
import pyarrow.fs


def hub_filesystem() -> pyarrow.fs.FileSystem:
    """The Hub, with HF_TOKEN or the login of this machine; ImportError where its client is not installed."""
    from huggingface_hub import HfFileSystem

    # As AWS_ENDPOINT_URL is, for a mirror: the client itself looks at it only when it is imported.
    client = HfFileSystem(endpoint=os.environ.get("HF_ENDPOINT"), skip_instance_cache=True)
    return pyarrow.fs.PyFileSystem(_Hub(client))


class _Hub(pyarrow.fs.FSSpecHandler):
    """It reads exact ranges, and writes nothing."""

    def open_input_file(self, path: str) -> pa.NativeFile:
        if not self.fs.isfile(path):
            raise FileNotFoundError(path)
        return pa.PythonFile(self.fs.open(path, "rb", cache_type="none"), mode="r")

    open_input_stream = open_input_file

    def _refuse(self, *args: Any) -> Any:
        raise OSError("the Hub is only read; write to a disk or to a bucket, and upload it by `hf upload`")

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = _refuse
    move = copy_file = open_output_stream = open_append_stream = _refuse
