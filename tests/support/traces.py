"""The rules of Chrome's Trace Event Format, as Perfetto reads it, for traces of tests."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from raypipe.metrics.chrome_trace import _STATIONS

PHASES = {"X", "C", "i", "s", "t", "f"}


def checked(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a trace, which keeps the rules: fields, names, order, nesting, arrows."""
    trace = json.loads(json.dumps(trace, allow_nan=False))
    events: list[dict[str, Any]] = trace["traceEvents"]
    for event in events:
        assert {"name", "ph", "ts", "pid", "tid"} <= event.keys(), event
        assert event["ph"] in PHASES and event["ts"] >= 0, event
        assert event["pid"] and event["tid"]
    times = [event["ts"] for event in events]
    assert times == sorted(times)
    _check_nesting([event for event in events if event["ph"] == "X"])
    _check_arrows(events)
    for event in events:
        if event["ph"] == "C":
            values = event["args"].values()
            assert values and all(isinstance(value, int | float) for value in values)
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
    return events


def checked_file(path: Path) -> list[dict[str, Any]]:
    return checked(json.loads(path.read_text()))


def processes(events: list[dict[str, Any]]) -> set[str]:
    """The names of a trace's processes up to the first bracket."""
    return {event["pid"].partition(" (")[0] for event in events}


def slices(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["name"] == name]


def ways(events: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The slices that the arrow of each micro-batch leads through.

    Other slices lie inside of these, such as the copy in the ring, and may be around an arrow too.
    """
    ways: dict[str, list[str]] = defaultdict(list)
    for event in events:
        if event["ph"] in ("s", "t", "f"):
            around = [
                found["name"]
                for found in _around(event, events)
                if found["name"] in _STATIONS
            ]
            ways[event["args"]["micro_batch"]].append(around[-1])
    return dict(ways)


def _check_nesting(found: list[dict[str, Any]]) -> None:
    """Slices of a thread lie one after the other, or in one another."""
    threads: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for event in found:
        assert event["dur"] >= 0, event
        threads[event["pid"], event["tid"]].append(event)
    for thread in threads.values():
        ends: list[float] = []
        for event in thread:
            while ends and ends[-1] <= event["ts"] + 0.002:
                ends.pop()
            end = event["ts"] + event["dur"]
            assert not ends or end <= ends[-1] + 0.002, event
            ends.append(end)


def _check_arrows(drawn: list[dict[str, Any]]) -> None:
    """Each arrow begins, goes on and ends once, in this order, in slices."""
    arrows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in drawn:
        if event["ph"] in ("s", "t", "f"):
            arrows[event["id"]].append(event)
    for arrow in arrows.values():
        phases = "".join(event["ph"] for event in arrow)
        assert phases == "s" + "t" * (len(arrow) - 2) + "f"
        assert len({(event["name"], event["cat"]) for event in arrow}) == 1
        assert arrow[-1]["bp"] == "e"
        for event in arrow:
            assert _around(event, drawn), event


def _around(
    event: dict[str, Any], events: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The slices around an event of an arrow, the innermost last."""
    track = (event["pid"], event["tid"])
    return [
        found
        for found in events
        if found["ph"] == "X"
        and (found["pid"], found["tid"]) == track
        and found["ts"] <= event["ts"] <= found["ts"] + found["dur"]
    ]
