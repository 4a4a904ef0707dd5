from __future__ import annotations

import dataclasses
import sys
import threading

import numpy as np
import pytest
from ray import cloudpickle

from raypipe.config import PlanConfig, TransformConfig
from raypipe.errors import (
    BadSamplesError,
    ConfigError,
    SampleError,
    TransformError,
)
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.opening import open_stream
from raypipe.streaming.pipeline import splits
from raypipe.streaming.row import host_batches

from pictures import CLASSES, picture  # isort: skip

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SMALL = TransformConfig(train="light", val="center", size=24)


def with_bad(bad: dict[int, bytes | None]) -> MemoryStore:
    images = [bad.get(i, picture(i)) for i in range(64)]
    return MemoryStore(images, [i % 5 for i in range(64)], classes=CLASSES)


BAD = {3: b"", 17: picture(17)[:-200], 40: None}
ONE_EPOCH = PlanConfig(epochs=1, micro_batch_size=8)


@pytest.mark.parametrize(
    ("transform", "num_bad", "error", "message"),
    [
        (
            dataclasses.replace(SMALL, max_bad_fraction=0),
            1,
            SampleError,
            r"memory:\w+ sample \d+: .*",
        ),
        # Of another transform the same, by tests without a cluster.
        pytest.param(
            SMALL, 12, BadSamplesError, "max_bad_fraction", marks=pytest.mark.soak
        ),
        pytest.param(
            dataclasses.replace(SMALL, train="none"),
            1,
            ConfigError,
            "crop or resize",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_an_error_in_an_actor_reaches_the_consumer_as_one_clear_error(
    transform: TransformConfig, num_bad: int, error: type[Exception], message: str
) -> None:
    store = with_bad(
        {**BAD, 5: picture(5, 30, 30), **dict.fromkeys(range(6, 6 + num_bad), b"")}
    )
    spec = open_stream(store, plan=ONE_EPOCH, transform=transform)
    with pytest.raises(error, match=message) as caught:
        list(host_batches(splits(spec, spec.plan.start(), max_actors=1)[0]))
    assert type(caught.value) is error


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
        spec = open_stream(with_bad({}), plan=ONE_EPOCH, train_transform=transform)
        with pytest.raises(error, match=message):
            list(host_batches(splits(spec, spec.plan.start(), max_actors=1)[0]))
