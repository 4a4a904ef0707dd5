"""Output for people: log lines and progress, as text or one JSON object each, and the tables of commands.

    {"time": "2026-11-21T10:46:00.123Z", "level": "WARNING", "logger": "raypipe.train.loop", "message": "…",
     "run": "resnet", "rank": 0, "split": "train", "epoch": 3, "step": 1250}

`step` counts through the run, as in metrics.jsonl; during validation, through the validation. Fields that do not
apply to a process are omitted. Lines of progress go to standard output, all others to standard error.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]

RELAY = "\x02"
"""Prefix of a line of progress that another process shows; alone in a line, it ends the progress."""

STAGES = ("wait", "transfer", "decode", "augment", "compute", "checkpoint")
"""Stages of a trainer's time: NAME_s in progress, records, `StageTimes` and exported metrics."""

_ROOT = logging.getLogger("raypipe")
# Loggers that write to standard error with their own handlers.
_RAY_LOGGERS = ("ray.data", "ray.train")
# This process's place in its run.
_place: dict[str, Any] = {}
_relays = False  # whether another process shows this process's lines of progress
_begun = 0.0  # time.time(); 0 = before any run


class JsonFormatter(logging.Formatter):
    """Formatter of log records as one line of JSON each."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(
            timespec="milliseconds"
        )
        line: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_place,
            **getattr(record, "values", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


_handler: logging.Handler = logging._StderrHandler()  # type: ignore[attr-defined]
_handler.setFormatter(JsonFormatter())


def configure_logs(log: LogFormat, **place: Any) -> None:
    """Set the format of this process's lines, and its place: run, rank.

    Text lines go to the handlers of the process's owner, and have no place. With JSON, the lines that Ray Data and
    Ray Train write to this process's standard error become JSON too.
    """
    print_any_letter()
    is_json = log == "json"
    if is_json != (_handler in _ROOT.handlers):
        (_ROOT.addHandler if is_json else _ROOT.removeHandler)(_handler)
        _ROOT.setLevel(logging.INFO if is_json else logging.NOTSET)
        _ROOT.propagate = not is_json
    if is_json:
        # Ray Data recreates its handlers at each start, so each call repeats this.
        for ray_handler in (
            handler
            for name in _RAY_LOGGERS
            for handler in logging.getLogger(name).handlers
        ):
            if isinstance(ray_handler, logging.StreamHandler) and not isinstance(
                ray_handler, logging.FileHandler
            ):
                ray_handler.setFormatter(_handler.formatter)
    log_place(**place)


def print_any_letter() -> None:
    """Have standard output print ? for letters that its encoding lacks (LANG=en_US), and not raise an error."""
    if getattr(sys.stdout, "errors", "") == "strict":
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]


def is_json() -> bool:
    """Return whether this process's lines are JSON."""
    return _handler in _ROOT.handlers


def log_place(**place: Any) -> None:
    """Update this process's place: split, epoch, step, …; other values stay."""
    _place.update(place)


def progress(logger: logging.Logger, text: str, **values: Any) -> None:
    """Print a line of progress, on standard output.

    Args:
        logger: the module's logger.
        text: the line for people.
        values: its values by name, for JSON.
    """
    if is_json():
        record = logger.makeRecord(
            logger.name, logging.INFO, "", 0, text, (), None, extra={"values": values}
        )
        text = _handler.format(record)
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
    progress(logger, f"{time.time() - begun:5.1f} s  {text}", phase=text)


# Characters that control a terminal or are invalid in a page: control characters except tab and newline, changes
# of the writing direction, line separators, and surrogates, which Python uses for bytes that are not UTF-8.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Return a text with control characters as escapes, since names in it may come from anywhere."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def number(value: float) -> str:
    """Format a number for people, with about four digits."""
    if not math.isfinite(value):
        return "none"
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def shown(value: Any) -> str:
    """Format a value of a command's result: [least, median, most], two values, or a dict of counts or words."""
    if isinstance(value, dict):
        named = ((name.replace("_", " "), part) for name, part in value.items())
        return ", ".join(
            f"{n:,} {name}" if type(n) is int else f"{name} ({shown(n)})"
            for name, n in named
        )
    if isinstance(value, tuple):
        return " / ".join(map(shown, value))
    if (
        isinstance(value, list)
        and len(value) == 3
        and all(type(item) is int for item in value)
    ):
        least, median, most = map(shown, value)
        return f"{least}–{most} (median {median})"
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, float):
        return number(value)
    return f"{value:,}" if type(value) is int else str(value)


_UNITS = {"_per_s": "{}/s", "_px": "{} px", "_s": "{} s"}


def table(heading: str, rows: Mapping[str, Any]) -> None:
    """Print names and values, on standard output; a dict of dicts or lists takes several rows, None no row."""
    lines: list[tuple[str, str]] = []
    for name, value in rows.items():
        suffix = next(filter(name.endswith, _UNITS), "")
        title = name.removesuffix(suffix).replace("_", " ")
        unit = _UNITS.get(suffix, "{}")
        parts = value if isinstance(value, Mapping) else {}
        if any(isinstance(part, Mapping | list | tuple) for part in parts.values()):
            lines += [(f"{title} {key}", shown(part)) for key, part in parts.items()]
        elif value is not None:
            least_and_most, *median = shown(value).partition(" (median")
            lines.append((title, unit.format(least_and_most) + "".join(median)))
    width = max((len(name) for name, _ in lines), default=0)
    print(
        printable(
            "\n".join([heading, *(f"  {name:{width}}  {text}" for name, text in lines)])
        )
    )
