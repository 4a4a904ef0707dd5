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
    train: TrainConfig | None = None,
    per_step: int = 1,
    **pool: float | str,
) -> Allocation:
    return allocate(offer, PoolConfig(**pool), train, per_step)  # type: ignore[arg-type]


def test_two_cpus_run_one_trainer_and_one_actor_by_default() -> None:
    assert share(idle(2), TrainConfig()) == Allocation(
        workers=1, gpu=False, cpus_per_worker=1.0, max_actors=1
    )


def test_trainers_share_what_the_smallest_pool_leaves() -> None:
    assert share(idle(2), TrainConfig(num_workers=2), 2) == Allocation(2, False, 0.5, 1)
    thirds = share(idle(2), TrainConfig(num_workers=3), 3)
    # rounded down, so that three fit into one CPU
    assert thirds.cpus_per_worker == 0.33
    assert thirds.max_actors == 1


def test_trainers_that_would_share_a_cpu_among_more_than_four_are_refused() -> None:
    assert share(idle(3), TrainConfig(num_workers=8), 8) == Allocation(
        8, False, 0.25, 1
    )
    message = r"16 trainers and 1 transform actor need 17 CPUs .* 3: lower train\.num_workers, "
    with pytest.raises(ResourceError, match=message):
        share(idle(3), TrainConfig(num_workers=16), 16)
    # if it is meant
    assert (
        share(idle(3), TrainConfig(num_workers=16, cpus_per_worker=0.12), 16).workers
        == 16
    )


def test_the_pool_gets_the_cpus_that_trainers_do_not_need() -> None:
    assert share(idle(16), TrainConfig(num_workers=4), 4) == Allocation(
        4, False, 1.0, 12
    )
    assert share(idle(16), TrainConfig(cpus_per_worker=4.0)).max_actors == 12
    assert share(idle(16), TrainConfig(), cpus_per_actor=2.0).max_actors == 7
    assert (
        share(idle(2), TrainConfig(cpus_per_worker=1.0), cpus_per_actor=0.1).max_actors
        == 10
    )


def test_trainers_that_make_the_stream_themselves_need_no_cpus_for_actors() -> None:
    assert share(idle(1), TrainConfig(), engine="inline") == Allocation(
        1, False, 1.0, max_actors=0
    )
    alone = share(
        idle(4),
        TrainConfig(num_workers=4),
        4,
        engine="inline",
        min_actors=3,
        max_actors=9,
    )
    assert alone == Allocation(4, False, 1.0, max_actors=0)
    message = r"1 trainer needs 4 CPUs \(1 x 4\); .* lower train\.num_workers, .*, or add CPU nodes"
    with pytest.raises(ResourceError, match=message):
        share(idle(2), TrainConfig(cpus_per_worker=4), engine="inline")


def test_one_cpu_is_too_few_and_the_message_names_what_to_lower() -> None:
    with pytest.raises(ResourceError) as caught:
        share(idle(1), TrainConfig())
    for part in (
        "1 trainer and 1 transform actor need 2 CPUs",
        "can scale to 1: ",
        "add CPU nodes",
    ):
        assert part in str(caught.value)
    for setting in ("pool.cpus_per_actor", "pool.engine=inline"):
        assert setting in str(caught.value)
    share(idle(1), TrainConfig(), cpus_per_actor=0.5)
    share(idle(1), TrainConfig(), engine="inline")


def test_one_cpu_is_enough_when_it_is_shared_by_setting() -> None:
    allocation = share(idle(1), TrainConfig(cpus_per_worker=0.5), cpus_per_actor=0.5)
    assert allocation == Allocation(1, False, 0.5, 1)


@pytest.mark.parametrize(
    ("gpus", "per_step", "workers"),
    [(1, 4, 1), (4, 4, 4), (3, 4, 2), (8, 4, 4), (8, 6, 6), (5, 7, 1), (7, 12, 6)],
)
def test_auto_workers_are_the_largest_divisor_of_m_that_the_gpus_allow(
    gpus: int, per_step: int, workers: int
) -> None:
    allocation = share(idle(64, gpus), TrainConfig(), per_step)
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
        Resources(64, gpus, 64, free), TrainConfig(num_workers=workers), per_step
    )
    assert allocation.idle_gpus == idle


def test_gpu_no_trains_on_cpus_beside_gpus() -> None:
    assert share(idle(8, 4), TrainConfig(use_gpu=False), 4) == Allocation(
        1, False, 1.0, 7
    )


def test_gpu_yes_without_gpus_names_the_setting() -> None:
    with pytest.raises(ResourceError, match=r"has 0: set train\.use_gpu=false"):
        share(idle(8), TrainConfig(use_gpu=True))


def test_too_few_gpus_names_both_numbers_and_the_setting() -> None:
    with pytest.raises(
        ResourceError,
        match=r"4 trainers need 4 GPUs, but the cluster has 2: set train\.num_workers=2",
    ):
        share(idle(64, 2), TrainConfig(num_workers=4), 4)


def test_too_few_gpus_suggest_a_number_of_workers_that_works() -> None:
    with pytest.raises(ResourceError, match=r"train\.num_workers=2\b"):
        # 3 would not divide M = 4
        share(idle(64, 3), TrainConfig(num_workers=4), 4)


def test_cpus_of_other_jobs_are_told_apart_from_missing_ones() -> None:
    with pytest.raises(
        ResourceError,
        match=r"other jobs, or .*, hold all but 1 of the cluster's 8 CPUs",
    ):
        share(Resources(8, 0, 1, 0), TrainConfig())


def test_gpus_of_other_jobs_are_told_apart_from_missing_ones() -> None:
    with pytest.raises(
        ResourceError,
        match=r"need 2 GPUs; other jobs, or .*, hold all but 1 of the cluster's 2",
    ):
        share(Resources(8, 2, 8, 1), TrainConfig(num_workers=2), 2)


def test_workers_must_divide_m() -> None:
    with pytest.raises(
        ConfigError,
        match=r"train\.num_workers=3 does not divide the 4 micro-batches of a step",
    ):
        share(idle(8), TrainConfig(num_workers=3), 4)


def test_max_actors_bounds_the_pool_and_never_enlarges_it() -> None:
    assert share(idle(16), TrainConfig(), max_actors=5).max_actors == 5
    assert share(idle(4), TrainConfig(), max_actors=50).max_actors == 3


def test_min_actors_are_reserved_before_trainers_get_their_share() -> None:
    assert share(idle(4), TrainConfig(num_workers=2), 2, min_actors=3) == Allocation(
        2, False, 0.5, 3
    )
    message = r"5 transform actors need 6 CPUs \(1 x 1 \+ 5 x 1\).* pool\.min_actors, "
    with pytest.raises(ResourceError, match=message):
        share(idle(4), TrainConfig(), min_actors=5)


def test_without_trainers_the_pool_gets_everything() -> None:
    assert share(idle(4)) == Allocation(0, False, 0.0, 4)
    assert share(idle(1, gpus=2)) == Allocation(0, False, 0.0, 1)
    with pytest.raises(
        ResourceError,
        match=r"^1 transform actor needs 1 CPUs \(1 x 1\); .* 0: lower pool\.min_actors",
    ):
        share(idle(0))


def test_free_cpus_and_the_actors_fit_together_for_every_small_cluster() -> None:
    for cpus in range(1, 9):
        for workers in range(1, 9):
            try:
                found = share(idle(cpus), TrainConfig(num_workers=workers), workers)
            except ResourceError:
                assert cpus < 1 + workers / 4
                continue
            assert (
                found.workers * found.cpus_per_worker + found.max_actors <= cpus + 1e-9
            )


# Elastic training


def test_elastic_trainers_need_cpus_for_the_fewest_of_them() -> None:
    elastic = TrainConfig(num_workers=(1, 4), cpus_per_worker=1.0)
    assert share(idle(2), elastic, 4) == Allocation(
        4, False, 1.0, max_actors=1, min_workers=1
    )
    assert share(idle(8), elastic, 4) == Allocation(
        4, False, 1.0, max_actors=4, min_workers=1
    )
    with pytest.raises(
        ResourceError,
        match=r"2 trainers and 1 transform actor need 3 CPUs \(2 x 1 \+ 1 x 1\)",
    ):
        share(idle(2), TrainConfig(num_workers=(2, 4), cpus_per_worker=1.0), 4)


def test_elastic_trainers_start_with_the_gpus_that_are_there() -> None:
    elastic = TrainConfig(num_workers=(2, 4))
    assert share(idle(16, 2), elastic, 4) == Allocation(
        4, True, 1.0, max_actors=12, min_workers=2
    )
    with pytest.raises(
        ResourceError,
        match=r"2 trainers need 2 GPUs, but the cluster has 1: set train\.num_workers=1",
    ):
        share(idle(16, 1), elastic, 4)


def test_as_few_workers_as_there_may_be_at_most_are_not_elastic() -> None:
    assert share(idle(8), TrainConfig(num_workers=(2, 2)), 4).min_workers == 0


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
