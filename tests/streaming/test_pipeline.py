from __future__ import annotations

import dataclasses
import sys
import threading
from typing import Any

import numpy as np
import pytest
from ray import cloudpickle
from without_ray import every_batch

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import (
    ConfigError,
    SampleError,
    TransformError,
)
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.handover import loader
from raypipe.streaming.opening import open_stream

from pictures import CLASSES, picture  # isort: skip

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SMALL = TransformConfig(train="light", val="center", size=24)


def with_bad(bad: dict[int, bytes | None]) -> MemoryStore:
    images = [bad.get(i, picture(i)) for i in range(64)]
    return MemoryStore(images, [i % 5 for i in range(64)], classes=CLASSES)


BAD = {3: b"", 17: picture(17)[:-200], 40: None}
BY_POOL: Any = {
    "plan": PlanConfig(epochs=1, micro_batch_size=8),
    "pool": PoolConfig(head_start=0),
}


def test_an_error_in_an_actor_reaches_the_consumer_as_one_clear_error() -> None:
    strict = dataclasses.replace(SMALL, max_bad_fraction=0)
    spec = open_stream(with_bad(BAD), transform=strict, **BY_POOL)
    with pytest.raises(SampleError, match=r"memory:\w+ sample \d+: .*") as caught:
        list(every_batch(loader(spec)))
    assert type(caught.value) is SampleError


def test_a_transform_that_cannot_be_sent_or_exits_is_one_clear_error() -> None:
    lock = threading.Lock()

    def locks(image: np.ndarray) -> np.ndarray:
        with lock:
            return image[:9, :9]

    def leaves(image: np.ndarray) -> np.ndarray:
        sys.exit("no license")

    cases = (
        (
            locks,
            ConfigError,
            r"^train_transform cannot be sent to the actors \(cannot pickle '_thread.lock' object\)",
        ),
        (
            leaves,
            TransformError,
            r"test_pipeline.py:\d+ in leaves: SystemExit: no license",
        ),
    )
    for transform, error, message in cases:
        spec = open_stream(with_bad({}), train_transform=transform, **BY_POOL)
        with pytest.raises(error, match=message):
            list(every_batch(loader(spec)))
