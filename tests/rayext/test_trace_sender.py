"""The way of a trace's events to the Supervisor: clocks of nodes, and bounded memory."""

from __future__ import annotations

import random

from raypipe.metrics.tracer import Event, TracedProcess
from raypipe.rayext import trace_sender
from raypipe.rayext.processes import Process
from raypipe.rayext.trace_sender import Chunk, ClockOffset, StreamTrace

ACTOR = Process("transform actor", 7, "1", "10.0.0.2", "node")
WHERE = TracedProcess("transform actor", 7, "node", "10.0.0.2")


def chunk_of(num: int) -> Chunk:
    return Chunk(WHERE, 0, [Event("slice", str(n), "t", n, n + 1) for n in range(num)])


def test_the_offset_is_right_to_half_of_the_shortest_round_trip() -> None:
    rng = random.Random(0)
    difference = 123_456_789_000
    offset = ClockOffset()
    asked = 10_000_000
    shortest = 10**12
    for _ in range(50):
        there, back = rng.randrange(10_000, 900_000), rng.randrange(10_000, 900_000)
        answered = asked + there + back
        offset.measured(asked, answered, asked + there + difference)
        shortest = min(shortest, there + back)
        assert abs(offset.offset_ns - difference) <= shortest / 2
        asked = answered + 500_000_000
    assert abs(offset.offset_ns - difference) < 200_000


def test_the_supervisor_holds_a_bounded_number_of_events(monkeypatch) -> None:
    monkeypatch.setattr(trace_sender, "_MAX_HELD", 25)
    trace = StreamTrace()
    try:
        for _ in range(7):
            trace.add(chunk_of(10))
        held = trace.take(None)
        assert sum(len(chunk.events) for chunk in held) == 20
        assert trace.take(None) == []
    finally:
        trace.end()


def test_after_its_end_a_trace_takes_no_more() -> None:
    trace = StreamTrace()
    trace.add(chunk_of(1))
    assert trace.is_on and trace.goes_on
    trace.end()
    trace.add(chunk_of(1))
    assert not trace.goes_on
    assert [len(chunk.events) for chunk in trace.take(None)] == [1]


def test_a_dead_actors_block_is_drawn_only_while_a_stream_is_traced() -> None:
    trace = StreamTrace()
    trace.add_lost(ACTOR, 5, ("train-e0000-s000000-m000",))
    trace.add(chunk_of(1))
    try:
        trace.add_lost(ACTOR, 5, ("train-e0000-s000000-m000",))
        _, lost = trace.take(None)
        (event,) = lost.events
        assert lost.process == WHERE and lost.offset_ns is None
        assert event.name == "died" and event.end_ns > event.begin_ns == 5
    finally:
        trace.end()
