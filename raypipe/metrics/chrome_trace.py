"""A trace as Chrome trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

    events of processes, each on its own clock → one list on one clock → JSON

    process    a process of the stream, by role, node and pid
    thread     a thread of it, or a track: "optimizer steps", the GPU
    slice      X: row, block, read, split, ring, copy, wait, compute, checkpoint, …
    arrow      s, t, f: a micro-batch on its way through the processes
    counter    C: blocks, actors, memory
    instant    i: a fault, a new size of the pool

The format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from raypipe.metrics.tracer import Event, TracedProcess

TRACE_FILE = "trace.json"
"""The trace of a run, in its folder."""
STEPS = "optimizer steps"
LOST = "lost work"
"""Tracks that no thread has: steps of the optimizer, and blocks whose actor died."""
_ROLES = ("reader", "transform actor", "coordinator", "trainer", "supervisor")
_ARROW = "micro-batch"
_STATIONS = {"row", "block", "died", "make", "split", "ring", "compute"}
"""Slices that arrows go through; others lie inside of these."""
_ARRIVAL = "split"
"""A rank's wait for its next block, which may begin before that is made."""
_ARRIVAL_NS = 10_000


class Chunk(NamedTuple):
    """Events of a process.

    Attributes:
        process: the process that they are drawn at.
        offset_ns: what to add to its clock for the trace's; None = they are on the trace's clock.
        events: the events.
    """

    process: TracedProcess
    offset_ns: int | None
    events: list[Event]


class _Track(NamedTuple):
    """A process and a thread, as numbers."""

    pid: int
    tid: int


class _Slice(NamedTuple):
    """A slice that micro-batches go through, in ns of the trace's clock; or at whose end they arrive."""

    begin_ns: int
    end_ns: int
    track: _Track
    places: tuple[str, ...]
    is_arrival: bool


def chrome_trace(chunks: Iterable[Chunk], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trace of a stream's processes as an object of JSON. Pure.

    Args:
        chunks: events of each process, which may come in several chunks. Its last offset holds for all of them.
        about: a description of the trace, by names.
    """
    chunks = list(chunks)
    events = _on_one_clock(chunks)
    start_ns = min((event.begin_ns for _, event in events), default=0)
    pids = _pids(process for process, _ in events)
    tracks = _Tracks(pids)
    drawn = list[dict[str, Any]]()
    slices = list[_Slice]()
    for process, event in [*events, *_steps(events)]:
        track = tracks.of(process, event.thread)
        drawn.append(_drawn(event, track, start_ns))
        if event.name in _STATIONS and event.places:
            is_arrival = event.name == _ARRIVAL
            slices.append(
                _Slice(event.begin_ns, event.end_ns, track, event.places, is_arrival)
            )
    drawn += _arrows(slices, start_ns)
    # a slice comes before those inside of it, and arrows come after the slice that they begin in
    drawn.sort(key=lambda event: (event["ts"], -event.get("dur", -1.0)))
    return {
        "traceEvents": [*tracks.named(), *drawn],
        "displayTimeUnit": "ms",
        "otherData": dict(about),
    }


def to_json(trace: Mapping[str, Any]) -> str:
    """Return a trace as text, an event a line."""
    events = ",\n".join(json.dumps(event) for event in trace["traceEvents"])
    others = {name: trace[name] for name in trace if name != "traceEvents"}
    return f'{{"traceEvents": [\n{events}\n],\n{json.dumps(others)[1:]}\n'


def _on_one_clock(chunks: list[Chunk]) -> list[tuple[TracedProcess, Event]]:
    """Return all events on the trace's clock."""
    offsets = {
        chunk.process: chunk.offset_ns
        for chunk in chunks
        if chunk.offset_ns is not None
    }
    events = list[tuple[TracedProcess, Event]]()
    for chunk in chunks:
        offset_ns = 0
        if chunk.offset_ns is not None:
            offset_ns = offsets[chunk.process]
        for event in chunk.events:
            begin_ns = event.begin_ns + offset_ns
            end_ns = max(begin_ns, event.end_ns + offset_ns)
            moved = event._replace(begin_ns=begin_ns, end_ns=end_ns)
            events.append((chunk.process, moved))
    return events


def _pids(processes: Iterable[TracedProcess]) -> dict[TracedProcess, int]:
    """A number for each process: its pid, or, where a process of another node has it, a larger one."""
    pids = dict[TracedProcess, int]()
    taken = set[int]()
    for process in dict.fromkeys(processes):
        pid = process.pid
        while pid in taken:
            pid += 10_000_000
        taken.add(pid)
        pids[process] = pid
    return pids


class _Tracks:
    """The processes and threads of a trace, by numbers."""

    def __init__(self, pids: Mapping[TracedProcess, int]) -> None:
        self._pids = pids
        self._threads: dict[TracedProcess, dict[str, int]] = defaultdict(dict)

    def of(self, process: TracedProcess, thread: str) -> _Track:
        """The track of a thread; that without a name is the process's own, which counters have."""
        threads = self._threads[process]
        if thread not in threads:
            threads[thread] = len(threads) + 1
        return _Track(self._pids[process], threads[thread])

    def named(self) -> list[dict[str, Any]]:
        """The metadata that name all of them, and order the processes on their way."""
        events = list[dict[str, Any]]()

        def name(track: _Track, kind: str, **values: Any) -> None:
            events.append(
                {
                    "name": kind,
                    "ph": "M",
                    "ts": 0.0,
                    "pid": track.pid,
                    "tid": track.tid,
                    "args": values,
                }
            )

        for process, threads in self._threads.items():
            pid = self._pids[process]
            node = f", node {process.node[:8]}" if process.node else ""
            title = f"{process.role} ({process.pid} on {process.address}{node})"
            name(_Track(pid, 0), "process_name", name=title)
            name(_Track(pid, 0), "process_sort_index", sort_index=_order(process))
            for thread, tid in threads.items():
                name(_Track(pid, tid), "thread_name", name=thread or "counters")
        return events


def _order(process: TracedProcess) -> int:
    """The place of a process in the picture, by its role."""
    for number, role in enumerate(_ROLES):
        if process.role.startswith(role):
            return number
    return len(_ROLES)


def _drawn(event: Event, track: _Track, start_ns: int) -> dict[str, Any]:
    """An event in the format's terms."""
    drawn: dict[str, Any] = {
        "name": event.name,
        "cat": event.kind,
        "ph": {"slice": "X", "count": "C", "instant": "i"}[event.kind],
        "ts": _us(event.begin_ns - start_ns),
        "pid": track.pid,
        "tid": track.tid,
    }
    values = dict(event.values)
    if event.kind == "slice":
        drawn["dur"] = _us(event.end_ns - event.begin_ns)
        if event.places:
            values["micro_batches"] = _in_words(event.places)
    if event.kind == "instant":
        drawn["s"] = "g"  # a line through all processes
    drawn["args"] = values
    return drawn


def _in_words(places: tuple[str, ...]) -> str:
    if len(places) == 1:
        return places[0]
    return f"{places[0]} to {places[-1]} ({len(places)})"


def _us(ns: int) -> float:
    """Microseconds, the unit of the format."""
    return round(ns / 1000, 3)


def _steps(
    events: Iterable[tuple[TracedProcess, Event]],
) -> list[tuple[TracedProcess, Event]]:
    """The optimizer steps of each trainer: from the compute of their first micro-batch to that of their last."""
    computed: dict[tuple[TracedProcess, str], list[Event]] = defaultdict(list)
    for process, event in events:
        if event.name == "compute" and event.places:
            step, _, _ = event.places[0].rpartition("-")
            computed[process, step].append(event)
    steps = list[tuple[TracedProcess, Event]]()
    for (process, step), parts in computed.items():
        begin_ns = min(part.begin_ns for part in parts)
        end_ns = max(part.end_ns for part in parts)
        event = Event("slice", f"step {step}", STEPS, begin_ns, end_ns)
        steps.append((process, event))
    return steps


def _arrows(slices: Iterable[_Slice], start_ns: int) -> list[dict[str, Any]]:
    """The arrows of each micro-batch, from slice to slice. One that was seen only once has none."""
    points: dict[str, list[tuple[int, _Track]]] = defaultdict(list)
    for found in slices:
        begin_ns = found.begin_ns
        if found.is_arrival:
            begin_ns = max(begin_ns, found.end_ns - _ARRIVAL_NS)
        # side by side, because those of a block would cover each other
        pace_ns = (found.end_ns - begin_ns) / (len(found.places) + 1)
        for number, place in enumerate(found.places):
            at_ns = begin_ns + round(pace_ns * (number + 1))
            points[place].append((at_ns, found.track))
    arrows = list[dict[str, Any]]()
    for number, (place, way) in enumerate(points.items()):
        way.sort()
        if len(way) < 2:
            continue
        phases = ["s", *"t" * (len(way) - 2), "f"]
        for phase, (at_ns, track) in zip(phases, way, strict=True):
            arrow: dict[str, Any] = {
                "name": _ARROW,
                "cat": _ARROW,
                "ph": phase,
                "id": number + 1,
                "ts": _us(at_ns - start_ns),
                "pid": track.pid,
                "tid": track.tid,
                "args": {"micro_batch": place},
            }
            if phase == "f":
                arrow["bp"] = "e"  # it ends in the slice around it, not in the next one
            arrows.append(arrow)
    return arrows
