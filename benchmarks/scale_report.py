"""What benchmarks/scale.py has measured: medians, a table, a picture."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

SHAPE = ("actors", "ranks", "samples", "side", "block")
_PARTS = ("execution", "reader", "supervisor", "consumer", "actors", "ray")


def median_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of one case's repeats, and `one_core`: micro-batches/s of an execution that has a core."""
    shape = {name: runs[0][name] for name in SHAPE}
    cpu_ms = {
        part: statistics.median(run["cpu_ms"].get(part, 0.0) for run in runs)
        for part in _PARTS
    }
    one_core = 1000 / (cpu_ms["execution"] or cpu_ms["consumer"])
    per_s = statistics.median(run["per_s"] for run in runs)
    return {
        **shape,
        "repeats": len(runs),
        "per_s": per_s,
        "one_core": one_core,
        "cpu_ms": cpu_ms,
    }


def show(results: dict[str, list[dict[str, Any]]]) -> None:
    for name, rows in results.items():
        table = Table(title=f"{name}: micro-batches/s, and CPU ms per micro-batch")
        columns = [
            "actors",
            "W",
            "B",
            "side",
            "k",
            "per s",
            "one core",
            *_PARTS,
            "in all",
        ]
        for column in columns:
            table.add_column(column, justify="right")
        for row in rows:
            shape = [str(row[key]) for key in SHAPE]
            times = [f"{row['cpu_ms'].get(part, 0.0):.2f}" for part in _PARTS]
            total = f"{sum(row['cpu_ms'].values()):.1f}"
            table.add_row(
                *shape, f"{row['per_s']:.1f}", f"{row['one_core']:.0f}", *times, total
            )
        Console(width=120).print(table)


def draw(results: dict[str, list[dict[str, Any]]], path: str) -> None:
    """The results as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes_of = {"actors": "actors", "ranks": "ranks"}
    shown = [name for name in axes_of if name in results]
    figure, axes = pyplot.subplots(
        1,
        len(shown),
        figsize=(4.6 * len(shown), 4),
        squeeze=False,
        layout="constrained",
    )
    for axis, name in zip(axes[0], shown, strict=True):
        rows = results[name]
        key = axes_of[name]
        x = [row[key] for row in rows]
        axis.plot(
            x,
            [row["per_s"] for row in rows],
            "o-",
            label="measured, all on one machine",
        )
        axis.plot(
            x,
            [row["one_core"] for row in rows],
            "s--",
            label="a core for the execution",
        )
        axis.set(xscale="log", xlabel=name, ylim=(0, None))
        axis.set_xticks(x, [str(value) for value in x], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("micro-batches/s")
    axes[0][0].legend()
    figure.savefig(path, dpi=110)
