"""What processes of Ray's write, on its way to this one's console.

Ray prints each line of its workers with who has written it, `(RayTrainWorker pid=…)`. Here a line of progress
goes to who shows it, and lines that mean nothing to a run's user are left out: they stay in Ray's log files.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from ray._private import ray_logging, worker

from raypipe.logs import is_json, progress, relayed

logger = logging.getLogger(__name__)

_NOISE = re.compile(
    # Of an actor that Ray Data starts with arguments in the object store: they are held as long as it runs.
    r"has constructor arguments in the object store"
    # Of the actors of an execution that has ended.
    r"|submit failed\. There are infinite retries remaining.*killed by `ray\.kill`"
    # One for each process group of torch's.
    r"|\[Gloo\] Rank \d+ is connected to"
    # Ray Train's and Ray Data's own chronicles.
    r"|Reporting training result|execution finished in|Registered dataset logger"
)

Shown = Callable[[str, dict[str, Any]], None]
"""Shows a line of progress: its text, and what it says by names."""

_shown: Shown | None = None


def show_progress(shown: Shown | None) -> bool:
    """From now on lines of progress that trainers relay go there, or are printed; returns whether they can be."""
    global _shown
    _shown = shown
    handlers = ray_logging.global_worker_stdstream_dispatcher.handlers
    return any(getattr(handler, "func", None) is _print for _, handler in handlers)


def take_console() -> None:
    """Stand between Ray and this process's console, from before it connects."""
    _worker.print_to_stdstream = _print


def quiet_broadcasts() -> None:
    """Keep Ray Train in this process from warning of large broadcasts between its workers."""
    logging.getLogger("ray.train.v2._internal.execution.collective_impl").setLevel(logging.ERROR)


def quiet_trainer() -> None:
    """Keep Ray Train, in a trainer, from logging each checkpoint and its metrics between the lines of progress."""
    for name in ("ray.train", *logging.Logger.manager.loggerDict):
        if name.startswith("ray.train") or "/ray/train/" in name:  # some are named by their files
            # Its traceback of what ends a train function is kept with the error, see `train.launch`.
            logging.getLogger(name).setLevel(logging.CRITICAL if "util" in name else logging.WARNING)


_worker: Any = worker
_rays_print = _worker.print_to_stdstream


def _print(data: dict[str, Any], *args: Any, **options: Any) -> None:
    """In place of Ray's function: `data` has the lines of one process, and who that is.

    They are printed as JSON if this process's lines are: a user's print, a crash of Python's, a word of Ray's own.
    """
    kept, lines = [], data["lines"]
    if is_json() and data.get("pid") == "autoscaler":
        lines = _worker.filter_autoscaler_events(lines)
    for line in lines:
        if progressed := relayed(line):
            text, values = progressed
            if _shown:
                _shown(text, values)
            elif text:
                print(text, flush=True)
        elif _NOISE.search(line):
            continue
        elif is_json() and not line.startswith("{"):
            progress(logger, line, pid=data.get("pid"), ip=data.get("ip"))
        else:
            kept.append(line)
    if kept:
        _rays_print({**data, "lines": kept}, *args, **options)
