"""What benchmarks/peers.py has measured: tables, the bars that were set, a picture."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

OURS = "raypipe"
_COLUMNS = {
    "steady": ("steady, images/s", "{:,.0f}"),
    "sustained": ("sustained", "{:,.0f}"),
    "first_batch_s": ("first batch, s", "{:.2f}"),
    "boundary": ("boundary", "{:.1f}"),
    "long_gap": ("long gap", "{:.1f}"),
    "memory_mib": ("memory, MiB", "{:,.0f}"),
    "cpu_s_per_1000": ("CPU s / 1,000", "{:.2f}"),
}
_TITLES = {
    "heavy": "heavy transform",
    "light": "light transform: random crop and flip",
    "s256": "light transform, short side 256",
    "tiny": "flip and crop of images of 32 px",
    "photos": "light transform, photos of 12 MP",
}


@dataclass(frozen=True)
class Bars:
    """What was set for a case; None = nothing.

    Attributes:
        best_peer: least steady / the fastest peer's.
        cpu: the most CPU per image / that of `cpu_of`, a peer; empty = the peer that takes least.
        ceiling: least steady / that of decode and transform alone.
        first_batch_s: most seconds until raypipe's first batch.
    """

    best_peer: float
    cpu: float | None = None
    cpu_of: str = ""
    ceiling: float | None = None
    first_batch_s: float | None = None


_DATALOADER = "torch DataLoader"
_BARS = {
    "tiny": Bars(3.0, cpu=0.30, first_batch_s=1.0),
    "s256": Bars(1.9, cpu=0.50, cpu_of=_DATALOADER, first_batch_s=1.0),
    "light": Bars(1.55, cpu=0.62, cpu_of=_DATALOADER, ceiling=0.88, first_batch_s=1.0),
    "heavy": Bars(1.5, cpu=0.65, cpu_of=_DATALOADER, ceiling=0.88, first_batch_s=1.5),
    "photos": Bars(2.0),
}


def peers(rows: dict[str, Any]) -> list[str]:
    """The loaders that ran and are not raypipe."""
    return [
        name
        for name, row in rows.items()
        if "first_batch_s" in row and not name.startswith(OURS)
    ]


def show(medians: dict[str, Any]) -> None:
    for case, rows in medians.items():
        table = Table(title=_TITLES[case])
        table.add_column("")
        for title, _ in _COLUMNS.values():
            table.add_column(title, justify="right")
        for name, row in rows.items():
            if "error" in row:
                table.add_row(
                    name, "cannot run here: " + row["error"].splitlines()[-1][:60]
                )
                continue
            cells = [
                text.format(row[key]) if key in row else ""
                for key, (_, text) in _COLUMNS.items()
            ]
            table.add_row(name, *cells)
        Console(width=120).print(table)


def verdicts(
    results: dict[str, Any], starts: list[list[float]]
) -> dict[str, dict[str, Any]]:
    """The bars: what was reached, as the median of each repeat's own ratio, and whether that is enough.

    Args:
        results: {case: {loader: {figure: [one of each repeat]}}}.
        starts: seconds to the first batch, of each repeat, over a small store and over a large one; or empty.
    """
    found: dict[str, dict[str, Any]] = {}

    def ratio(
        name: str,
        over: list[float],
        under: list[float],
        least: float = 0,
        most: float = float("inf"),
    ) -> None:
        value = statistics.median(a / b for a, b in zip(over, under, strict=True))
        bar = f">= {least:g}" if least else f"<= {most:g}"
        found[name] = {
            "reached": round(value, 3),
            "bar": bar,
            "met": least <= value <= most,
        }

    for case, bars in _BARS.items():
        rows = results.get(case, {})
        ours = rows.get(OURS, {})
        if bars.first_batch_s and "first_batch_s" in ours:
            seconds = ours["first_batch_s"]
            name = f"{case}: first batch, s"
            ratio(name, seconds, [1.0] * len(seconds), most=bars.first_batch_s)
        if "steady" not in ours:
            continue
        others = peers(rows)
        if bars.ceiling:
            kernel = rows["ceiling"]["steady"]
            ratio(
                f"{case}: stream / kernel alone", ours["steady"], kernel, bars.ceiling
            )
        if others:
            best = max(others, key=lambda name: statistics.median(rows[name]["steady"]))
            steady = rows[best]["steady"]
            ratio(
                f"{case}: steady / best peer ({best})",
                ours["steady"],
                steady,
                bars.best_peer,
            )
        if others and bars.cpu and bars.cpu_of in ("", *others):
            cpu = {name: rows[name]["cpu_s_per_1000"] for name in others}
            least = bars.cpu_of or min(
                others, key=lambda name: statistics.median(cpu[name])
            )
            ratio(
                f"{case}: CPU per image / {least}'s",
                ours["cpu_s_per_1000"],
                cpu[least],
                most=bars.cpu,
            )
    if starts:
        ratio("start over 10^9 samples / over 10^4", starts[1], starts[0], most=1.2)
    table = Table(title="bars")
    for column in ("", "reached", "bar", ""):
        table.add_column(column)
    for name, bar in found.items():
        table.add_row(
            name,
            f"{bar['reached']:.2f}",
            bar["bar"],
            "met" if bar["met"] else "not met",
        )
    Console(width=120).print(table)
    return found


def draw(medians: dict[str, Any], path: str) -> None:
    """Draw the steady throughput of each loader as bars, a panel for each case, and the limit of the cores.

    raypipe has one bar, with its defaults. The limit is the rate of decode and transform on these cores, without a
    loader.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(medians), figsize=(5.6 * len(medians), 3.2), squeeze=False
    )
    for axis, (case, rows) in zip(axes[0], medians.items(), strict=True):
        ran = [
            name
            for name in rows
            if "first_batch_s" in rows[name] and not name.startswith(f"{OURS},")
        ]
        ran.sort(key=lambda name: rows[name]["steady"])
        steady = [rows[name]["steady"] for name in ran]
        axis.barh(
            ran,
            steady,
            color=["#d1495b" if name == OURS else "#8d99ae" for name in ran],
        )
        for y, value in enumerate(steady):
            axis.text(value, y, f" {value:,.0f}", va="center", fontsize=9)
        limit = rows.get("ceiling", {}).get("steady", 0)
        if limit:
            axis.axvline(limit, color="black", linestyle="--", linewidth=1)
            label = f"limit of the cores \n{limit:,.0f} "
            axis.text(limit, 0, label, ha="right", va="center", fontsize=9)
        axis.set(
            title=_TITLES[case], xlabel="images/s", xlim=(0, 1.1 * max(*steady, limit))
        )
        axis.tick_params(labelsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=167)
