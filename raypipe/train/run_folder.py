"""The folder of a run: who may have it, how it is asked to stop, and what it records.

RUN/config.yaml        the effective configuration, below a first line by which a run is known
RUN/metrics.jsonl      one object per log interval ("train"), per validation ("val"), per start of the trainers
                       ("start"), per fault of the stream ("fault") and per change of the pool's size ("scale");
                       see `raypipe.metrics.records`
RUN/samples.jsonl      with train.log_samples: which samples each micro-batch had
RUN/tensorboard/       the same as events
RUN/stop               is made to end the run within seconds, with a checkpoint; the run removes it
RUN/figures.json       sums over the training, the newest validation, and where it stands, once it has ended
RUN/error.txt          the traceback of what has ended the run, where that was other code's
RUN/quarantine/        one JSON-lines object per micro-batch that had bad samples
RUN/report.html        all of it as one page, see `raypipe.pages.report`
RUN/checkpoint_*/      see `raypipe.train.checkpoints`
RUN/lease/             who has the folder, see `raypipe.storage.lease`
RUN/ray/               Ray Train's own
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import logging
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs
import yaml

from raypipe.config import RunConfig
from raypipe.errors import ConfigError
from raypipe.metrics.records import METRICS, SAMPLES, START
from raypipe.plan.places import MicroBatchId
from raypipe.storage.files import open_input, read_text, read_whole, write_text
from raypipe.storage.filesystem import (
    as_uri,
    check_bucket,
    check_lasting,
    exists,
    explained,
    is_remote,
    join,
    open_filesystem,
    split,
)
from raypipe.storage.lease import RunExistsError, check_owner, taken
from raypipe.streaming.spec import with_digits
from raypipe.train.checkpoints import has_checkpoints
from raypipe.transform.transform_steps import config_without_files

FIGURES_FILE = "figures.json"
CONFIG_FILE = "config.yaml"
CONFIG_HEAD = "# A run of raypipe: its settings.\n"
"""The first line of a run's configuration. Data sets and other programs' folders have a config.yaml too."""

logger = logging.getLogger(__name__)

_STOP_FILE = "stop"
_MAX_CONFIG_BYTES = 16 << 20  # the steps of a transform are 1 MiB at most, see `transform_steps`


def request_stop(run_uri: str) -> None:
    """Ask the trainers of a run to end, with a checkpoint, as soon as they look; see `loop.Trainer`."""
    filesystem, path = open_filesystem(join(run_uri, _STOP_FILE))
    with filesystem.open_output_stream(path):
        pass


def stop_requested(run_uri: str) -> bool:
    """Whether the trainers of a run were asked to end."""
    return exists(join(run_uri, _STOP_FILE))


def answer_stop(run_uri: str) -> None:
    """Say for the trainers that they have seen the request: what they still do is to write the checkpoint."""
    write_text(join(run_uri, _STOP_FILE), "seen")


def stop_answered(run_uri: str) -> bool:
    return bool(read_whole(join(run_uri, _STOP_FILE)))


def remove_stop(run_uri: str) -> None:
    """Take the request back."""
    if stop_requested(run_uri):
        filesystem, path = open_filesystem(join(run_uri, _STOP_FILE))
        filesystem.delete_file(path)


@contextlib.contextmanager
def located(run: RunConfig, prefix: str = "") -> Iterator[tuple[RunConfig, str, str]]:
    """Within, a run has its folder for itself alone.

    Args:
        run: the name is that of the run to resume, or its own, or made from the date.
        prefix: of a name that is made from the date.

    Yields:
        The run with its name, its stores and the steps of its transforms; the URI of its folder; and its lease.

    Raises:
        ConfigError: there is a run in the folder, and it is not resumed; or there is none, and it is; or it is
            going on; or the folder does not outlast the job; or a file of steps cannot be read.
    """
    if not (run.name or run.resume):
        # Several may start in one second.
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        run = dataclasses.replace(run, name=f"{prefix}{now}-{secrets.token_hex(2)}")
    if run.resume:
        check_owner(run.resume, run.trust)
        parent, name = split(run.resume)
        run = dataclasses.replace(run, storage_path=parent or ".", name=name)
    run_uri = join(as_uri(run.storage_path), run.name)
    check_lasting(run_uri, "storage_path")
    check_run_folder(run_uri, bool(run.resume))
    run = with_digits(run)
    run = dataclasses.replace(run, transform=config_without_files(run.transform))
    with taken(run_uri) as lease:
        check_run_folder(run_uri, bool(run.resume))  # once more: nobody else can make it one now
        yield run, run_uri, lease


def check_run_folder(run_uri: str, resume: bool) -> None:
    """Raise ConfigError where there is no run and one is to be resumed, or there is one and none is.

    Checkpoints make a run, even one that has lost its configuration.
    """
    check_bucket(run_uri)
    with explained(ConfigError, f"{run_uri} cannot be used"):
        is_run = has_config(run_uri) or has_checkpoints(run_uri)
        is_foreign = not is_run and exists(join(run_uri, CONFIG_FILE))
    if resume and not is_run:
        raise ConfigError(f"there is no run at {run_uri}: expected is the folder that `run_dir` named")
    if is_foreign:
        raise ConfigError(f"{run_uri} holds a {CONFIG_FILE} that is not a run's: choose another --name")
    if not resume and is_run:
        raise RunExistsError(f"there is a run at {run_uri} already: go on with it by --resume, or choose --name")


def has_config(run_uri: str) -> bool:
    """Whether a folder holds the configuration of a run, by its first line; OSError where it cannot be read."""
    try:
        with open_input(*open_filesystem(join(run_uri, CONFIG_FILE))) as file:
            return file.read(len(CONFIG_HEAD.encode())) == CONFIG_HEAD.encode()
    except FileNotFoundError:
        return False


def read_config(run_uri: str) -> str:
    """The configuration of a run as YAML; "" where there is none; ConfigError where it is not a run's."""
    address = join(run_uri, CONFIG_FILE)
    if not exists(address):
        return ""
    text = read_text(address, _MAX_CONFIG_BYTES)
    if not text.startswith(CONFIG_HEAD):
        raise ConfigError(f"{address} is not a run's: the first line of a run's is {CONFIG_HEAD.strip()!r}")
    return text


def store_config(run: RunConfig, run_uri: str) -> None:
    with explained(ConfigError, f"{run_uri} cannot be written to"):
        filesystem, path = open_filesystem(run_uri)
        filesystem.create_dir(path, recursive=True)
    write_text(join(run_uri, CONFIG_FILE), CONFIG_HEAD + yaml.safe_dump(as_plain(run), sort_keys=False))


def as_plain(run: RunConfig) -> dict[str, Any]:
    """A configuration as dicts, lists and scalars, as YAML has it; `resume` and `trust` left out."""
    plain = dataclasses.asdict(run)
    del plain["resume"], plain["trust"]
    return json.loads(json.dumps(plain))  # tuples become lists


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
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog

        self._run_uri, self._local = run_uri, not is_remote(run_uri)
        self._filesystem, self._remote = open_filesystem(run_uri)
        self._folder = Path(self._remote if self._local else tempfile.mkdtemp(prefix="raypipe-run-"))
        self._one_by_one, self._warned = threading.Lock(), False
        # tensorboardX's own thread would die of a full disk, and its queue block then.
        self._events: EventsWriter | None = None
        with self._best_effort("the folder"):
            (self._folder / "tensorboard").mkdir(parents=True, exist_ok=True)
            # Its name has the second alone, and it would replace the file of another start of that second.
            self._events = EventsWriter(str(self._folder / "tensorboard/events"), f".{secrets.token_hex(4)}")
        if not self._local:
            for name in (METRICS, SAMPLES):
                if (content := read_whole(join(run_uri, name))) is not None:
                    (self._folder / name).write_bytes(content)
        # Of an earlier start, events from this step on are hidden.
        self._event(step=global_step + 1, file_version="brain.Event:2")
        self._event(step=global_step + 1, session_log=SessionLog(status=SessionLog.START))
        start = {"kind": START, "step": global_step, "workers": workers, "validates": validates}
        self._append(METRICS, [start])
        if (self._folder / SAMPLES).exists():
            self._append(SAMPLES, [start])

    def write_samples(self, rows: list[tuple[MicroBatchId, list[int]]], step: int) -> None:
        """Record which samples the micro-batches of a step had; `step` is the global step."""
        self._append(SAMPLES, [{"micro_batch": str(at), "step": step, "indices": indices} for at, indices in rows])

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Record values at a global step; `kind` is one of those above."""
        from tensorboardX.summary import scalar

        self._append(METRICS, [{"kind": kind, "step": step, **values}])
        for name, value in values.items():
            if isinstance(value, int | float):
                self._event(step=step, wall_time=time.time(), summary=scalar(f"{kind}/{name}", value))

    def sync(self, last: bool = False) -> None:
        """Make what was written so far visible at the run's address."""
        with self._best_effort("tensorboard"):
            if self._events:
                (self._events.close if last else self._events.flush)()
        if self._local:
            return
        with self._best_effort(f"the record, which is left in {self._folder}," if last else "the record"):
            pyarrow.fs.copy_files(
                str(self._folder),
                self._remote,
                source_filesystem=pyarrow.fs.LocalFileSystem(),
                destination_filesystem=self._filesystem,
                use_threads=False,  # as Ray Train does for S3: uploads take threads of the same pool
            )
            if last:
                shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        self.sync(last=True)

    def _append(self, name: str, records: list[dict[str, Any]]) -> None:
        """Append records to a file. A line that a crash or a full disk has cut off stays a line of its own."""
        text = "".join(json.dumps(record) + "\n" for record in records)
        with self._one_by_one, self._best_effort(name), (self._folder / name).open("a+b") as file:
            if file.tell():
                file.seek(-1, 2)
                text = text if file.read(1) == b"\n" else "\n" + text
            file.write(text.encode())

    def _event(self, **fields: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        with self._best_effort("tensorboard"):
            if self._events:
                self._events.write_event(Event(**fields))

    @contextlib.contextmanager
    def _best_effort(self, what: str) -> Iterator[None]:
        """Within, a file that cannot be written is a warning, the first time."""
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            if not self._warned:
                text = "%s of %s cannot be written: %s; the run goes on, and its record has gaps"
                logger.warning(text, what, self._run_uri, error)
            self._warned = True
