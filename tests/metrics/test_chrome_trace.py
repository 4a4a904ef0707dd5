"""Traces for Perfetto: the format's rules, and arrows along micro-batches."""

from __future__ import annotations

import json
from typing import Any

from traces import checked, processes, slices, ways

from raypipe.metrics.chrome_trace import Chunk, to_json

ACTOR = "transform actor (20 on 10.0.0.2)"
TRAINER = "trainer 0 (20 on 10.0.0.1)"
READER = "reader (21 on 10.0.0.1)"
FIRST = "train-e0000-s000000-m000"
SECOND = "train-e0000-s000000-m001"
THIRD = "train-e0000-s000001-m000"


def work(name: str, begin_ms: float, end_ms: float, *places: str) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "tid": "main",
        "ts": begin_ms * 1e3,
        "dur": (end_ms - begin_ms) * 1e3,
        "args": {"micro_batches": [*places]} if places else {},
    }


def other(name: str, phase: str, at_ms: float, **values: Any) -> dict[str, Any]:
    event = {"name": name, "ph": phase, "tid": "x", "ts": at_ms * 1e3, "args": values}
    return event | ({"s": "g"} if phase == "i" else {})


def small_trace() -> list[Chunk]:
    """Two micro-batches of a block from the reader to the trainer, and a third that is made there."""
    trained = [
        work("wait", 9_000, 9_041),
        work("split", 9_001, 9_040, FIRST, SECOND),
        work("compute", 9_041, 9_050, FIRST),
        work("compute", 9_050, 9_060, SECOND),
        work("make", 9_060, 9_070, THIRD),
        work("compute", 9_070, 9_080, THIRD),
        other("blocks", "C", 9_045, queued=2),
    ]
    block = [
        work("block", 9_012, 9_030, FIRST, SECOND),
        work("read", 9_013, 9_020, FIRST),
    ]
    died = work("died", 9_061, 9_066, THIRD)
    row = work("row", 9_005, 9_010, FIRST, SECOND)
    return [
        Chunk(TRAINER, json.dumps(trained)),
        Chunk(ACTOR, "[]"),
        Chunk(ACTOR, json.dumps(block)),
        Chunk(READER, json.dumps([row, other("fault", "i", 9_065, text="dead")])),
        Chunk(ACTOR, json.dumps([died | {"tid": "lost work"}])),
    ]


def test_a_trace_keeps_the_rules_of_the_format() -> None:
    trace = json.loads(to_json(small_trace(), {"run": "r"}))
    events = checked(trace)
    assert trace["otherData"] == {"run": "r"}
    assert {event["ph"] for event in events} == {"X", "C", "i", "s", "t", "f"}
    assert processes(events) == {"trainer 0", "reader", "transform actor"}
    (block,) = slices(events, "block")
    (wait,) = slices(events, "wait")
    assert (wait["ts"], block["ts"]) == (0.0, 12_000.0)


def test_arrows_follow_micro_batches_through_the_processes() -> None:
    found = ways(checked(json.loads(to_json(small_trace(), {}))))
    assert found[FIRST] == found[SECOND] == ["row", "block", "split", "compute"]
    assert found[THIRD] == ["died", "make", "compute"]


def test_a_step_lasts_from_its_first_compute_to_its_last() -> None:
    events = checked(json.loads(to_json(small_trace(), {})))
    steps = [event for event in events if event["name"].startswith("step ")]
    assert [(step["name"], step["dur"]) for step in steps] == [
        ("step train-e0000-s000000", 19_000.0),
        ("step train-e0000-s000001", 10_000.0),
    ]


def test_without_events_there_is_an_empty_trace() -> None:
    assert checked(json.loads(to_json([], {}))) == []
