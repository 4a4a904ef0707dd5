"""Shuts Ray down while a stream is open, goes on with it, interrupts its start, and goes on with it again.

python tests/support/shut_down.py STORE
"""

from __future__ import annotations

import _thread
import contextlib
import sys
import threading
import time
from typing import Any

import ray

import raypipe
from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.rayext.cluster import connect
from raypipe.streaming.opening import open_stream


def take_all(loader: Any) -> None:
    with contextlib.suppress(raypipe.RaypipeError):
        for epoch in loader.epochs():
            for _ in epoch.train:
                pass


if __name__ == "__main__":
    plan, transform = (
        PlanConfig(epochs=1000, micro_batch_size=10),
        TransformConfig(train="small", size=8),
    )
    # each wait is one for the pool
    pool = PoolConfig(head_start=0)
    spec = open_stream(sys.argv[1], plan=plan, transform=transform, pool=pool)
    connect(num_cpus=1, object_store_bytes=150 << 20)
    loader = raypipe.loader(spec)
    train = next(loader.epochs()).train
    first = next(train)
    ray.shutdown()
    try:
        next(train)
    except raypipe.RaypipeError as error:
        print(error)
    connect(num_cpus=1, object_store_bytes=150 << 20)
    loader.load_state_dict(loader.state_dict())
    # a pool on one CPU takes longer, however fast its start
    threading.Timer(0.1, _thread.interrupt_main).start()
    try:
        next(next(loader.epochs()).train)
        raise SystemExit("the start was over before it was interrupted")
    except KeyboardInterrupt:
        loader.load_state_dict(loader.state_dict())
    print(first.position, next(next(loader.epochs()).train).position)
    thread = threading.Thread(target=take_all, args=(loader,), daemon=True)
    thread.start()
    time.sleep(0.3)
    ray.shutdown()  # while another thread waits for a batch
    thread.join(200.0)
    print(
        "it ended"
        if not thread.is_alive() and not ray.is_initialized()
        else "it goes on"
    )
