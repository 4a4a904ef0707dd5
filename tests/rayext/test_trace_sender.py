"""The way of a trace's events to the Supervisor: clocks of nodes, and bounded memory."""

from __future__ import annotations

import json
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
from raypipe.rayext.trace_sender import Chunk, HeldTrace, TraceAnswer, TraceSender

ACTOR = Process("transform actor", 7, "1", "10.0.0.2", "node")


class _Supervisor:
    """A Supervisor whose clock is ahead; calls are answered at once."""

    def __init__(self, node: str, ahead_us: float) -> None:
        self.events: list[dict[str, Any]] = []
        self.traced = self
        self._node = node
        self._ahead_us = ahead_us
        self.goes_on = True

    def remote(self, chunk: Chunk) -> TraceAnswer:
        self.events += json.loads(chunk.events)
        return TraceAnswer(self.goes_on, clock_us() + self._ahead_us, self._node)


@pytest.mark.parametrize(
    ("node", "offset_us"), [("node", 0.0), ("other", 123_456_789_000.0)]
)
def test_events_are_sent_on_the_supervisors_clock(
    monkeypatch: pytest.MonkeyPatch, node: str, offset_us: float
) -> None:
    monkeypatch.setattr(trace_sender, "answer", lambda sent, _: sent)
    monkeypatch.setattr(trace_sender.RayThread, "start", lambda _: None)
    supervisor = _Supervisor(node, ahead_us=123_456_789_000.0)
    assert begin_recording()
    try:
        sender = TraceSender(supervisor, ACTOR)
        add_slice("block", 1_000.0, 2_000.0)
        sender.send()
        supervisor.goes_on = False
        sender.send()
        (block,) = (event for event in supervisor.events if event["name"] == "block")
        assert block["ts"] == pytest.approx(1_000.0 + offset_us, abs=1e6)
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
            answered = trace.add(Chunk(str(number), "x" * 10), ACTOR)
            assert answered.goes_on and answered.node == "node"
        assert [chunk.process for chunk in trace.take(None)] == ["5", "6"]
        assert trace.take(None) == []
    finally:
        trace.end()


def test_after_its_end_a_trace_takes_no_more() -> None:
    trace = HeldTrace()
    trace.add(Chunk("actor", "[]"), None)
    trace.end()
    assert not trace.add(Chunk("actor", "[]"), None).goes_on
    assert len(trace.take(None)) == 1
