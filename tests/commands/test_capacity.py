from __future__ import annotations

import dataclasses
import itertools

import pytest

from raypipe.commands.capacity import Capacity, Nodes, Target, plan, verdict
from raypipe.config import PoolConfig
from raypipe.errors import ConfigError
from raypipe.metrics.measured import Report

# 500 images/s per actor, 150,000 bytes of pixels and 100,000 encoded bytes per image.
REPORT = Report(
    stream_images_per_s=1000.0,
    actors=2,
    micro_batch=100,
    micro_batch_bytes=15_000_000,
    encoded_bytes_per_image=100_000.0,
    read_cpu_s_per_image=0.0001,
    transform_cpu_s_per_image=0.0019,
    read="actor",
)
TARGET = Target(images_per_s_per_gpu=1250.0, gpus=16, headroom=0.2)
NODES = Nodes(
    cpus_per_node=16,
    memory_gib_per_node=100.0,
    gbps_per_node=40.0,
    gpus_per_host=8,
    gbps_per_gpu_host=24.0,
    execution_limit=400.0,
)
FOUND = plan(REPORT, TARGET, NODES)


def changed(report: Report = REPORT, target: Target = TARGET, **nodes: float) -> Capacity:
    return plan(report, target, dataclasses.replace(NODES, **nodes))


# Numbers by hand


def test_actors_and_nodes_by_hand() -> None:
    assert FOUND.images_per_s == 20_000 and FOUND.micro_batches_per_s == 200
    assert FOUND.actors == 48 and FOUND.actors_per_gpu == pytest.approx(3.0)  # 20,000 x 1.2 / 500
    assert FOUND.cpu_nodes == 3 and FOUND.cpu_nodes_per_gpu == pytest.approx(3 / 16)
    assert FOUND.sized_by == "CPUs" and FOUND.gpu_hosts == 2


def test_memory_by_hand() -> None:
    assert FOUND.in_flight == 4 * 48 + 2 * 16 == 224
    # in flight, and what was let go in a second
    assert FOUND.object_store_bytes == pytest.approx((224 + 200) * 15e6)
    assert FOUND.object_store_bytes_per_node == pytest.approx(424 * 15e6 / 3)
    # 8 ranks with 3 micro-batches each, and a second of pixels
    assert FOUND.object_store_bytes_per_gpu_host == pytest.approx(8 * 3 * 15e6 + 8 * 1250 * 150_000)


def test_network_by_hand() -> None:
    assert FOUND.gpu_host_in_bytes_per_s == pytest.approx(8 * 1250 * 150_000)
    assert FOUND.node_out_bytes_per_s == pytest.approx(20_000 * 150_000 / 3)
    assert FOUND.node_in_bytes_per_s == pytest.approx(20_000 * 100_000 / 3)
    assert FOUND.store_read_bytes_per_s == pytest.approx(2e9)


def test_limits_by_hand_and_the_one_that_is_hit_first_comes_first() -> None:
    found = changed(max_nodes=4, store_mb_per_s=8000.0)
    used = {limit.name: limit.used for limit in found.limits}
    assert used == pytest.approx(
        {"cpu nodes": 3 / 4, "execution": 200 / 400, "gpu host network": 1.5e9 / 3e9, "store": 2000 / 8000}
    )
    assert [limit.used for limit in found.limits] == sorted(used.values(), reverse=True)
    assert {limit.name for limit in FOUND.limits} == {"execution", "gpu host network"}


def test_the_in_flight_formula_is_the_pools() -> None:
    fixed, per_actor = PoolConfig().in_flight_for(TARGET.gpus)
    assert FOUND.in_flight == fixed + per_actor * FOUND.actors


def test_readers_bring_encoded_bytes_through_the_object_store() -> None:
    read_apart = changed(dataclasses.replace(REPORT, read="stage"))
    extra = read_apart.object_store_bytes - FOUND.object_store_bytes
    assert extra == pytest.approx(2 * 224 * 100 * 100_000)


# What grows with what

PER_S = [f.name for f in dataclasses.fields(Capacity) if f.name.endswith("_per_s") and "node" not in f.name]


@pytest.mark.parametrize("factor", [2, 5])
def test_as_much_again_of_the_target_is_as_much_again_of_everything(factor: int) -> None:
    more = changed(target=dataclasses.replace(TARGET, images_per_s_per_gpu=1250.0 * factor))
    assert more.cpu_nodes == factor * FOUND.cpu_nodes and more.actors == factor * FOUND.actors
    for name in PER_S:
        assert getattr(more, name) == pytest.approx(factor * getattr(FOUND, name)), name
    before = {limit.name: limit.used for limit in FOUND.limits}
    assert {limit.name: limit.used for limit in more.limits} == pytest.approx(
        {name: factor * used for name, used in before.items()}
    )


def test_twice_the_gpus_are_twice_the_nodes_and_the_same_for_each_gpu_host() -> None:
    more = changed(target=dataclasses.replace(TARGET, gpus=32))
    assert (more.cpu_nodes, more.gpu_hosts, more.in_flight) == (6, 4, 2 * FOUND.in_flight)
    assert more.gpu_host_in_bytes_per_s == FOUND.gpu_host_in_bytes_per_s
    assert more.object_store_bytes_per_gpu_host == FOUND.object_store_bytes_per_gpu_host
    assert more.actors_per_gpu == pytest.approx(FOUND.actors_per_gpu)


def test_twice_the_micro_batch_halves_the_micro_batches_and_keeps_the_network() -> None:
    larger = dataclasses.replace(REPORT, micro_batch=200, micro_batch_bytes=30_000_000)
    more = changed(larger)
    assert more.micro_batches_per_s == 100 and more.gpu_host_in_bytes_per_s == FOUND.gpu_host_in_bytes_per_s
    assert more.in_flight == FOUND.in_flight and more.object_store_bytes > 1.5 * FOUND.object_store_bytes


def test_there_are_never_too_few_actors_nodes_or_hosts() -> None:
    for rate, gpus, cpus, cpus_per_actor in itertools.product((1.0, 777.0), (1, 3, 8, 9), (1, 7), (0.5, 1.0)):
        target = Target(rate, gpus)
        found = changed(target=target, cpus_per_node=cpus, cpus_per_actor=cpus_per_actor)
        assert found.actors * REPORT.images_per_s_per_actor >= target.images_per_s * 1.15 - 1e-6
        assert found.cpu_nodes * cpus / cpus_per_actor >= found.actors
        assert found.gpu_hosts * 8 >= 1 and found.gpu_hosts * 8 >= gpus


def test_nodes_are_added_for_a_slow_network_and_for_small_object_stores() -> None:
    slow = changed(gbps_per_node=4.0)  # 500 MB/s, of 3 GB/s
    assert (slow.cpu_nodes, slow.sized_by) == (6, "network") and slow.node_out_bytes_per_s <= 0.5e9
    small = changed(memory_gib_per_node=2.0)
    assert small.sized_by == "object store" and small.cpu_nodes > FOUND.cpu_nodes
    assert small.object_store_bytes_per_node <= 0.3 * 2 * 2**30


def test_a_host_that_is_not_full_gets_only_its_gpus_bytes() -> None:
    assert changed(target=Target(1000.0, 2)).gpu_host_in_bytes_per_s == 2 * 1000 * 150_000


# The verdict


def test_the_verdict_names_the_first_limit_where_it_is_hit_and_what_to_change() -> None:
    text = verdict(changed(execution_limit=250.0), TARGET)
    assert text.startswith("Nothing is exceeded. The first limit to be hit, at 1,562 images/s per GPU (1.2 times")
    assert "200.0 of the 250 micro-batches/s" in text and "raise plan.micro_batch" in text


def test_a_target_beyond_one_execution_says_how_large_micro_batches_or_groups_of_gpus_must_be() -> None:
    text = verdict(changed(execution_limit=60.0), TARGET)
    assert text.startswith("The target is out of reach by its execution") and "3.3 times what there is" in text
    assert "375 images/s per GPU are the most" in text
    assert "raise plan.micro_batch (to 334, say), or give every 4 GPUs an execution of their own" in text
    assert "Exceeded as well" not in text
    enough = dataclasses.replace(REPORT, micro_batch=334, micro_batch_bytes=334 * 150_000)
    assert changed(enough, execution_limit=60.0).micro_batches_per_s <= 60
    assert changed(target=dataclasses.replace(TARGET, gpus=4), execution_limit=60.0).limits[0].used <= 1


@pytest.mark.parametrize(
    ("nodes", "first", "advice"),
    [
        ({"gbps_per_gpu_host": 1.0}, "gpu host network", "transform.decode=gpu"),
        ({"store_mb_per_s": 10.0}, "store", "--short-side"),
        ({"max_nodes": 1}, "cpu nodes", "allow more"),
    ],
)
def test_each_limit_has_advice_of_its_own(nodes: dict[str, float], first: str, advice: str) -> None:
    found = changed(**nodes)
    assert found.limits[0].name == first and advice in verdict(found, TARGET)


def test_all_that_is_exceeded_is_named() -> None:
    text = verdict(changed(gbps_per_gpu_host=1.0, max_nodes=1, execution_limit=100.0), TARGET)
    assert "Exceeded as well: cpu nodes, execution." in text


# What cannot be


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Target(0.0), "images_per_s_per_gpu must be positive, got 0"),
        (lambda: Target(float("nan")), "images_per_s_per_gpu must be positive"),
        (lambda: Target(1.0, -1), "gpus must be positive, got -1"),
        (lambda: Target(1.0, 1, -0.1), "headroom must be at least 0"),
        (lambda: Nodes(execution_limit=0), "execution_limit must be positive"),
        (lambda: Nodes(max_nodes=-1), "max_nodes must be at least 0"),
        (lambda: Nodes(cpus_per_node=2, cpus_per_actor=4), "a node of 2 CPUs holds no actor of 4"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]
