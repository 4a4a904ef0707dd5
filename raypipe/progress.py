"""Lines of progress, on standard output, as text or JSON, and the timed phases of a run's start."""

from __future__ import annotations

import logging
import time
from typing import Any

from raypipe.logs import is_json, json_line

RELAY = "\x02"
"""Prefix of a line of progress that another process shows; alone in a line, it ends the progress."""


_relays = False  # whether another process shows this process's lines of progress
_begun = 0.0  # time.time(); 0 = before any run


def print_progress(logger: logging.Logger, text: str, **values: Any) -> None:
    """Print a line of progress, on standard output.

    Args:
        logger: the module's logger.
        text: the line for people.
        values: its values by name, for JSON.
    """
    if is_json():
        text = json_line(logger, text, values)
    elif _relays:
        text = "\n".join(RELAY + line for line in text.split("\n"))
    print(text, flush=True)


def relay_progress(relays: bool) -> None:
    """Set whether another process, to which Ray forwards them, shows this process's lines of progress."""
    global _relays
    _relays = relays


def begin_phases(begun: float = 0.0) -> float:
    """Begin the phases of a run's start, and return their time.time(), from which each shows its seconds.

    By default they begin with the first phase, or now.
    """
    global _begun
    _begun = begun or _begun or time.time()
    return _begun


def end_phases() -> None:
    """End the phases of a run; the next phase belongs to another run."""
    global _begun
    _begun = 0.0


def phase(logger: logging.Logger, text: str) -> None:
    """Print the current phase of a run's start."""
    begun = begin_phases()
    print_progress(logger, f"{time.time() - begun:5.1f} s  {text}", phase=text)
