"""Micro-batches that a loop has flagged, in the run's folder: RUN/flags/PLACE.jsonl, one object for each reason.

Each micro-batch has its file, since every rank writes, and object storage cannot append.
"""

from __future__ import annotations

import json
from typing import Any

from raypipe.metrics.records import RunFolder, write_file
from raypipe.plan.places import MicroBatchId
from raypipe.storage.files import open_input

FLAGS = "flags"


def write_flag(folder: RunFolder, place: MicroBatchId, flag: dict[str, Any]) -> None:
    """Add a flag to those of a micro-batch; the same reason again replaces the earlier one.

    Args:
        folder: the run's folder.
        flag: plain values, `reason` among them.
    """
    filesystem, path = folder
    filesystem.create_dir(f"{path}/{FLAGS}", recursive=True)
    name = f"{FLAGS}/{place}.jsonl"
    try:
        content = open_input(filesystem, f"{path}/{name}").read()
    except FileNotFoundError:
        content = b""
    flags = [json.loads(line) for line in content.splitlines()]
    flags = [other for other in flags if other["reason"] != flag["reason"]]
    lines = [json.dumps(other) + "\n" for other in (*flags, flag)]
    write_file(folder, name, "".join(lines))
