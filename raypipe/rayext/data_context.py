"""Detection of work that belongs to raypipe's executions, so that a user's own use of Ray Data stays unchanged."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

CONTEXT_KEY = "raypipe"
"""Key of raypipe's settings in the context of an execution."""

_thread = threading.local()
_process_is_ours = False


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Context manager: mark this thread's use of Ray Data as raypipe's."""
    before = getattr(_thread, "is_ours", False)
    _thread.is_ours = True
    try:
        yield
    finally:
        _thread.is_ours = before


def take_process() -> None:
    """Mark this process, which has received raypipe's settings, as raypipe's.

    Ray started it for one of raypipe's executions, unless it is a trainer, where users may run their own
    executions.
    """
    global _process_is_ours
    _process_is_ours = "ray.train" not in sys.modules


def is_ours() -> bool:
    """Return whether the caller's use of Ray Data belongs to one of raypipe's executions."""
    if _process_is_ours or getattr(_thread, "is_ours", False):
        return True
    # already imported by callers; a stream without Ray must not import it
    from ray.data import (
        DataContext,
    )

    # The thread of an execution has its context as an attribute; a thread that makes a dataset has set it.
    running = getattr(threading.current_thread(), "_data_context", None)
    return stream_settings(running or DataContext.get_current()) is not None


def stream_settings(context: Any) -> Any:
    """Return raypipe's settings in the context of one of its executions; None for any other, or none."""
    return context and context.get_config(CONTEXT_KEY)
