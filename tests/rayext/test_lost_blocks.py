"""Blocks whose actor or node is gone: others make them, in their place of the order."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray
import without_ray
from signalled import own_processes

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.rayext import pool
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.opening import open_stream
from raypipe.streaming.pipeline import splits
from raypipe.streaming.row import host_batches
from raypipe.streaming.supervisor import start_supervisor


@pytest.mark.cluster
def test_blocks_of_a_killed_actor_without_a_cpu_come_from_the_other(
    two_cpus: None, stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Holder:
        def ping(self) -> None: ...

    monkeypatch.setattr(pool, "_PATIENCE_S", 0.0)
    spec = open_stream(
        stores["train"],
        plan=PlanConfig(micro_batch_size=8, global_batch_size=8, epochs=4),
        transform=TransformConfig(train="heavy", size=32),
        pool=PoolConfig(min_actors=2, max_actors=2, max_in_flight=(0, 1)),
    )
    supervisor = start_supervisor()
    (iterator,) = splits(spec, spec.plan.start(), max_actors=2, supervisor=supervisor)
    found = list[bytes]()
    holder: Any = None
    for batch in host_batches(iterator):
        found.append(batch_hash(batch))
        if len(found) == 4:
            holder = ray.remote(num_cpus=1)(Holder).remote()  # waits for a CPU
            actor = next(own_processes("MapWorker(MapBatches(Transform"))
            os.kill(actor, signal.SIGKILL)
    assert found == without_ray.digests(spec)
    ray.get(holder.ping.remote(), timeout=60)
    ray.kill(holder)
    events = [text for _, text in ray.get(supervisor.events.remote(0))]
    assert any("others make them again" in text for text in events), events
