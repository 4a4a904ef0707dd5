"""What commands print for people."""

from __future__ import annotations


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
