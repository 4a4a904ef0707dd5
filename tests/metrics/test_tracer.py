"""Events of one process: nothing is recorded while no trace is made, and never more than the buffer holds."""

from __future__ import annotations

import threading

from raypipe.metrics.tracer import (
    Tracer,
    begin_recording,
    count_memory,
    counted,
    end_recording,
    happened,
    record_events,
    traced,
)
from raypipe.plan.places import MicroBatchId

PLACE = MicroBatchId("train", 0, 3, 1)


def test_nothing_is_recorded_and_nothing_made_without_a_trace() -> None:
    assert traced("block", [PLACE]) is traced("row", [])
    with traced("block") as slice_of_time:
        assert slice_of_time is None
    counted("blocks", queued=1)
    happened("fault", "text")
    count_memory()
    with record_events() as tracer:
        assert tracer and tracer.take() == []


def test_slices_have_their_thread_their_times_and_their_micro_batches() -> None:
    with record_events() as tracer:
        assert tracer

        def work() -> None:
            with traced("block") as block, traced("read", [PLACE]):
                assert block
                block.places = [PLACE, PLACE]

        thread = threading.Thread(target=work, name="worker")
        thread.start()
        thread.join()
        read, block = tracer.take()
    assert (read.name, block.name) == ("read", "block")
    assert read.thread == block.thread == "worker"
    assert block.begin_ns <= read.begin_ns <= read.end_ns <= block.end_ns
    assert read.places == (str(PLACE),) and block.places == (str(PLACE),) * 2


def test_counters_and_instants_are_recorded() -> None:
    with record_events() as tracer:
        assert tracer
        counted("blocks", queued=3)
        happened("fault", "an actor died")
        count_memory()
        blocks, fault, memory = tracer.take()
    assert blocks.values == {"queued": 3} and fault.values["text"] == "an actor died"
    assert memory.values["own"] > 1 and memory.values["shared"] >= 0


def test_the_oldest_events_give_way() -> None:
    tracer = Tracer(limit=10)
    for number in range(25):
        tracer.add_slice(str(number), number, number + 1)
    assert [event.name for event in tracer.take()] == [str(n) for n in range(15, 25)]
    assert tracer.take() == []


def test_only_one_caller_records_a_process() -> None:
    first = begin_recording()
    assert first and begin_recording() is None
    end_recording(None)
    end_recording(Tracer())
    assert begin_recording() is None
    end_recording(first)
    with record_events() as second:
        assert second and second is not first
