"""Output for people: log lines and progress, as text or one JSON object each, and the tables of commands.

    {"time": "2026-11-21T10:46:00.123Z", "level": "WARNING", "logger": "raypipe.train.loop", "message": "…",
     "run": "resnet", "rank": 0, "split": "train", "epoch": 3, "step": 1250}

`step` is counted through the run, as in metrics.jsonl; during validation through the validation. A process
leaves out what it does not know. Lines of progress go to standard output, all others to standard error.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]

STAGES = ("wait", "transfer", "decode", "augment", "compute", "checkpoint")
"""What a trainer's time goes by: NAME_s in progress, records, `StageTimes` and exported metrics."""

_ROOT = logging.getLogger("raypipe")
# They write to standard error with their own handlers.
_RAYS_OWN = ("ray.data", "ray.train")
# Of this process: it is at one place of one run.
_place: dict[str, Any] = {}
_RELAY = "\x02"  # before a line of progress on its way to the process that shows it
_relays = False
_begun = 0.0  # by time.time(); 0 = before any run


class JsonFormatter(logging.Formatter):
    """A log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
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

    Text lines are left to the handlers of whoever owns the process, and have no place. With JSON, lines that Ray
    Data and Ray Train write to this process's standard error are the same, from then on.
    """
    is_json = log == "json"
    if is_json != (_handler in _ROOT.handlers):
        (_ROOT.addHandler if is_json else _ROOT.removeHandler)(_handler)
        _ROOT.setLevel(logging.INFO if is_json else logging.NOTSET)
        _ROOT.propagate = not is_json
    if is_json:
        # Ray Data sets up its handlers again when it starts something, so each call does this again.
        for theirs in (handler for name in _RAYS_OWN for handler in logging.getLogger(name).handlers):
            if isinstance(theirs, logging.StreamHandler) and not isinstance(theirs, logging.FileHandler):
                theirs.setFormatter(_handler.formatter)
    log_place(**place)


def is_json() -> bool:
    """Return whether this process's lines are JSON."""
    return _handler in _ROOT.handlers


def log_place(**place: Any) -> None:
    """From now on this process is at split, epoch, step, …; other values stay."""
    _place.update(place)


def progress(logger: logging.Logger, text: str, **values: Any) -> None:
    """Print a line of progress, on standard output.

    Args:
        logger: of the module.
        text: for people.
        values: what it says, by names; for JSON, and for who shows what this process relays.
    """
    if is_json():
        record = logger.makeRecord(logger.name, logging.INFO, "", 0, text, (), None, extra={"values": values})
        text = _handler.format(record)
    elif _relays:
        text = _RELAY + json.dumps([text, values], default=str)
    print(text, flush=True)


def relay_progress(relays: bool) -> None:
    """From now on lines of progress of this process are for another one to show, which Ray brings them to."""
    global _relays
    _relays = relays


def relayed(line: str) -> tuple[str, dict[str, Any]] | None:
    """A line of progress that a process relays: its text and values. None for any other line."""
    if not line.startswith(_RELAY):
        return None
    text, values = json.loads(line.removeprefix(_RELAY))
    return text, values


def begin_phases(begun: float = 0.0) -> float:
    """Begin the phases of a run's start: each is shown with its seconds since this time.time(), which is returned.

    By default they have begun with the first that was shown, or begin now.
    """
    global _begun
    _begun = begun or _begun or time.time()
    return _begun


def end_phases() -> None:
    """End the phases of a run: the next one belongs to another run."""
    global _begun
    _begun = 0.0


def phase(logger: logging.Logger, text: str) -> None:
    """Print what the start of a run is at, from now on."""
    begun = begin_phases()
    progress(logger, f"{time.time() - begun:5.1f} s  {text}", phase=text)


# What a terminal obeys or a page cannot hold: control characters but tab and newline, those that turn the
# direction of writing, line separators, and halves of characters, as Python has bytes that are no UTF-8.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Text for people, in which names may come from anywhere: control characters are written as escapes."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def number(value: float) -> str:
    """A figure as people write it, of about four digits."""
    if not math.isfinite(value):
        return "none"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def shown(value: Any) -> str:
    """A value of a command's result: [least, median, most], a tuple of two values, a dict of counts or words."""
    if isinstance(value, dict):
        named = ((name.replace("_", " "), part) for name, part in value.items())
        return ", ".join(f"{n:,} {name}" if type(n) is int else f"{name} ({shown(n)})" for name, n in named)
    if isinstance(value, tuple):
        return " / ".join(map(shown, value))
    if isinstance(value, list) and len(value) == 3 and all(type(item) is int for item in value):
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
        title, unit = name.removesuffix(suffix).replace("_", " "), _UNITS.get(suffix, "{}")
        parts = value if isinstance(value, Mapping) else {}
        if any(isinstance(part, Mapping | list | tuple) for part in parts.values()):
            lines += [(f"{title} {key}", shown(part)) for key, part in parts.items()]
        elif value is not None:
            least_and_most, *median = shown(value).partition(" (median")
            lines.append((title, unit.format(least_and_most) + "".join(median)))
    width = max((len(name) for name, _ in lines), default=0)
    print(printable("\n".join([heading, *(f"  {name:{width}}  {text}" for name, text in lines)])))
