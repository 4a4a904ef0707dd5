"""What commands print for people."""

from __future__ import annotations

import re
from typing import Any

# What a terminal obeys or a page cannot hold: control characters but tab and newline, those that turn the
# direction of writing, line separators, and halves of characters, as Python has bytes that are no UTF-8.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Text for people, in which names may come from anywhere: what is no character is written as an escape."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def shown(value: Any) -> str:
    """A value of a command's result; a list of numbers is a range, from least to most."""
    if isinstance(value, dict):
        return ", ".join(f"{number:,} {name}" for name, number in value.items())
    if isinstance(value, list):
        is_range = all(isinstance(item, int) for item in value)
        return (" … " if is_range else ", ").join(map(shown, value))
    return f"{value:,}" if isinstance(value, int) else "none" if value is None else str(value)


def table(title: str, rows: list[tuple[str, str]]) -> None:
    """Print names and values as a table, on standard output."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    shown = Table(show_header=False)
    shown.add_column()
    shown.add_column(justify="right")
    for name, value in rows:
        shown.add_row(escape(printable(name)), escape(printable(value)))
    print(printable(title))  # not the table's own, which would be broken to the table's width
    Console().print(shown)
