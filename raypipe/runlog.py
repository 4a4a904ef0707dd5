"""What a run leaves behind: effective configuration, metrics as JSON lines, TensorBoard events.

RUN/config.yaml        the effective configuration
RUN/metrics.jsonl      one object per log interval ("train"), per validation ("val"), per start of the trainers
                       ("start"), per fault of the stream ("fault") and per change of the pool's size ("scale")
RUN/tensorboard/       the same as events
RUN/stop               is made to end the run, with a checkpoint, at its next line of progress
RUN/quarantine/        one JSON-lines object per micro-batch that had bad samples
RUN/report.html        all of it as one page, see `raypipe.report`
RUN/checkpoint_*/      Ray Train's
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.fs

from raypipe.filesystem import exists, is_remote, join, open_filesystem
from raypipe.plan import MicroBatchId

_EVENTS = ("start", "fault", "scale")
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

    Args:
        run_uri: the run's folder.
        global_step: where the run starts or resumes; records of later steps, left by a crashed attempt,
            are dropped, so that each step is recorded once. What happened on the way, starts and faults, is kept.
    """

    def __init__(self, run_uri: str, global_step: int) -> None:
        from tensorboardX import SummaryWriter

        self._filesystem, self._remote = open_filesystem(run_uri)
        self._local = not is_remote(run_uri)
        self._folder = Path(self._remote if self._local else tempfile.mkdtemp(prefix="raypipe-run-"))
        self._folder.mkdir(parents=True, exist_ok=True)
        for name in ("metrics.jsonl", "samples.jsonl"):
            records = [(line, json.loads(line)) for line in self._recorded(name)]
            kept = [
                line for line, record in records if record["step"] <= global_step or record.get("kind") in _EVENTS
            ]
            (self._folder / name).write_text("".join(line + "\n" for line in kept))
        self._events = SummaryWriter(str(self._folder / "tensorboard"), purge_step=global_step + 1)

    def _recorded(self, name: str) -> list[str]:
        path = f"{self._remote}/{name}"
        if self._filesystem.get_file_info(path).type != pyarrow.fs.FileType.File:
            return []
        with self._filesystem.open_input_stream(path) as file:
            text = file.read().decode()
        # A crash may have cut the last line short.
        return [line for line in text.split("\n")[:-1] if line]

    def _append(self, name: str, record: dict[str, Any]) -> None:
        with (self._folder / name).open("a") as file:
            file.write(json.dumps(record) + "\n")

    def write_samples(self, at: MicroBatchId, indices: list[int], step: int) -> None:
        """Record which samples a micro-batch had; `step` is the global step that it belonged to."""
        self._append("samples.jsonl", {"micro_batch": str(at), "step": step, "indices": indices})

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Record values at a global step; `kind` is one of those above."""
        self._append("metrics.jsonl", {"kind": kind, "step": step, **values})
        for name, value in values.items():
            if isinstance(value, int | float):
                self._events.add_scalar(f"{kind}/{name}", value, step)

    def sync(self) -> None:
        """Make what was written so far visible at the run's address."""
        self._events.flush()
        self._copy()

    def _copy(self) -> None:
        if not self._local:
            pyarrow.fs.copy_files(
                str(self._folder),
                self._remote,
                source_filesystem=pyarrow.fs.LocalFileSystem(),
                destination_filesystem=self._filesystem,
                use_threads=False,  # as Ray Train does for S3: uploads take threads of the same pool
            )

    def close(self) -> None:
        self._events.close()
        self._copy()
        if not self._local:
            shutil.rmtree(self._folder, ignore_errors=True)
