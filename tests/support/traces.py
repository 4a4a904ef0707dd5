"""The rules of Chrome's Trace Event Format, as Perfetto reads it, for traces of tests."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from raypipe.metrics.chrome_trace import _STATIONS

PHASES = {"X", "C", "i", "M", "s", "t", "f"}


def checked(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a trace, which keeps the rules: fields, names, order, nesting, arrows."""
    trace = json.loads(json.dumps(trace, allow_nan=False))
    events: list[dict[str, Any]] = trace["traceEvents"]
    for event in events:
        assert {"name", "ph", "ts", "pid", "tid"} <= event.keys(), event
        assert event["ph"] in PHASES and event["ts"] >= 0, event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
    drawn = [event for event in events if event["ph"] != "M"]
    times = [event["ts"] for event in drawn]
    assert times == sorted(times)
    _check_names(events, drawn)
    _check_nesting([event for event in drawn if event["ph"] == "X"])
    _check_arrows(drawn)
    for event in drawn:
        if event["ph"] == "C":
            values = event["args"].values()
            assert values and all(isinstance(value, int | float) for value in values)
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
    return events


def checked_file(path: Path) -> list[dict[str, Any]]:
    return checked(json.loads(path.read_text()))


def processes(events: list[dict[str, Any]]) -> dict[str, int]:
    """The processes of a trace, by their names up to the first bracket; several of one name count once."""
    return {
        event["args"]["name"].partition(" (")[0]: event["pid"]
        for event in events
        if event["name"] == "process_name"
    }


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


def _check_names(events: list[dict[str, Any]], drawn: list[dict[str, Any]]) -> None:
    """Each process and thread has one name."""
    kinds = ("process_name", "thread_name", "process_sort_index")
    named: dict[str, list[Any]] = {kind: [] for kind in kinds}
    for event in events:
        if event["ph"] == "M":
            track = (event["pid"], event["tid"] if "thread" in event["name"] else 0)
            assert track not in named[event["name"]], event
            named[event["name"]].append(track)
    assert {event["pid"] for event in drawn} == {pid for pid, _ in named[kinds[0]]}
    tracks = {(event["pid"], event["tid"]) for event in drawn}
    assert tracks <= set(named["thread_name"])


def _check_nesting(found: list[dict[str, Any]]) -> None:
    """Slices of a thread lie one after the other, or in one another."""
    threads: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
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
