"""Filter for the lines of Ray's processes on their way to this process's console.

Ray prints each line of its workers after the name of the process, `(RayTrainWorker pid=…)`. This filter passes
lines of progress to the progress display, and drops lines without meaning to a run's user, which stay in Ray's log
files.
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
    # Ray Data starts an actor with arguments in the object store, which are kept as long as it runs.
    r"has constructor arguments in the object store"
    # The actors of a finished execution are killed.
    r"|submit failed\. There are infinite retries remaining.*killed by `ray\.kill`"
    # torch prints this for each process group.
    r"|\[Gloo\] Rank \d+ is connected to"
    # Ray Train and Ray Data log their own progress.
    r"|Reporting training result|execution finished in|Registered dataset logger"
)

Shown = Callable[[str, dict[str, Any]], None]
"""Function that shows a line of progress: its text, and its values by name."""

_shown: Shown | None = None


def show_progress(shown: Shown | None) -> bool:
    """Show the trainers' lines of progress with `shown`, or print them; return whether this console gets them."""
    global _shown
    _shown = shown
    handlers = ray_logging.global_worker_stdstream_dispatcher.handlers
    return any(getattr(handler, "func", None) is _print for _, handler in handlers)


def take_console() -> None:
    """Install the filter between Ray and this process's console; must come before Ray connects."""
    _worker.print_to_stdstream = _print


def quiet_broadcasts() -> None:
    """Silence Ray Train's warnings about large broadcasts between its workers, in this process."""
    logging.getLogger("ray.train.v2._internal.execution.collective_impl").setLevel(logging.ERROR)


def quiet_trainer() -> None:
    """Silence Ray Train's logs of checkpoints and metrics in a trainer, which would break up the progress."""
    for name in ("ray.train", *logging.Logger.manager.loggerDict):
        if name.startswith("ray.train") or "/ray/train/" in name:  # some loggers are named after their files
            # The traceback of the error that ends a train function is kept with the error, see `train.launch`.
            logging.getLogger(name).setLevel(logging.CRITICAL if "util" in name else logging.WARNING)


_worker: Any = worker
_rays_print = _worker.print_to_stdstream


def _print(data: dict[str, Any], *args: Any, **options: Any) -> None:
    """Replace Ray's function; `data` has the lines of one process, and identifies the process.

    If this process logs JSON, all lines are printed as JSON: a user's print, a crash of Python, a message of Ray.
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
