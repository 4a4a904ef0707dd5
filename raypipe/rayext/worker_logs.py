"""The lines of Ray's workers on their way to this process's console: JSON lines if this process logs JSON.

Ray prints each line of its workers after the name of the process, `(RayTrainWorker pid=…)`. If this process logs
JSON, all lines are printed as JSON: a user's print, a crash of Python, a message of Ray. See `tweaks.sift` for the
lines that have no meaning to a run's user.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from typing import Any

from raypipe.logs import is_json
from raypipe.progress import print_progress, spares_output
from raypipe.rayext.ray_private import find_private, replace
from raypipe.rayext.tweaks import sift

logger = logging.getLogger(__name__)

_JSON_LINE = re.compile(r'^\{"')

_PRINT = "ray._private.worker.print_to_stdstream"
_DISPATCHER = "ray._private.ray_logging.global_worker_stdstream_dispatcher"
_LOSS = "lines of Ray's workers are not printed as JSON, and all of them are printed"


def take_worker_logs() -> None:
    """Put raypipe between Ray and this process's console, whether or not Ray is connected; once per process."""
    print_lines = find_private(_PRINT, _LOSS)
    if getattr(print_lines, "is_raypipes", False):
        return
    replace(_PRINT, _printing, loss=_LOSS)
    if "RAY_DEDUP_LOGS_ALLOW_REGEX" not in os.environ:
        # Ray merges identical lines of several workers and appends a note, which would make JSON lines invalid.
        for name in ("stdout_deduplicator", "stderr_deduplicator"):
            if deduplicator := find_private(f"ray._private.worker.{name}", _LOSS):
                deduplicator.allow_re = _JSON_LINE
    dispatcher = find_private(_DISPATCHER, _LOSS)
    for number, (name, handler) in enumerate(dispatcher.handlers if dispatcher else ()):
        if getattr(handler, "func", None) is print_lines:  # Ray is connected already
            new = functools.partial(
                find_private(_PRINT, _LOSS), *handler.args, **handler.keywords
            )
            dispatcher.handlers[number] = (name, new)


def gets_worker_logs() -> bool:
    """Return whether Ray sends its workers' lines to this process, and raypipe prints them."""
    dispatcher = find_private(_DISPATCHER, _LOSS)
    handlers = dispatcher.handlers if dispatcher else ()
    return any(
        getattr(getattr(handler, "func", None), "is_raypipes", False)
        for _, handler in handlers
    )


def _printing(print_lines: Any) -> Any:
    """Wrap Ray's function, whose `data` has the lines of one process, and identifies the process."""

    def print_worker_lines(data: dict[str, Any], *args: Any, **options: Any) -> None:
        lines = data["lines"]
        if is_json() and data.get("pid") == "autoscaler":
            events = find_private("ray._private.worker.filter_autoscaler_events", _LOSS)
            lines = events(lines) if events else lines
        kept = []
        for line in sift(lines):
            if is_json() and not line.startswith("{"):
                print_progress(logger, line, pid=data.get("pid"), ip=data.get("ip"))
            else:
                kept.append(line)
        if kept:
            # Ray has its own messages on standard output, where a command's result is.
            is_rays = data.get("pid") in ("raylet", "autoscaler")
            is_error = data["is_err"] or is_rays or spares_output()
            print_lines({**data, "lines": kept, "is_err": is_error}, *args, **options)

    print_worker_lines.is_raypipes = True  # type: ignore[attr-defined]
    return print_worker_lines
