"""The records of a run, one JSON object a line, as `raypipe.train.run_folder` writes them, and how they are read.

A file of records only grows. Where a run went back to an earlier step, a line of kind "start" says so, and readers
drop what the run did over again. Nothing is rewritten, so nothing can be lost.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from raypipe.storage.files import read_whole
from raypipe.storage.filesystem import join

METRICS, SAMPLES, STATUS = "metrics.jsonl", "samples.jsonl", "status.json"
START = "start"
_HAPPENED = (START, "fault", "scale")
"""Kinds of records that hold whatever the run did over again: they tell of what happened, and not of a step."""


@dataclass(frozen=True)
class Records:
    """The contents of a file of records.

    Attributes:
        kept: the objects in their order, without those of steps that the run has done over again.
        unreadable: lines that are not records, cut off by a crash or a full disk.
    """

    kept: list[dict[str, Any]]
    unreadable: int = 0


def unreadable_note(unreadable: int) -> str:
    """A sentence about lines that cannot be read; empty where there are none."""
    lines = "1 line that is" if unreadable == 1 else f"{unreadable} lines that are"
    return f"left out {lines} no record, cut off or damaged" if unreadable else ""


def read_records(run_uri: str, name: str = METRICS) -> Records | None:
    """Read a file of records of a run; None where there is none.

    Raises:
        ConfigError: it cannot be read.
    """
    content = read_whole(join(run_uri, name))
    return None if content is None else parse(content)


def parse(content: bytes) -> Records:
    """The records of a file's content. The last line counts once it has its end."""
    kept: list[dict[str, Any]] = []
    unreadable = 0
    for line in filter(None, content.split(b"\n")[:-1]):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int | float):
            unreadable += 1
            continue
        if record.get("kind") == START:
            kept = [earlier for earlier in kept if _stands(earlier, record)]
        kept.append(record)
    return Records(kept, unreadable)


def _stands(record: dict[str, Any], start: dict[str, Any]) -> bool:
    """Return whether a record still holds once a run has started from a later record's step."""
    if record.get("kind") in _HAPPENED:
        return True
    if start.get("validates") and record.get("kind") in ("val", "diagnosis"):
        return record["step"] < start["step"]
    return record["step"] <= start["step"]
