"""Stores of images of three shapes, and streams of buckets over them."""

from __future__ import annotations

from typing import Any

import numpy as np
from pictures import picture

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.opening import open_stream
from raypipe.streaming.spec import StreamSpec

BUCKETS = ["12x16", "14x14", "16x12"]
BOTH = {"train": BUCKETS, "val": BUCKETS}
SIDES = {(12, 16), (14, 14), (16, 12)}


def pictures(num: int, bad: tuple[int, ...] = (), **columns: Any) -> MemoryStore:
    sizes = [[(40, 60), (50, 50), (60, 40)][(i + i // 5) % 3] for i in range(num)]
    images = [b"no image" if i in bad else picture(i, *sizes[i]) for i in range(num)]
    heights, widths = zip(*sizes, strict=True)
    return MemoryStore(
        images,
        np.arange(num) % 5,
        columns={"width": widths, "height": heights, **columns},
    )


TRAIN, VAL = pictures(50), MemoryStore([picture(1000 + i) for i in range(9)], [0] * 9)


def spec_of(
    store: Any = TRAIN,
    plan: dict[str, Any] | None = None,
    val_store: Any = VAL,
    **options: Any,
) -> StreamSpec:
    given = {
        "epochs": 2,
        "micro_batch_size": 4,
        "global_batch_size": 8,
        "buckets": BUCKETS,
        **(plan or {}),
    }
    transform = TransformConfig(
        **{"train": "light", "val": "center", "size": 8, **options}
    )
    return open_stream(
        store,
        val_store,
        plan=PlanConfig(**given),
        transform=transform,
        pool=PoolConfig(engine="inline"),
    )
