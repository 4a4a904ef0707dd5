"""The record of bad samples."""

from __future__ import annotations

import json
import logging
from typing import Any

from raypipe.filesystem import open_filesystem
from raypipe.plan import MicroBatchId

logger = logging.getLogger(__name__)


def record_bad(folder_uri: str, at: MicroBatchId, bad: list[dict[str, Any]], by: str = "") -> None:
    """Log bad samples, and write them as one JSON-lines object per micro-batch.

    It is named by the micro-batch's place, so that a retry of the same one, on any node, writes the same again.

    Args:
        folder_uri: of the quarantine; empty = log only.
        at: the micro-batch.
        bad: one record per sample.
        by: who found them, where that is not an actor; part of the name.
    """
    lines = [json.dumps({**vars(at), **record}) for record in bad]
    for line in lines:
        logger.warning("bad sample: %s", line)
    if folder_uri:
        filesystem, folder = open_filesystem(folder_uri)
        filesystem.create_dir(folder, recursive=True)
        with filesystem.open_output_stream(f"{folder}/{at}{by and '-' + by}.jsonl") as file:
            file.write("".join(line + "\n" for line in lines).encode())
