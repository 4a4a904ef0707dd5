"""Filter for the lines of Ray's processes on their way to this process's console.

Ray prints each line of its workers after the name of the process, `(RayTrainWorker pid=…)`. This filter prints
lines of progress without that name, and drops lines without meaning to a run's user, which stay in Ray's logs.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
from typing import Any

from ray._private import ray_logging, worker

from raypipe.logs import is_json
from raypipe.progress import RELAY, print_progress

logger = logging.getLogger(__name__)

_NOISE = re.compile(
    # Ray Data starts an actor with arguments in the object store, which are kept as long as it runs.
    r"has constructor arguments in the object store"
    # The actors of a finished execution are killed.
    r"|failed\. There are infinite retries remaining.*killed by `ray\.kill`"
    # A killed actor's process ends before it has answered.
    r"|Failed to kill actor \w+, return status"
    # torch prints this for each process group.
    r"|\[Gloo\] Rank \d+ is connected to"
    # Ray Train and Ray Data log their own progress.
    r"|Reporting training result|execution finished in|Registered dataset logger"
)

_END_S = 3.0  # longest wait for the trainers' last lines, which Ray delivers late
_ended = threading.Event()


def begin_progress() -> bool:
    """Begin the progress of a run's trainers; return whether this console gets it."""
    _ended.clear()
    handlers = ray_logging.global_worker_stdstream_dispatcher.handlers
    return any(getattr(handler, "func", None) is _print for _, handler in handlers)


def await_progress() -> None:
    """Wait for the end of the trainers' progress, a few seconds at most."""
    _ended.wait(_END_S)


def take_console() -> None:
    """Install the filter between Ray and this process's console, whether or not Ray is connected."""
    _worker.print_to_stdstream = _print
    dispatcher = ray_logging.global_worker_stdstream_dispatcher
    for number, (name, handler) in enumerate(dispatcher.handlers):
        if getattr(handler, "func", None) is _rays_print:  # Ray is connected already
            dispatcher.handlers[number] = (
                name,
                functools.partial(_print, *handler.args, **handler.keywords),
            )


def quiet_broadcasts() -> None:
    """Silence Ray Train's warnings about large broadcasts between its workers, in this process."""
    logging.getLogger("ray.train.v2._internal.execution.collective_impl").setLevel(
        logging.ERROR
    )


def quiet_trainer() -> None:
    """Silence Ray Train's logs of checkpoints and metrics in a trainer, which would break up the progress."""
    for name in ("ray.train", *logging.Logger.manager.loggerDict):
        if (
            name.startswith("ray.train") or "/ray/train/" in name
        ):  # some loggers are named after their files
            # The traceback of the error that ends a train function is kept with the error, see `train.launch`.
            logging.getLogger(name).setLevel(
                logging.CRITICAL if "util" in name else logging.WARNING
            )


_worker: Any = worker
_rays_print = _worker.print_to_stdstream


def _print(data: dict[str, Any], *args: Any, **options: Any) -> None:
    """Replace Ray's function; `data` has the lines of one process, and identifies the process.

    If this process logs JSON, all lines are printed as JSON: a user's print, a crash of Python, a message of Ray.
    """
    kept = []
    lines = data["lines"]
    if is_json() and data.get("pid") == "autoscaler":
        lines = _worker.filter_autoscaler_events(lines)
    for line in lines:
        if line == RELAY:
            _ended.set()
        elif line.startswith(RELAY):
            print(line.removeprefix(RELAY), flush=True)
        elif _NOISE.search(line):
            continue
        elif is_json() and not line.startswith("{"):
            print_progress(logger, line, pid=data.get("pid"), ip=data.get("ip"))
        else:
            kept.append(line)
    if kept:
        _rays_print({**data, "lines": kept}, *args, **options)
