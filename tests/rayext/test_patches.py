from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.data
from ray.data._internal.execution.operators import actor_pool_map_operator

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.rayext.cluster_state import LOCAL_CLUSTER
from raypipe.rayext.data_context import ours
from raypipe.rayext.execution import Settings, context_of
from raypipe.streaming.opening import open_stream
from raypipe.streaming.pipeline import block_dataset


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Data with the patches, in a local cluster."""
    monkeypatch.setenv(LOCAL_CLUSTER, "1")
    context_of(Settings(PoolConfig(), 2, 0, reads=False, supervisor=None), 1)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What Ray Data's executor logs on the console."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if not getattr(record, "hide", False):
                found.append(record.getMessage())

    logger, handler = (
        logging.getLogger("ray.data._internal.execution.streaming_executor"),
        Handler(),
    )
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


@pytest.mark.system
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster", "patched")
def test_a_users_own_pipeline_beside_a_stream_keeps_what_it_has(
    lines: list[str], stores: dict[str, Path]
) -> None:
    plan, transform = (
        PlanConfig(micro_batch_size=10),
        TransformConfig(train="small", size=8),
    )
    spec = open_stream(
        stores["train"],
        plan=plan,
        transform=transform,
        pool=PoolConfig(cpus_per_actor=0.5),
    )
    stream = block_dataset(spec, spec.plan.start(), max_actors=1)
    with ours():
        rows = iter(stream.iter_batches(batch_size=None, prefetch_batches=0))
        assert "image" in next(rows)
    assert lines == []

    class Identity:  # in here: actors cannot import this module
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return batch

    own: Any = ray.data.range(2).map_batches(Identity, concurrency=1, num_cpus=0.1)
    others = iter(own.iter_batches(batch_size=None))
    assert next(others)["id"].tolist()
    executor = own._current_executor
    of = {
        type(each).__module__.partition(".")[0]
        for each in executor._backpressure_policies
    }
    of |= {
        type(each).__module__.partition(".")[0]
        for each in (executor._cluster_autoscaler, executor._actor_autoscaler)
    }
    assert of == {"ray"}
    list(others)
    assert any("execution" in line for line in lines)
    before = len(lines)
    with ours():
        list(rows)
    assert len(lines) == before


@pytest.mark.usefixtures("patched")
def test_an_execution_outlives_the_node_that_knows_where_actors_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(LOCAL_CLUSTER, raising=False)
    monkeypatch.setattr("raypipe.rayext.cluster_state.started_here", lambda: False)

    def gone() -> Any:
        raise ray.exceptions.ActorUnschedulableError("its node does not exist any more")

    monkeypatch.setattr(
        "ray.data._internal.utils.cached_ray_internals.get_or_create_actor_location_tracker",
        gone,
    )
    locate: Any = actor_pool_map_operator.get_actor_locations
    # a test before may have received an execution's settings
    monkeypatch.setattr("raypipe.rayext.data_context._process_is_ours", False)
    with ours():
        assert locate(("actor",)) == {}
    with pytest.raises(ray.exceptions.RayError):
        locate(("another actor",))
