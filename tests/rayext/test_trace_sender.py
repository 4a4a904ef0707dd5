"""The way of a trace's events to the Supervisor: clocks of nodes, and bounded memory."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from raypipe.metrics.tracer import (
    add_slice,
    begin_recording,
    clock_us,
    end_recording,
    take_events,
)
from raypipe.rayext import trace_sender
from raypipe.rayext.processes import Process
from raypipe.rayext.trace_sender import Chunk, HeldTrace, TraceSender

ACTOR = Process("transform actor", 7, "1", "10.0.0.2", "node")


class _Supervisor:
    """A Supervisor that answers at once."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.traced = self
        self.goes_on = True

    def remote(self, chunk: Chunk) -> bool:
        self.events += json.loads(chunk.events)
        return self.goes_on


def test_events_are_sent_at_the_time_of_day_until_the_trace_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trace_sender.ray, "get", lambda sent, timeout: sent)
    monkeypatch.setattr(trace_sender.RayThread, "start", lambda _: None)
    supervisor = _Supervisor()
    assert begin_recording()
    try:
        sender = TraceSender(supervisor, ACTOR)
        before_us = time.time() * 1e6
        add_slice("block", clock_us(), clock_us() + 1_000.0)
        sender.send()
        supervisor.goes_on = False
        sender.send()
        (block,) = (event for event in supervisor.events if event["name"] == "block")
        assert before_us - 1e6 < block["ts"] < time.time() * 1e6 + 1e6
        add_slice("block", 3_000.0, 4_000.0)
        assert take_events() == []
    finally:
        end_recording()


def test_the_supervisor_holds_a_bounded_number_of_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trace_sender, "_MAX_HELD", 25)
    trace = HeldTrace()
    try:
        for number in range(7):
            assert trace.add(Chunk(str(number), "x" * 10))
        assert [chunk.process for chunk in trace.take(None)] == ["5", "6"]
        assert trace.take(None) == []
    finally:
        trace.end()


def test_after_its_end_a_trace_takes_no_more() -> None:
    trace = HeldTrace()
    trace.add(Chunk("actor", "[]"))
    trace.end()
    assert not trace.add(Chunk("actor", "[]"))
    assert len(trace.take(None)) == 1
