"""Text for people: names as a terminal can show them, numbers, and the tables that commands print."""

from __future__ import annotations

import io
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

Result = dict[str, Any]
"""What a command returns, and --json prints."""

# Characters that control a terminal or are invalid in a page: control characters except tab and newline, changes
# of the writing direction, line separators, and surrogates, which Python uses for bytes that are not UTF-8.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Return a text with control characters as escapes, since names in it may come from anywhere."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


class _Escaping(logging.Handler):
    """Rewrites raypipe's log records as a terminal can show them, before the handlers of the process's owner."""

    def emit(self, record: logging.LogRecord) -> None:
        record.msg = printable(record.getMessage())
        record.args = ()
        if record.exc_info:
            text = (self.formatter or logging.Formatter()).formatException(
                record.exc_info
            )
            record.exc_text = printable(text)
        # This handler must not keep Python from showing records that nobody else handles.
        last = logging.lastResort
        is_unhandled = not logging.getLogger().handlers and _LOGGER.handlers == [self]
        if is_unhandled and last and record.levelno >= last.level:
            last.handle(record)


_LOGGER = logging.getLogger("raypipe")
_LOGGER.addHandler(_Escaping())


class PrintableOutput(io.TextIOBase):
    """Standard output as a command writes to it: without characters that control a terminal."""

    def __init__(self, output: TextIO) -> None:
        self._output = output

    def write(self, text: str) -> int:
        return self._output.write(printable(text))

    def flush(self) -> None:
        self._output.flush()


def number(value: float) -> str:
    """Format a number for people, with about four digits."""
    if not math.isfinite(value):
        return "none"
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def readable(value: Any) -> str:
    """Format a value of a command's result: [least, median, most], two values, or a dict of counts or words."""
    if isinstance(value, dict):
        named = ((name.replace("_", " "), count) for name, count in value.items())
        return ", ".join(
            f"{n:,} {name}" if type(n) is int else f"{name} ({readable(n)})"
            for name, n in named
        )
    if isinstance(value, tuple):
        return " / ".join(map(readable, value))
    if (
        isinstance(value, list)
        and len(value) == 3
        and all(type(number) is int for number in value)
    ):
        least, median, greatest = map(readable, value)
        return f"{least}–{greatest} (median {median})"
    if isinstance(value, list):
        return ", ".join(map(readable, value))
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, float):
        return number(value)
    return f"{value:,}" if type(value) is int else str(value)


_UNITS = {"_per_s": "{}/s", "_px": "{} px", "_s": "{} s"}


def print_table(heading: str, rows: Mapping[str, Any]) -> None:
    """Print names and values, on standard output; a dict of dicts or lists takes several rows, None no row."""
    lines: list[tuple[str, str]] = []
    for name, value in rows.items():
        suffix = next(filter(name.endswith, _UNITS), "")
        title = name.removesuffix(suffix).replace("_", " ")
        unit = _UNITS.get(suffix, "{}")
        entries = value if isinstance(value, Mapping) else {}
        if any(isinstance(entry, Mapping | list | tuple) for entry in entries.values()):
            lines += [
                (f"{title} {key}", readable(entry)) for key, entry in entries.items()
            ]
        elif value is not None:
            least_and_most, *median = readable(value).partition(" (median")
            lines.append((title, unit.format(least_and_most) + "".join(median)))
    print(heading)
    print_rows(lines)


def told(result: Mapping[str, Any], *left_out: str) -> Result:
    """The values of a command's result that a table shows: without some names, and without empty values."""
    return {
        name: value
        for name, value in result.items()
        if name not in left_out and value not in (None, "", {})
    }


def print_rows(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of texts in aligned columns, on standard output."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(["", *cells]).rstrip())


def print_objects(objects: Sequence[Mapping[str, Any]], *names: str) -> None:
    """Print values of objects by these names, a row for each object, under a row of the names."""
    heads = [name.removeprefix("num_").replace("_", " ") for name in names]
    rows = [[readable(each[name]) for name in names] for each in objects]
    print_rows([heads, *rows] if rows else [["none"]])
