"""Shuts Ray down while a stream is open, goes on with it, interrupts its start, and goes on with it again.

python tests/support/shut_down.py STORE
"""

from __future__ import annotations

import _thread
import sys
import threading

import ray

import raypipe
from raypipe.config import PlanConfig, TransformConfig
from raypipe.rayext.cluster import connect
from raypipe.streaming.opening import open_stream

if __name__ == "__main__":
    plan, transform = PlanConfig(epochs=100, micro_batch_size=10), TransformConfig(train="small", size=8)
    spec = open_stream(sys.argv[1], plan=plan, transform=transform)
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
    threading.Timer(1.0, _thread.interrupt_main).start()
    try:
        next(next(loader.epochs()).train)
    except KeyboardInterrupt:
        loader.load_state_dict(loader.state_dict())
    print(first.position, next(next(loader.epochs()).train).position)
    ray.shutdown()
