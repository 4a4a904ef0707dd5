"""Lines of progress, as text or JSON, and the timed phases of a run's start."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from raypipe.logs import is_json, json_line
from raypipe.printing import printable

RELAY = "\x02"
"""Prefix of a line of progress that another process shows; alone in a line, it ends the progress."""


class Phase(NamedTuple):
    """Phase of a run's start, by its name, since a moment of time.time()."""

    text: str
    began_at: float


_relays = False  # whether another process shows this process's lines of progress
_spares_output = False  # whether standard output has only a command's result
_phases: list[Phase] = []


def print_progress(logger: logging.Logger, text: str, **values: Any) -> None:
    """Print a line of progress, on standard output, or on standard error in `spared_output`.

    Args:
        logger: the module's logger.
        text: the line for people.
        values: its values by name, for JSON.
    """
    if is_json():
        text = json_line(logger, text, values)
    elif _relays:
        text = "\n".join(RELAY + line for line in printable(text).split("\n"))
    else:
        text = printable(text)
    # a full disk or a closed pipe behind the output ends no run
    with contextlib.suppress(OSError):
        print(text, flush=True, file=sys.stderr if _spares_output else sys.stdout)


@contextlib.contextmanager
def spared_output() -> Iterator[None]:
    """Context manager: progress goes to standard error, so that standard output has only a command's result."""
    global _spares_output
    _spares_output = True
    try:
        yield
    finally:
        _spares_output = False


def spares_output() -> bool:
    """Return whether this process is in `spared_output`."""
    return _spares_output


def relay_progress(relays: bool) -> None:
    """Set whether another process, to which Ray forwards them, shows this trainer's lines of progress."""
    global _relays
    _relays = relays


def phases() -> list[Phase]:
    """Return the phases of a run's start so far, for another process to continue."""
    return list(_phases)


def begin_phases(begun: list[Phase]) -> None:
    """Continue the phases of a run's start, which another process has begun."""
    _phases[:] = begun


def end_phases() -> None:
    """End the phases of a run; the next phase belongs to another run."""
    _phases.clear()


def phase(logger: logging.Logger, text: str) -> None:
    """Print the current phase of a run's start."""
    _phases.append(Phase(text, time.time()))
    spent_s = _phases[-1].began_at - _phases[0].began_at
    print_progress(logger, f"{spent_s:5.1f} s  {text}", phase=text)


def phase_seconds() -> dict[str, float]:
    """Return the seconds of each phase of a run's start, whose last phase ends now."""
    ends = [later.began_at for later in _phases[1:]] + [time.time()]
    return {
        begun.text: end - begun.began_at
        for begun, end in zip(_phases, ends, strict=True)
    }
