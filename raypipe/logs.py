"""The format of log lines, text or one JSON object each, and a process's place in its run, which is part of them.

    {"time": "2026-11-21T10:46:00.123Z", "level": "WARNING", "logger": "raypipe.train.loop", "message": "…",
     "run": "resnet", "rank": 0, "split": "train", "epoch": 3, "step": 1250}

`step` counts through the run, as in metrics.jsonl; during validation, through the validation. Fields that do not
apply to a process are omitted. Log lines go to standard error, lines of progress (`raypipe.progress`) to standard
output.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]


_ROOT = logging.getLogger("raypipe")
# Loggers that write to standard error with their own handlers.
_RAY_LOGGERS = ("ray.data", "ray.train")
# This process's place in its run.
_place: dict[str, Any] = {}


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


def configure_logs(log: LogFormat, **fields: Any) -> None:
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
    log_place(**fields)


def print_any_letter() -> None:
    """Have standard output print ? for letters that its encoding lacks (LANG=en_US), and not raise an error."""
    if getattr(sys.stdout, "errors", "") == "strict":
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]


def is_json() -> bool:
    """Return whether this process's lines are JSON."""
    return _handler in _ROOT.handlers


def log_place(**fields: Any) -> None:
    """Update this process's place: split, epoch, step, …; other values stay."""
    _place.update(fields)


def json_line(logger: logging.Logger, text: str, values: dict[str, Any]) -> str:
    """Format a message with further values by name, as a line of JSON."""
    record = logger.makeRecord(
        logger.name, logging.INFO, "", 0, text, (), None, extra={"values": values}
    )
    return _handler.format(record)
