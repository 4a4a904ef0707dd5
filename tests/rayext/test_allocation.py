from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from raypipe.config import PoolConfig, TrainConfig
from raypipe.errors import ConfigError, ResourceError
from raypipe.rayext.allocation import (
    Allocation,
    Resources,
    allocate,
    check_own,
    cluster_resources,
)
from raypipe.rayext.cluster_state import limits_of


def idle(cpus: float, gpus: float = 0) -> Resources:
    return Resources(cpus, gpus, cpus, gpus)


def share(
    offer: Resources,
    workers: dict[str, Any] | None,
    per_step: int,
    **pool: Any,
) -> Allocation:
    train = None if workers is None else TrainConfig(**workers)
    return allocate(offer, PoolConfig(**pool), train, per_step)


@pytest.mark.parametrize(
    ("offer", "workers", "pool", "expected"),
    [
        (idle(2), {}, {}, Allocation(1, False, 1.0, 1)),
        (idle(2), {"num_workers": 2}, {}, Allocation(2, False, 0.5, 1)),
        # rounded down, so that three fit into one CPU
        (idle(2), {"num_workers": 3}, {}, Allocation(3, False, 0.33, 1)),
        (idle(3), {"num_workers": 8}, {}, Allocation(8, False, 0.25, 1)),
        (idle(16), {"num_workers": 4}, {}, Allocation(4, False, 1.0, 12)),
        (idle(16), {"cpus_per_worker": 4.0}, {}, Allocation(1, False, 4.0, 12)),
        (idle(16), {}, {"cpus_per_actor": 2.0}, Allocation(1, False, 1.0, 7)),
        (idle(2), {}, {"cpus_per_actor": 0.1}, Allocation(1, False, 1.0, 10)),
        (idle(16), {}, {"max_actors": 5}, Allocation(1, False, 1.0, 5)),
        (idle(4), {}, {"max_actors": 50}, Allocation(1, False, 1.0, 3)),
        (idle(4), {"num_workers": 2}, {"min_actors": 3}, Allocation(2, False, 0.5, 3)),
        (idle(1), {}, {"engine": "inline"}, Allocation(1, False, 1.0, 0)),
        (idle(8, 4), {"use_gpu": False}, {}, Allocation(1, False, 1.0, 7)),
        (idle(4), None, {}, Allocation(0, False, 0.0, 4)),
        # the fewest of elastic trainers need CPUs, and GPUs
        (idle(2), {"num_workers": (1, 4)}, {}, Allocation(4, False, 1.0, 1, 1)),
        (idle(16, 2), {"num_workers": (2, 4)}, {}, Allocation(4, True, 1.0, 12, 2)),
        (idle(8), {"num_workers": (2, 2)}, {}, Allocation(2, False, 1.0, 6)),
    ],
)
def test_trainers_get_what_they_need_and_the_pool_the_rest(
    offer: Resources,
    workers: dict[str, Any] | None,
    pool: dict[str, Any],
    expected: Allocation,
) -> None:
    assert share(offer, workers, max(1, expected.workers), **pool) == expected


@pytest.mark.parametrize(
    ("offer", "workers", "pool", "message"),
    [
        (
            idle(3),
            {"num_workers": 16},
            {},
            r"16 trainers and 1 transform actor need 17 CPUs .* 3: lower train\.num_w",
        ),
        (
            idle(2),
            {"cpus_per_worker": 4},
            {"engine": "inline"},
            r"1 trainer needs 4 CPUs \(1 x 4\); .* lower train\.num_workers, .*, or add",
        ),
        (
            idle(1),
            {},
            {},
            r"need 2 CPUs.* to 1: lower .*pool\.cpus_per_actor, set pool\.engine=inline",
        ),
        (
            idle(4),
            {},
            {"min_actors": 5},
            r"5 transform actors need 6 CPUs \(1 x 1 \+ 5 x 1\).* pool\.min_actors, ",
        ),
        (
            idle(0),
            None,
            {},
            r"^1 transform actor needs 1 CPUs \(1 x 1\); .* 0: lower pool\.min_actors",
        ),
        (idle(8), {"use_gpu": True}, {}, r"has 0: set train\.use_gpu=false"),
        # 3 would not divide the 16 of a step
        (
            idle(64, 3),
            {"num_workers": 4},
            {},
            r"4 trainers need 4 GPUs, but the cluster has 3: set train\.num_workers=2\b",
        ),
        (
            idle(16, 1),
            {"num_workers": (2, 4)},
            {},
            r"2 trainers need 2 GPUs, but the cluster has 1: set train\.num_workers=1",
        ),
        (
            idle(2),
            {"num_workers": (2, 4), "cpus_per_worker": 1.0},
            {},
            r"2 trainers and 1 transform actor need 3 CPUs \(2 x 1 \+ 1 x 1\)",
        ),
        (
            Resources(8, 0, 1, 0),
            {},
            {},
            r"other jobs, or .*, hold all but 1 of the cluster's 8 CPUs",
        ),
        (
            Resources(8, 2, 8, 1),
            {"num_workers": 2},
            {},
            r"need 2 GPUs; other jobs, or .*, hold all but 1 of the cluster's 2",
        ),
    ],
)
def test_what_is_missing_is_told_with_the_setting_to_change(
    offer: Resources,
    workers: dict[str, Any] | None,
    pool: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ResourceError, match=message):
        share(offer, workers, 16, **pool)


def test_workers_must_divide_m() -> None:
    with pytest.raises(
        ConfigError,
        match=r"train\.num_workers=3 does not divide the 4 micro-batches of a step",
    ):
        share(idle(8), {"num_workers": 3}, 4)


@pytest.mark.parametrize(
    ("gpus", "per_step", "workers"),
    [(1, 4, 1), (4, 4, 4), (3, 4, 2), (8, 4, 4), (8, 6, 6), (5, 7, 1), (7, 12, 6)],
)
def test_auto_workers_are_the_largest_divisor_of_m_that_the_gpus_allow(
    gpus: int, per_step: int, workers: int
) -> None:
    allocation = share(idle(64, gpus), {}, per_step)
    assert (allocation.workers, allocation.gpu) == (workers, True)


@pytest.mark.parametrize(
    ("gpus", "free", "per_step", "workers", "idle"),
    [
        (8, 8, 1, 0, 7),
        (8, 8, 6, 0, 2),
        (8, 8, 8, 0, 0),
        (8, 1, 1, 0, 0),
        (8, 8, 1, 1, 0),
        (0, 0, 1, 0, 0),
    ],
)
def test_gpus_without_micro_batches_are_counted_unless_meant(
    gpus: int, free: int, per_step: int, workers: int, idle: int
) -> None:
    allocation = share(
        Resources(64, gpus, 64, free), {"num_workers": workers}, per_step
    )
    assert allocation.idle_gpus == idle


def test_free_cpus_and_the_actors_fit_together_for_every_small_cluster() -> None:
    for cpus in range(1, 9):
        for workers in range(1, 9):
            try:
                found = share(idle(cpus), {"num_workers": workers}, workers)
            except ResourceError:
                assert cpus < 1 + workers / 4
                continue
            assert (
                found.workers * found.cpus_per_worker + found.max_actors <= cpus + 1e-9
            )


# What the autoscaler may add

CLUSTER: dict[str, Any] = {
    "head_node_type": "head",
    "max_workers": 10,
    "available_node_types": {
        "head": {"resources": {"CPU": 0}, "max_workers": 0},
        "cpu": {"resources": {"CPU": 32}, "max_workers": 8},
        "gpu": {"resources": {"CPU": 28, "GPU": 4}, "max_workers": 2},
    },
}


def test_a_cluster_may_have_the_most_of_each_kind() -> None:
    assert limits_of(CLUSTER) == {"CPU": 8 * 32 + 2 * 28, "GPU": 2 * 4}


def test_the_number_of_nodes_is_bounded_and_the_richest_count_first() -> None:
    assert limits_of({**CLUSTER, "max_workers": 9}) == {"CPU": 8 * 32 + 28, "GPU": 8}
    assert limits_of({**CLUSTER, "max_workers": 1}) == {"CPU": 32, "GPU": 4}


def test_the_head_offers_what_it_has_once() -> None:
    types = {
        **CLUSTER["available_node_types"],
        "head": {"resources": {"CPU": 8}, "max_workers": 0},
    }
    assert (
        limits_of({**CLUSTER, "available_node_types": types})["CPU"]
        == 8 + 8 * 32 + 2 * 28
    )


@pytest.mark.cluster
def test_a_run_counts_on_the_nodes_that_the_autoscaler_may_add(
    all_cpus_held: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = cluster_resources()
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(CLUSTER))
    monkeypatch.setenv("RAYPIPE_AUTOSCALING_CONFIG", str(path))
    later = cluster_resources()
    assert (now.cpus, now.gpus) == (4, 0)
    assert (later.cpus, later.gpus) == (8 * 32 + 2 * 28, 8)
    assert later.free_cpus == later.cpus - (now.cpus - now.free_cpus)


# Trainers of one's own loop


def test_trainers_of_an_own_loop_count_and_the_message_names_a_remedy() -> None:
    check_own(3, 2, 1.0, PoolConfig())
    with pytest.raises(ResourceError) as caught:
        check_own(2, 2, 1.0, PoolConfig())
    assert str(caught.value) == (
        "2 trainers and 1 transform actor need 3 CPUs (2 x 1 + 1 x 1); the cluster has or can scale to 2: lower "
        "num_workers and resources_per_worker of ScalingConfig, pool.min_actors, pool.cpus_per_actor, set "
        "pool.engine=inline, or add CPU nodes"
    )
    check_own(2, 1, 1.0, PoolConfig())
    check_own(2, 2, 0.5, PoolConfig())
    check_own(2, 2, 1.0, PoolConfig(engine="inline"))


@pytest.mark.parametrize("gpus", [1, 0])
def test_trainers_of_an_own_loop_that_lack_gpus_are_told(gpus: int) -> None:
    check_own(1, 2, 0.0, PoolConfig(), 2, 1.0)
    with pytest.raises(
        ResourceError,
        match=rf"2 trainers of 1 GPU each need 2 GPUs; .* {gpus}: lower num_workers",
    ):
        check_own(1, 2, 0.0, PoolConfig(), gpus, 1.0)
