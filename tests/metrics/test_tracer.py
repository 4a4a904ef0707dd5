"""Events of one process: nothing is recorded while no trace is made, and never more than the buffer holds."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from raypipe.metrics import tracer
from raypipe.metrics.tracer import (
    add_slice,
    begin_recording,
    count_memory,
    counted,
    end_recording,
    happened,
    take_events,
    traced,
)
from raypipe.plan.places import MicroBatchId

PLACE = MicroBatchId("train", 0, 3, 1)


@pytest.fixture
def recording() -> Iterator[None]:
    assert begin_recording()
    yield
    end_recording()


def test_nothing_is_recorded_and_nothing_made_without_a_trace() -> None:
    assert traced("block", [PLACE]) is traced("row", [])
    with traced("block") as places:
        assert places is None
    counted("blocks", queued=1)
    happened("fault", "text")
    count_memory()
    assert begin_recording()
    assert take_events() == []
    end_recording()


def test_slices_have_their_thread_their_times_and_their_micro_batches(
    recording: None,
) -> None:
    with traced("block") as block, traced("read", [PLACE]):
        assert block is not None
        block += [PLACE, PLACE]
    read, block_slice = take_events()
    assert (read["name"], block_slice["name"]) == ("read", "block")
    assert read["tid"] == block_slice["tid"] == threading.current_thread().name
    assert block_slice["ts"] <= read["ts"] and read["dur"] <= block_slice["dur"] + 0.1
    assert read["args"] == {"micro_batches": [str(PLACE)]}
    assert block_slice["args"] == {"micro_batches": [str(PLACE)] * 2}


def test_the_oldest_events_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer, "MAX_EVENTS", 10)
    assert begin_recording()
    for number in range(25):
        add_slice(str(number), number, number + 1)
    assert [event["name"] for event in take_events()] == [str(n) for n in range(15, 25)]
    assert take_events() == []
    end_recording()
