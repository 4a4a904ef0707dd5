"""The trace of a stream on actors, one of which is killed, shows it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from pictures import picture
from traces import checked_file, processes, slices, ways

import raypipe
from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.rayext.trace_sender import PERIOD_S
from raypipe.stores.memory import MemoryStore

pytestmark = [pytest.mark.system, pytest.mark.cluster]


def test_a_killed_actor_is_in_the_trace(ray_cluster: None, tmp_path: Path) -> None:
    order = tmp_path / "order"
    file = tmp_path / "trace.json"

    def dies_once(image: np.ndarray) -> np.ndarray:
        """Kills its process at the next sample once the order is there."""
        if order.exists():
            order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return image[:8, :8]

    store = MemoryStore([picture(i, 9, 9) for i in range(32)], [0] * 32)
    spec = raypipe.open_stream(
        store,
        plan=PlanConfig(epochs=40, micro_batch_size=4, global_batch_size=8),
        transform=TransformConfig(train="none"),
        train_transform=dies_once,
        pool=PoolConfig(min_actors=1, max_actors=1, head_start=0, max_in_flight=(0, 2)),
    )
    places = []
    with raypipe.loader(spec, trace=file, max_actors=1) as loader:
        for epoch in loader.epochs():
            for batch in epoch.train:
                places.append(str(batch.position))
                if len(places) == 40:
                    order.touch()
                if len(places) == 300:
                    # an actor sends its events now and then, and none once the stream has ended
                    time.sleep(4 * PERIOD_S)
    assert len(places) == 320 and not order.exists()

    events = checked_file(file)
    names = {"reader", "transform actor", "trainer 0", "supervisor"}
    assert names <= processes(events)
    (died,) = slices(events, "died")
    (fault,) = (event for event in events if event["name"] == "fault")
    assert "a transform actor died in" in fault["args"]["text"]
    lost = died["args"]["micro_batches"][0]
    assert lost in fault["args"]["text"]
    again = [
        event
        for event in slices(events, "block")
        if lost in event["args"]["micro_batches"]
    ]
    assert again[-1]["ts"] >= died["ts"] + died["dur"] - 1e6
    way = ways(events)[lost]
    assert way[0] == "row" and "died" in way and way[-1] in ("split", "compute")
    whole = [way for way in ways(events).values() if len(way) == 4]
    assert len(whole) > 100
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"memory MB", "blocks", "actors"}
