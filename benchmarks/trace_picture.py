"""Draws some time of a trace, as docs/trace.png: what Perfetto shows of it, small.

    raypipe trace --config run.yaml --seconds 20 -o trace.json
    python benchmarks/trace_picture.py trace.json docs/trace.png [--begin 12.5] [--seconds 1.5]

A row is a thread, or a track. Arrows follow every n-th micro-batch, where the picture has room for them.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

COLORS = {
    "row": "#8d99ae",
    "block": "#2a9d8f",
    "read": "#a8dadc",
    "make": "#2a9d8f",
    "died": "#d62828",
    "split": "#e9c46a",
    "ring": "#f4a261",
    "copy": "#e76f51",
    "wait": "#dddddd",
    "first batch": "#dddddd",
    "augment": "#b5838d",
    "compute": "#457b9d",
    "wait for a checkpoint": "#6d597a",
}
STEP = "#adc178"


def draw(trace: dict[str, Any], begin_s: float, seconds: float, every: int) -> Any:
    """Draw a part of a trace."""
    events = trace["traceEvents"]
    begin, end = begin_s * 1e6, (begin_s + seconds) * 1e6
    shown = [
        event
        for event in events
        if event["ph"] == "X"
        and event["ts"] < end
        and event["ts"] + event["dur"] > begin
    ]
    tracks = sorted({(event["pid"], event["tid"]) for event in shown})
    rows = {track: number for number, track in enumerate(tracks)}
    figure, axes = plt.subplots(figsize=(11, 0.8 + 0.42 * len(rows)), dpi=110)
    used = dict[str, str]()
    # the longest first, since others lie inside of them
    for event in sorted(shown, key=lambda event: -event["dur"]):
        row = rows[event["pid"], event["tid"]]
        name = event["name"]
        is_step = name.startswith("step ")
        color = STEP if is_step else COLORS.get(name, "#999999")
        used["step" if is_step else name] = color
        height = 0.44 if name == "read" else 0.8
        left = (max(event["ts"], begin) - begin) / 1e3
        width = (min(event["ts"] + event["dur"], end) - begin) / 1e3 - left
        axes.barh(
            row, width, height, left, color=color, edgecolor="white", linewidth=0.4
        )
    _draw_arrows(axes, events, rows, (begin, end), every)
    for event in events:
        if event["ph"] == "i" and begin <= event["ts"] <= end:
            axes.axvline((event["ts"] - begin) / 1e3, color="#d62828", linewidth=1)
    labels = [
        f"{pid.partition(' (')[0]}\n{tid.partition('(')[0]}" for pid, tid in tracks
    ]
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, seconds * 1e3)
    axes.set_xlabel("ms", fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in used.values()]
    axes.legend(
        handles,
        list(used),
        fontsize=7,
        ncols=len(used),
        loc="lower left",
        bbox_to_anchor=(0, 1),
        frameon=False,
    )
    figure.tight_layout()
    return figure


def _draw_arrows(
    axes: Any,
    events: list[dict[str, Any]],
    rows: dict[tuple[str, str], int],
    window: tuple[float, float],
    every: int,
) -> None:
    """Draw the arrows of every n-th micro-batch that lie in the picture."""
    begin, end = window
    ways: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in ("s", "t", "f"):
            ways[event["id"]].append(event)
    style = {"arrowstyle": "-|>", "color": "black", "lw": 0.7, "alpha": 0.7}
    for way in list(ways.values())[::every]:
        for start, stop in itertools.pairwise(way):
            if start["ts"] < begin or stop["ts"] > end:
                continue
            tail, head = (
                ((event["ts"] - begin) / 1e3, rows[event["pid"], event["tid"]])
                for event in (start, stop)
            )
            axes.annotate("", xy=head, xytext=tail, arrowprops=style)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--begin", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--every", type=int, default=1)
    args = parser.parse_args()
    trace = json.loads(args.trace.read_text())
    figure = draw(trace, args.begin, args.seconds, args.every)
    figure.savefig(args.picture)
    print(f"{args.picture}: {args.picture.stat().st_size / 1e3:.0f} KB")


if __name__ == "__main__":
    main()
