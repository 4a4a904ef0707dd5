"""The record of bad samples: best effort, since no run should end for want of it."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from raypipe.plan.schedule import MicroBatchId
from raypipe.storage.filesystem import join, open_filesystem
from raypipe.storage.whole_file import write_text

logger = logging.getLogger(__name__)

# Where a record has failed, none is tried for so many times as long as that took: a full disk says so at once, an
# object store that is gone after minutes, and a run should not wait for it at every bad sample.
_PAUSE = 9
# Of this process: folder → when to try again, by time.monotonic().
_try_again_at: dict[str, float] = {}


def record_bad(folder_uri: str, at: MicroBatchId, bad: list[dict[str, Any]], by: str = "") -> None:
    """Log bad samples, and write them as one JSON-lines object per micro-batch.

    It is named by the micro-batch's place, so that a retry of the same one, on any node, writes the same again.
    Where it cannot be written, that is logged, once in a process, and nothing else.

    Args:
        folder_uri: of the quarantine; empty = log only.
        at: the micro-batch.
        bad: one record per sample.
        by: who found them, where that is not an actor; part of the name.
    """
    lines = [json.dumps({**vars(at), **record}) for record in bad]
    for line in lines:
        logger.warning("bad sample: %s", line)
    begun = time.monotonic()
    if not folder_uri or begun < _try_again_at.get(folder_uri, 0.0):
        return
    try:
        filesystem, folder = open_filesystem(folder_uri)
        filesystem.create_dir(folder, recursive=True)
        write_text(join(folder_uri, f"{at}{by and '-' + by}.jsonl"), "".join(line + "\n" for line in lines))
    except Exception as error:  # a full disk, an object store that is gone, whatever it is
        if folder_uri not in _try_again_at:
            logger.warning("bad samples cannot be recorded in %s, but in this log: %s", folder_uri, error)
        now = time.monotonic()
        _try_again_at[folder_uri] = now + _PAUSE * (now - begun)
