"""Micro-batches that a loop has flagged, in the run's folder: RUN/flags/PLACE.jsonl, one object for each reason.

Each micro-batch has its file, since every rank writes, and object storage cannot append.
"""

from __future__ import annotations

import json

from raypipe.metrics.records import Record, RunFolder, write_file
from raypipe.plan.places import MicroBatchId
from raypipe.storage.files import read_whole

FLAGS = "flags"


def write_flag(folder: RunFolder, place: MicroBatchId, flag: Record) -> None:
    """Add a flag to those of a micro-batch; the last one of each reason counts.

    Args:
        folder: the run's folder.
        flag: plain values, `reason` among them.
    """
    filesystem, path = folder
    filesystem.create_dir(f"{path}/{FLAGS}", recursive=True)
    name = f"{FLAGS}/{place}.jsonl"
    content = read_whole(f"{path}/{name}", filesystem) or b""
    write_file(folder, name, f"{content.decode()}{json.dumps(flag)}\n")
