"""What a run leaves behind: effective configuration, metrics as JSON lines, TensorBoard events.

RUN/config.yaml        the effective configuration
RUN/metrics.jsonl      one object per log interval ("train"), per validation ("val"), per start of the trainers
                       ("start"), per fault of the stream ("fault") and per change of the pool's size ("scale");
                       see `raypipe.metrics.records`
RUN/samples.jsonl      with train.log_samples: which samples each micro-batch had
RUN/tensorboard/       the same as events
RUN/stop               is made to end the run, with a checkpoint, at its next line of progress; the run removes it
RUN/quarantine/        one JSON-lines object per micro-batch that had bad samples
RUN/report.html        all of it as one page, see `raypipe.pages.report`
RUN/checkpoint_*/      see `raypipe.train.checkpoints`
RUN/lease/             who has the folder, see `raypipe.storage.run_folder`
RUN/ray/               Ray Train's own
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.fs

from raypipe.errors import ConfigError
from raypipe.metrics.records import METRICS, SAMPLES, START, Appender
from raypipe.plan.schedule import MicroBatchId
from raypipe.storage.filesystem import exists, explained, is_remote, join, open_filesystem, read_whole

_STOP_FILE = "stop"


def request_stop(run_uri: str) -> None:
    """Ask the trainers of a run to end at their next line of progress, with a checkpoint."""
    filesystem, path = open_filesystem(join(run_uri, _STOP_FILE))
    with filesystem.open_output_stream(path):
        pass


def stop_requested(run_uri: str) -> bool:
    """Whether the trainers of a run were asked to end."""
    return exists(join(run_uri, _STOP_FILE))


def remove_stop(run_uri: str) -> None:
    """Take the request back."""
    if stop_requested(run_uri):
        filesystem, path = open_filesystem(join(run_uri, _STOP_FILE))
        filesystem.delete_file(path)


class RunLog:
    """Rank 0's record of a run. Local runs are written in place; remote ones are copied at each `sync`.

    What cannot be written is left out, with one warning: a run does not end for its record.

    Args:
        run_uri: the run's folder.
        global_step: where the run starts or resumes.
        workers: W.
        validates: whether it resumes with the validation of that step; an earlier record of it holds no more.

    Raises:
        ConfigError: what an earlier start has recorded in object storage cannot be read.
    """

    def __init__(self, run_uri: str, global_step: int, workers: int = 1, validates: bool = False) -> None:
        self._run_uri, self._local = run_uri, not is_remote(run_uri)
        self._filesystem, self._remote = open_filesystem(run_uri)
        self._folder = Path(self._remote if self._local else tempfile.mkdtemp(prefix="raypipe-run-"))
        self._appender = Appender(self._folder, run_uri)
        with self._appender.best_effort("the folder"):
            self._folder.mkdir(parents=True, exist_ok=True)
        if not self._local:
            self._fetch()
        self._events = _Events(self._folder / "tensorboard", global_step + 1, self._appender)
        start = {"kind": START, "step": global_step, "workers": workers, "validates": validates}
        self._appender.append(METRICS, [start])
        if (self._folder / SAMPLES).exists():
            self._appender.append(SAMPLES, [start])

    def _fetch(self) -> None:
        for name in (METRICS, SAMPLES):
            with explained(ConfigError, f"{join(self._run_uri, name)} cannot be read"):
                content = read_whole(self._filesystem, f"{self._remote}/{name}")
            if content is not None:
                (self._folder / name).write_bytes(content)

    def write_samples(self, rows: list[tuple[MicroBatchId, list[int]]], step: int) -> None:
        """Record which samples the micro-batches of a step had; `step` is the global step."""
        records = [{"micro_batch": str(at), "step": step, "indices": indices} for at, indices in rows]
        self._appender.append(SAMPLES, records)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Record values at a global step; `kind` is one of those above."""
        self._appender.append(METRICS, [{"kind": kind, "step": step, **values}])
        scalars = {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        self._events.add(scalars, step)

    def sync(self) -> None:
        """Make what was written so far visible at the run's address."""
        self._events.flush()
        if not self._local:
            with self._appender.best_effort("the record"):
                self._copy()

    def _copy(self) -> None:
        pyarrow.fs.copy_files(
            str(self._folder),
            self._remote,
            source_filesystem=pyarrow.fs.LocalFileSystem(),
            destination_filesystem=self._filesystem,
            use_threads=False,  # as Ray Train does for S3: uploads take threads of the same pool
        )

    def close(self) -> None:
        self._events.close()
        if not self._local:
            with self._appender.best_effort(f"the record, which is left in {self._folder},"):
                self._copy()
                shutil.rmtree(self._folder, ignore_errors=True)


class _Events:
    """TensorBoard events, written here: tensorboardX's thread dies of a full disk, and its queue blocks then."""

    def __init__(self, folder: Path, purge_step: int, appender: Appender) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._best_effort = appender.best_effort
        self._writer: EventsWriter | None = None
        with self._best_effort("tensorboard"):
            folder.mkdir(exist_ok=True)
            # Its name has the second alone, and it would replace the file of another start of that second.
            self._writer = EventsWriter(str(folder / "events"), f".{secrets.token_hex(4)}")
            # Of an earlier start, events from this step on are hidden.
            for event in (
                Event(step=purge_step, file_version="brain.Event:2"),
                Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)),
            ):
                self._writer.write_event(event)

    def add(self, scalars: dict[str, float], step: int) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        for name, value in scalars.items():
            if self._writer is not None:
                with self._best_effort("tensorboard"):
                    self._writer.write_event(Event(step=step, wall_time=time.time(), summary=scalar(name, value)))

    def flush(self) -> None:
        if self._writer is not None:
            with self._best_effort("tensorboard"):
                self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            with self._best_effort("tensorboard"):
                self._writer.close()
