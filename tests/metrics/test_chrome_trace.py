"""Traces for Perfetto: the format's rules, one clock, and arrows along micro-batches."""

from __future__ import annotations

import json

import pytest
from traces import checked, processes, slices, ways

from raypipe.metrics.chrome_trace import LOST, Chunk, chrome_trace, to_json
from raypipe.metrics.tracer import Event, TracedProcess

ACTOR = TracedProcess("transform actor", 20, "b" * 40, "10.0.0.2")
TRAINER = TracedProcess("trainer 0", 20, "a" * 40, "10.0.0.1")
READER = TracedProcess("reader", 21, "a" * 40, "10.0.0.1")
FIRST = "train-e0000-s000000-m000"
SECOND = "train-e0000-s000000-m001"
THIRD = "train-e0000-s000001-m000"
MS = 1_000_000
# the clock of the actor's node is behind by so much
BEHIND = 5_000 * MS


def work(name: str, begin_ms: float, end_ms: float, *places: str) -> Event:
    begin_ns, end_ns = round(begin_ms * MS), round(end_ms * MS)
    return Event("slice", name, "main", begin_ns, end_ns, places)


def moved(event: Event, by_ns: int) -> Event:
    return event._replace(begin_ns=event.begin_ns + by_ns, end_ns=event.end_ns + by_ns)


def small_trace() -> list[Chunk]:
    """Two micro-batches of a block from the reader to the trainer, and a third that is made there."""
    block = [
        work("block", 9_012, 9_030, FIRST, SECOND),
        work("read", 9_013, 9_020, FIRST),
    ]
    trained = [
        work("wait", 9_000, 9_041),
        work("split", 9_001, 9_040, FIRST, SECOND),
        work("compute", 9_041, 9_050, FIRST),
        work("compute", 9_050, 9_060, SECOND),
        work("make", 9_060, 9_070, THIRD),
        work("compute", 9_070, 9_080, THIRD),
        Event("count", "blocks", "", 9_045 * MS, 9_045 * MS, values={"queued": 2}),
    ]
    fault = Event("instant", "fault", "x", 9_065 * MS, 9_065 * MS, (), {"text": "dead"})
    return [
        Chunk(TRAINER, 0, trained),
        Chunk(ACTOR, BEHIND + 3 * MS, []),
        Chunk(ACTOR, BEHIND, [moved(event, -BEHIND) for event in block]),
        Chunk(READER, 0, [work("row", 9_005, 9_010, FIRST, SECOND), fault]),
        Chunk(ACTOR, None, [work("died", 9_061, 9_066, THIRD)._replace(thread=LOST)]),
    ]


def test_a_trace_keeps_the_rules_of_the_format() -> None:
    trace = chrome_trace(small_trace(), {"run": "r"})
    events = checked(trace)
    assert json.loads(to_json(trace)) == trace
    assert trace["otherData"] == {"run": "r"}
    assert {event["ph"] for event in events} == {"X", "C", "i", "M", "s", "t", "f"}


def test_processes_of_two_nodes_with_one_pid_are_two() -> None:
    events = checked(chrome_trace(small_trace(), {}))
    pids = processes(events)
    assert pids["trainer 0"] == 20 and pids["reader"] == 21
    assert len(set(pids.values())) == 3
    (name,) = (
        event["args"]["name"]
        for event in events
        if event["name"] == "process_name" and event["pid"] == pids["transform actor"]
    )
    assert name == "transform actor (20 on 10.0.0.2, node bbbbbbbb)"


def test_clocks_of_nodes_are_aligned_by_the_last_offset() -> None:
    events = checked(chrome_trace(small_trace(), {}))
    (block,) = slices(events, "block")
    (wait,) = slices(events, "wait")
    assert block["ts"] - wait["ts"] == pytest.approx(12_000)
    (died,) = slices(events, "died")
    assert died["ts"] - wait["ts"] == pytest.approx(61_000)


def test_arrows_follow_micro_batches_through_the_processes() -> None:
    events = checked(chrome_trace(small_trace(), {}))
    found = ways(events)
    assert found[FIRST] == ["row", "block", "split", "compute"] or found[FIRST] == [
        *("row", "read", "split", "compute")
    ]
    assert found[SECOND] == ["row", "block", "split", "compute"]
    assert found[THIRD] == ["died", "make", "compute"]


def test_a_step_lasts_from_its_first_compute_to_its_last() -> None:
    events = checked(chrome_trace(small_trace(), {}))
    steps = [event for event in events if event["name"].startswith("step ")]
    assert [(step["name"], step["dur"]) for step in steps] == [
        ("step train-e0000-s000000", 19_000.0),
        ("step train-e0000-s000001", 10_000.0),
    ]


def test_without_events_there_is_an_empty_trace() -> None:
    assert checked(chrome_trace([], {})) == []
