"""A trace as Chrome trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

    process    a process of the stream, by role, pid and node
    thread     a thread of it, or a track: "optimizer steps", the GPU
    slice      X: row, block, read, split, ring, copy, wait, compute, checkpoint, …
    arrow      s, t, f: a micro-batch on its way through the processes
    counter    C: blocks, actors, memory
    instant    i: a fault, a new size of the pool

The format: "Trace Event Format", Google, 2016. Processes and threads have names in it, as in `ray timeline`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from raypipe.metrics.tracer import Event

TRACE_FILE = "trace.json"
"""The trace of a run, in its folder."""
_ARROW = "micro-batch"
_STATIONS = {"row", "block", "died", "make", "split", "ring", "compute"}
"""Slices that arrows go through; others lie inside of these."""
_ARRIVAL = "split"
"""A rank's wait for its next block, which may begin before that is made: arrows go through its end."""
_ARRIVAL_US = 10.0


class Chunk(NamedTuple):
    """Events of a process, on the trace's clock: its name, and a list as JSON."""

    process: str
    events: str


def to_json(chunks: Iterable[Chunk], about: Mapping[str, Any]) -> str:
    """Return the trace of a stream's processes as text, an event a line.

    Args:
        about: a description of the trace, by names.
    """
    events = [
        event | {"pid": chunk.process}
        for chunk in chunks
        for event in json.loads(chunk.events)
    ]
    events += _arrows(events)
    start_us = min((event["ts"] for event in events), default=0.0)
    for event in events:
        event["ts"] = round(event["ts"] - start_us, 3)
    # a slice comes before those inside of it, and arrows come after the slice that they begin in
    events.sort(key=lambda event: (event["ts"], -event.get("dur", -1.0)))
    lines = ",\n".join(json.dumps(event) for event in events)
    others = json.dumps({"displayTimeUnit": "ms", "otherData": dict(about)})
    return f'{{"traceEvents": [\n{lines}\n],\n{others[1:]}\n'


def _arrows(events: Iterable[Event]) -> list[Event]:
    """The arrows of each micro-batch, from slice to slice. One that was seen only once has none."""
    ways: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event["name"] not in _STATIONS or event["ph"] != "X":
            continue
        length_us = event["dur"]
        if event["name"] == _ARRIVAL:
            length_us = min(length_us, _ARRIVAL_US)
        begin_us = event["ts"] + event["dur"] - length_us
        places = event["args"].get("micro_batches", [])
        for number, place in enumerate(places):
            # side by side, because those of a block would cover each other
            share = (number + 1) / (len(places) + 1)
            arrow = {
                "name": _ARROW,
                "cat": _ARROW,
                "ph": "t",
                "ts": begin_us + share * length_us,
                "pid": event["pid"],
                "tid": event["tid"],
                "args": {"micro_batch": place},
            }
            ways[place].append(arrow)
    arrows = []
    for number, way in enumerate(ways.values()):
        if len(way) < 2:
            continue
        way.sort(key=lambda arrow: arrow["ts"])
        for arrow in way:
            arrow["id"] = number + 1
        way[0]["ph"] = "s"
        # it ends in the slice around it, not in the next one
        way[-1] |= {"ph": "f", "bp": "e"}
        arrows += way
    return arrows
