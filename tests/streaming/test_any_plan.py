"""Plans of everything at once, on real actors of which some are killed; tests/plan has random ones without Ray."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import without_ray
from ray import cloudpickle
from signalled import own_processes

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.digest import iterate_digests
from raypipe.streaming.opening import open_stream
from raypipe.streaming.pipeline import splits
from raypipe.streaming.spec import StreamSpec

from pictures import picture  # isort: skip

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.soak,  # test_pipeline.py has plain plans on actors, tests/faults has kills
    pytest.mark.timeout(900),
]

cloudpickle.register_pickle_by_value(sys.modules[__name__])

NUM_KILLS = 10
# In 8 micro-batches of a step, so that 1, 2 and 4 workers share it.
PLAN: dict[str, Any] = {
    "epochs": 3,
    "micro_batch_size": 4,
    "global_batch_size": 32,
    "aug_repeats": 2,
    "seed": 7,
}


def slowly(columns: dict[str, Any]) -> dict[str, Any]:
    """A stream of columns that lives long enough to be hurt."""
    time.sleep(0.004)
    return {"twice": np.int64(2 * int(columns["width"]))}


def pictures(num: int, first: int) -> MemoryStore:
    sizes = [[(40, 60), (50, 50), (60, 40)][i % 3] for i in range(num)]
    heights, widths = zip(*sizes, strict=True)
    images = [picture(first + i, *size) for i, size in enumerate(sizes)]
    return MemoryStore(
        images, np.arange(num) % 5, columns={"width": widths, "height": heights}
    )


def spec_of(train: Any, plan: dict[str, Any], **options: Any) -> StreamSpec:
    return open_stream(
        train,
        pictures(9, 500),
        plan=PlanConfig(**PLAN, **plan),
        transform=TransformConfig(train="light", val="center", size={0: 8, 1: 12}),
        columns=["width"],
        make_columns=slowly,
        **options,
    )


def mixture() -> StreamSpec:
    plan = {"mixture": {0: {"a": 3, "b": 1}, 2: {"a": 1, "b": 1}}, "weights": 0.5}
    return spec_of(
        {"a": pictures(60, 0), "b": pictures(40, 100)}, plan, filter={"a": "label != 3"}
    )


def mixture_in_buckets() -> StreamSpec:
    plan = {
        "mixture": {0: {"a": 3, "b": 1}, 2: {"a": 1, "b": 1}},
        "weights": "width",
        "buckets": ["8x12", "10x10", "12x8"],
        "val_buckets": True,
    }
    return spec_of(
        {"a": pictures(60, 0), "b": pictures(40, 100)}, plan, filter={"b": "label != 3"}
    )


def kill_an_actor(rng: random.Random) -> bool:
    """One that transforms."""
    found = list(own_processes("MapWorker(MapBatches(Transform"))
    if found:
        os.kill(rng.choice(found), signal.SIGKILL)
    return bool(found)


@pytest.mark.parametrize("plan", [mixture, mixture_in_buckets])
def test_the_digest_is_one_for_any_workers_any_actors_and_ten_kills(plan: Any) -> None:
    spec, rng, kills = plan(), random.Random(0), list[float]()
    alone = without_ray.digests(spec)
    assert len(alone) == len(set(alone))
    cases = [(workers, actors) for workers in (1, 2, 4) for actors in (1, 2, 3)]
    for number, (workers, actors) in enumerate(cases):
        pool = PoolConfig(
            min_actors=actors,
            cpus_per_actor=0.5,
            micro_batches_per_block=(1, 3, 0)[number % 3],
        )
        start = spec.plan.start()
        iterators = splits(
            replace(spec, pool=pool), start, max_actors=actors, world_size=workers
        )
        found, ended = list[bytes](), threading.Event()

        def hurt(times: int, ended: threading.Event = ended) -> None:
            done = 0
            while done < times and not ended.wait(rng.uniform(0.1, 0.5)):
                if kill_an_actor(rng):
                    done += 1
                    kills.append(time.monotonic())

        wanted = 1 if NUM_KILLS - len(kills) <= len(cases) - number else 2
        killer = threading.Thread(target=hurt, args=(wanted,))
        killer.start()
        try:
            found += [
                one.digest for one in iterate_digests(spec.plan, start, iterators)
            ]
        finally:
            ended.set()
            killer.join()
        assert found == alone, (workers, actors)
    print(f"{len(kills)} kills over {len(cases)} streams of {len(alone)} micro-batches")
    assert len(kills) >= NUM_KILLS
