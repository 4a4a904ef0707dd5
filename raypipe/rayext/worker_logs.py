"""The lines of Ray's workers on their way to this process's console.

Ray prints each line of its workers after the name of the process, `(RayTrainWorker pid=…)`. The progress of a
run's trainers is printed without it. If this process logs JSON, all lines are printed as JSON: a user's print, a
crash of Python, a message of Ray.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
import threading
from typing import Any, TextIO

from raypipe.logs import is_json
from raypipe.progress import RELAY, print_progress, spares_output
from raypipe.rayext.ray_private import Function, find_private, replace
from raypipe.rayext.tweaks import are_on

logger = logging.getLogger(__name__)

# Lines that Ray must not merge with those of other workers.
_APART = re.compile(rf'^(\{{"|{RELAY})')

WORKER = "ray._private.worker"
_DISPATCHER = "ray._private.ray_logging.global_worker_stdstream_dispatcher"
_LOSS = "lines of Ray's workers are not printed as JSON, and all of them are printed"
# Lines of Ray's about what every stream does, in the form of errors and warnings.
_NO_FAULTS = (
    "has constructor arguments in the object store",
    "worker processes have been started on node",
    "[Gloo] Rank",
    # a pool that shrinks; other deaths have other words
    "The actor is dead because it was killed by `ray.kill`",
    # a script that ends
    "KillActor RPC failed for actor",
)
_END_S = 3.0  # longest wait for the trainers' last lines, which Ray delivers late

_progress_ended = threading.Event()


@functools.cache  # once per process
def take_worker_logs() -> None:
    """Put raypipe between Ray and this process's console, whether or not Ray is connected."""
    replace(f"{WORKER}.print_worker_logs", _printing, loss=_LOSS)
    if "RAY_DEDUP_LOGS_ALLOW_REGEX" not in os.environ:
        # Ray merges identical lines of several workers and appends a note, which would make JSON lines invalid.
        for name in ("stdout_deduplicator", "stderr_deduplicator"):
            if deduplicator := find_private(f"{WORKER}.{name}", _LOSS):
                deduplicator.allow_re = _APART


def begin_progress() -> bool:
    """Begin the progress of a run's trainers; return whether its lines are shown without Ray's prefix."""
    _progress_ended.clear()
    take_worker_logs()
    return are_on() and bool(find_private(f"{_DISPATCHER}.handlers", _LOSS))


def await_progress() -> None:
    """Wait for the end of the trainers' progress, a few seconds at most."""
    _progress_ended.wait(_END_S)


def _printing(print_logs: Function) -> Function:
    """Wrap Ray's function, whose `data` has the lines of one process, and identifies the process."""

    def print_lines(data: dict[str, Any], to: TextIO, *args: Any) -> None:
        lines = data["lines"]
        if is_json() and data.get("pid") == "autoscaler":
            events = find_private(f"{WORKER}.filter_autoscaler_events", _LOSS)
            lines = events(lines) if events else lines
        kept = []
        for line in lines:
            if line == RELAY:
                _progress_ended.set()
            elif are_on() and any(text in line for text in _NO_FAULTS):
                continue
            elif line.startswith(RELAY):
                print(line.removeprefix(RELAY), flush=True)
            elif is_json() and not line.startswith("{"):
                print_progress(logger, line, pid=data.get("pid"), ip=data.get("ip"))
            else:
                kept.append(line)
        if kept:
            # Ray has its own messages on standard output, where a command's result is.
            is_rays = data.get("pid") in ("raylet", "autoscaler")
            is_error = is_rays or spares_output()
            print_logs({**data, "lines": kept}, sys.stderr if is_error else to, *args)

    return print_lines
