"""What commands print for people."""

from __future__ import annotations

from typing import Any


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
        shown.add_row(escape(name), escape(value))
    print(title)  # not the table's own, which would be broken to the table's width
    Console().print(shown)
