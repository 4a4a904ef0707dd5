"""The records of a run, one JSON object a line: how rank 0 writes them, and how they are read.

A file of records only grows. Where a run went back to an earlier step, a line of kind "start" says so, and readers
drop what the run did over again. Nothing is rewritten, so nothing can be lost.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs

from raypipe.errors import RaypipeError
from raypipe.plan.places import MicroBatchId
from raypipe.storage.files import read_whole, write_synced, write_text
from raypipe.storage.filesystem import join_address, open_filesystem
from raypipe.storage.retries import tried_once, without_retries
from raypipe.storage.retrying_filesystem import upload

logger = logging.getLogger(__name__)

RECORDS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
_MAX_STEP = 1 << 62
STATUS = "status.json"
_WAIT_EVERY_S = 15.0  # `record_wait` is called after each try of Ray Train's, of 10 s
_START = "start"
_HAPPENED = (_START, "phases", "fault", "scale")
"""Kinds of records that hold whatever the run did over again: they tell of what happened, and not of a step."""

Record = dict[str, Any]
"""An object of a file of JSON lines in a run's folder."""
RunFolder = tuple[pyarrow.fs.FileSystem, str]
"""A folder by its file system and the path on it."""


def read_records(run_uri: str, name: str = RECORDS) -> list[Record]:
    """Read a file of records of a run, see `parse_records`; empty where there is none.

    Raises:
        ConfigError: it cannot be read.
    """
    return parse_records(read_whole(join_address(run_uri, name)) or b"")


def parse_records(content: bytes) -> list[Record]:
    """The records of a file's content, in their order, without those of steps that the run has done over again."""
    kept: list[Record] = []
    for record in objects_of(content):
        if not _is_step(record.get("step")):
            continue
        if record.get("kind") == _START:
            kept = [earlier for earlier in kept if _stands(earlier, record)]
        kept.append(record)
    return kept


def objects_of(content: bytes) -> list[Record]:
    """The objects of a file of JSON lines.

    The last line counts once it has its end. Other lines, cut off by a crash or a full disk, are left out.
    """
    objects = []
    for line in content.split(b"\n")[:-1]:
        with contextlib.suppress(ValueError, RecursionError):
            objects.append(json.loads(line))
    return [record for record in objects if isinstance(record, dict)]


def _is_step(value: Any) -> bool:
    # neither NaN nor infinity, which JSON in Python has
    return isinstance(value, int | float) and 0 <= value < _MAX_STEP


def _stands(record: Record, start: Record) -> bool:
    """Return whether a record still holds once a run has started from a later record's step."""
    if record.get("kind") in _HAPPENED:
        return True
    if start.get("validates") and record.get("kind") in ("val", "diagnosis"):
        return record["step"] < start["step"]
    return record["step"] <= start["step"]


def write_file(folder: RunFolder, name: str, text: str) -> None:
    """Write a file of a run's folder, or replace an old one; atomically on disks."""
    filesystem, path = folder
    if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        write_text(f"{path}/{name}", text)
    else:
        write_synced(filesystem, f"{path}/{name}", text.encode())


def record_wait(run_uri: str, whom: str, since: float) -> None:
    """Write into the run's status that its trainers wait for room since a moment of time.time(); its step stays.

    Args:
        whom: description of the wait.
    """
    now = time.time()
    address = join_address(run_uri, STATUS)
    with contextlib.suppress(ValueError), tried_once():
        place = json.loads(read_whole(address) or b"{}")
        status = {"step": 0, "to_step": 0, "step_at": now, "workers": 0, **place}
        status |= {"time": now, "begun": now, "since": since, "every_s": _WAIT_EVERY_S}
        status |= {"state": "waiting", "waits_for": "room", "whom": whom}
        write_file(open_filesystem(run_uri), STATUS, json.dumps(status))


def append_fault(run_uri: str, text: str, reason: str) -> None:
    """Record a fault between two starts of a run's trainers, at the step of the last record.

    What cannot be written is a warning.

    Args:
        text: for people.
        reason: why they are started again, see `prometheus.METRICS`.
    """
    try:
        filesystem, path = open_filesystem(join_address(run_uri, RECORDS))
        content = read_whole(path, filesystem) or b""
        step = max((record["step"] for record in parse_records(content)), default=0)
        fault = {
            "kind": "fault",
            "step": step,
            "text": text,
            "reason": reason,
            "time": time.time(),
        }
        line = json.dumps(fault).encode() + b"\n"
        if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
            append_whole(Path(path), line)
        else:
            # behind a line that may be cut off
            write_synced(filesystem, path, content + b"\n" + line)
    except (RaypipeError, pa.ArrowException, OSError) as error:
        logger.warning(
            "a fault cannot be written to %s of %s: %s", RECORDS, run_uri, error
        )


def append_whole(path: Path, lines: bytes) -> None:
    """Append lines to a file. A line that a crash or a full disk has cut off stays a separate line."""
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, 2)
            lines = lines if file.read(1) == b"\n" else b"\n" + lines
        file.write(lines)


class BestEffort:
    """Turns a file of a run that cannot be written into a warning, the first time: it does not end the run.

    Args:
        run: the run's name.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._has_warned = False

    @contextlib.contextmanager
    def __call__(self, file: str) -> Iterator[None]:
        """Context manager for writing a file."""
        try:
            yield
        except (pa.ArrowException, OSError, RaypipeError) as error:
            if not self._has_warned:
                text = "%s of %s cannot be written: %s; the run goes on, and its record has gaps"
                logger.warning(text, file, self._run, error)
            self._has_warned = True


class RecordWriter:
    """Rank 0's record of a run. Local runs are written in place; remote ones are copied at each `sync`.

    A line that cannot be written is skipped, with one warning: a full disk does not end a run.

    Args:
        folder: the run's folder.
        start: the values of the start's line: `step`, at which the run starts or resumes; `workers`, W;
            `validates`, whether it resumes with the validation of that step, of which an earlier record no longer
            counts; `settings`, the stream's, for a run without a config.yaml; and `stream`, which opens the stream
            again, see `raypipe.streaming.record.opened`.

    Attributes:
        earlier: the `stream` of the start before this one, as its record has it; None if there is none.

    Raises:
        ConfigError: an earlier start's record in object storage cannot be read.
    """

    def __init__(self, folder: RunFolder, **start: Any) -> None:
        self._filesystem, self._remote = folder
        self._local = isinstance(self._filesystem, pyarrow.fs.LocalFileSystem)
        self._folder = Path(
            self._remote if self._local else tempfile.mkdtemp(prefix="raypipe-run-")
        )
        self._one_by_one = threading.Lock()
        self._best_effort = BestEffort(self._remote)
        with self._best_effort("the folder"):
            self._folder.mkdir(parents=True, exist_ok=True)
        if not self._local:
            for name in (RECORDS, SAMPLES):
                content = read_whole(f"{self._remote}/{name}", self._filesystem)
                if content is not None:
                    (self._folder / name).write_bytes(content)
        self.earlier: Any = None
        with self._best_effort(RECORDS):
            for record in read_records(str(self._folder)):
                if record.get("kind") == _START:
                    self.earlier = record.get("stream")
        self._append(RECORDS, [{"kind": _START, **start}])
        if (self._folder / SAMPLES).exists():
            start.pop("stream", None)
            self._append(SAMPLES, [{"kind": _START, **start}])

    def write_samples(
        self, rows: list[tuple[MicroBatchId, list[int]]], step: int
    ) -> None:
        """Record which samples the micro-batches of a step had; `step` is the global step."""
        records = [
            {"micro_batch": str(position), "step": step, "indices": indices}
            for position, indices in rows
        ]
        self._append(SAMPLES, records)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Record values at a global step; `kind` is one of those above."""
        self._append(RECORDS, [{"kind": kind, "step": step, **values}])

    def sync(self, last: bool = False) -> None:
        """Make what was written so far visible at the run's address."""
        if self._local:
            return
        left = f", which is left in {self._folder}," if last else ""
        with self._best_effort(f"the record{left}"):
            # The next one brings all that this one does not; the last one waits for storage.
            with contextlib.nullcontext() if last else without_retries():
                upload(str(self._folder), self._filesystem, self._remote)
            if last:
                shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        self.sync(last=True)

    def _append(self, name: str, records: list[Record]) -> None:
        """Append records to a file."""
        with self._one_by_one, self._best_effort(name):
            lines = "".join(json.dumps(record) + "\n" for record in records)
            append_whole(self._folder / name, lines.encode())
