from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypipe.config import PlanConfig, PoolConfig
from raypipe.rayext import placement as module
from raypipe.rayext.placement import placement
from raypipe.streaming.handover import loader
from raypipe.streaming.opening import open_stream

CPU = {"NodeID": "aa", "Labels": {"raypipe": "transform"}, "Resources": {"CPU": 8.0}}
GPU = {"NodeID": "bb", "Labels": {}, "Resources": {"CPU": 8.0, "GPU": 4.0}}
PLAIN = {"NodeID": "cc", "Labels": {}, "Resources": {"CPU": 8.0}}
ANY_NODE = [{"label_selector": {}}]


def those(*names: str) -> list[dict[str, Any]]:
    return [{"label_selector": {"ray.io/node-id": f"in({','.join(names)})"}}]


@pytest.mark.parametrize(
    ("nodes", "has_labelled_type", "fallback"),
    [
        pytest.param(
            [CPU, GPU], False, those("bb"), id="a GPU node that is there, and no other"
        ),
        pytest.param([GPU, PLAIN], False, those("bb", "cc"), id="GPUs and no label"),
        pytest.param([CPU], False, None, id="CPU nodes alone"),
        pytest.param([PLAIN], True, those("cc"), id="no node of the label yet"),
        pytest.param([PLAIN], False, ANY_NODE, id="neither GPUs nor the label"),
    ],
)
def test_actors_prefer_the_label_and_else_take_nodes_that_are_there(
    nodes: list[dict[str, Any]],
    has_labelled_type: bool,
    fallback: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "nodes", lambda: nodes)
    monkeypatch.setattr(
        module, "has_labelled_type", lambda label, value: has_labelled_type
    )
    assert placement() == {
        "label_selector": {"raypipe": "transform"},
        "fallback_strategy": fallback,
    }


@pytest.mark.system
def test_a_pool_uses_the_cpus_of_its_processs_placement_group(
    idle_cluster: None, stores: dict[str, Path]
) -> None:
    """As a trial of Ray Tune has them: all CPUs of the cluster are in the group, one of them the trial's own."""
    pool = PoolConfig(stall_timeout_s=300, head_start=2)
    plan = PlanConfig(epochs=2, micro_batch_size=10)
    spec = open_stream(stores["train"], plan=plan, train_transform=None, pool=pool)

    def trial() -> int:
        with loader(spec) as stream:
            return sum(1 for epoch in stream.epochs() for _ in epoch.train)

    group = placement_group([{"CPU": 1}, {"CPU": 3}])
    assert group.wait(600)
    strategy = PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )
    task = ray.remote(num_cpus=1)(trial).options(scheduling_strategy=strategy)
    try:
        num = ray.get(task.remote(), timeout=600)
    finally:
        remove_placement_group(group)
    assert num == 2 * spec.plan.steps_per_epoch
