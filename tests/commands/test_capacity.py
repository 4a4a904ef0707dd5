from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from raypipe.commands.capacity import plan_capacity
from raypipe.commands.cli import main
from raypipe.config import PoolConfig
from raypipe.errors import ConfigError

# 500 images/s per actor, 150,000 bytes of pixels and 110,000 encoded bytes per image.
CONTENT: dict[str, Any] = {
    "stream_images_per_s": 1000.0,
    "actors": 2,
    "micro_batch": 100,
    "micro_batch_bytes": 15_000_000,
    "encoded_bytes_per_image": 110_000.0,
    "read_cpu_s_per_image": 0.0001,
    "transform_cpu_s_per_image": 0.0018,
    "read": "actor",
}
TARGET = {"images_per_s_per_gpu": 1250.0, "gpus": 16, "headroom": 0.2}
NODES = {"memory_gib_per_node": 100.0, "gbps_per_node": 40.0, "gbps_per_gpu_host": 24.0, "execution_limit": 200.0}
NODES |= {"object_manager_mb_per_s": 6000.0}


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(CONTENT))
    return path


def plan(report: Path, content: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    report.write_text(json.dumps(CONTENT | {"encoded_bytes_per_image": 100_000.0} | (content or {})))
    return plan_capacity(str(report), **{**TARGET, **NODES, **changes})


# Numbers by hand


def test_actors_nodes_memory_network_and_limits_by_hand(report: Path) -> None:
    found = plan(report, max_nodes=4, store_mb_per_s=8000.0)
    assert found["images_per_s"] == 20_000 and found["micro_batches_per_s"] == 200
    assert found["actors"] == 48 and found["actors_per_gpu"] == pytest.approx(3.0)  # 20,000 x 1.2 / 500
    assert found["cpu_nodes"] == 3 and found["cpu_nodes_per_gpu"] == pytest.approx(3 / 16)
    assert found["sized_by"] == "CPUs" and found["gpu_hosts"] == 2
    # 3 blocks per actor and 2 per GPU, of two micro-batches, which take 0.2 s each
    assert found["in_flight"] == 2 * (3 * 48 + 2 * 16) == 352
    # in flight, and what was let go in a second
    assert found["object_store_bytes"] == pytest.approx((352 + 200) * 15e6)
    assert found["object_store_bytes_per_node"] == pytest.approx(552 * 15e6 / 3)
    # 8 ranks with 3 micro-batches each, and a second of pixels
    assert found["object_store_bytes_per_gpu_host"] == pytest.approx(8 * 3 * 15e6 + 8 * 1250 * 150_000)
    assert found["gpu_host_in_bytes_per_s"] == pytest.approx(8 * 1250 * 150_000)
    assert found["node_out_bytes_per_s"] == pytest.approx(20_000 * 150_000 / 3)
    assert found["node_in_bytes_per_s"] == pytest.approx(20_000 * 100_000 / 3)
    assert found["store_read_bytes_per_s"] == pytest.approx(2e9)
    assert found["micro_batches_of_a_block"] == 2 and found["blocks_per_s"] == 100
    used = {"cpu_nodes": 3 / 4, "execution": 100 / 200, "gpu_host_network": 1.5e9 / 3e9, "store": 2000 / 8000}
    used["object_manager"] = 1500 / 6000
    assert found["limits"] == pytest.approx(used)
    assert list(found["limits"].values()) == sorted(used.values(), reverse=True)
    assert found["first_limit"] == "cpu_nodes"
    assert set(plan(report)["limits"]) == {"execution", "gpu_host_network", "object_manager"}


def test_the_in_flight_formula_is_the_pools(report: Path) -> None:
    fixed, per_actor, _ = PoolConfig().blocks_for(16, 48)
    found = plan(report)
    assert found["in_flight"] == 2 * (fixed + per_actor * found["actors"])


def test_readers_bring_encoded_bytes_through_the_object_store(report: Path) -> None:
    extra = plan(report, {"read": "stage"})["object_store_bytes"] - plan(report)["object_store_bytes"]
    assert extra == pytest.approx(2 * 352 * 100 * 100_000)


# What grows with what


@pytest.mark.parametrize("factor", [2, 5])
def test_as_much_again_of_the_target_is_as_much_again_of_everything(factor: int, report: Path) -> None:
    found, more = plan(report), plan(report, images_per_s_per_gpu=1250.0 * factor)
    assert more["cpu_nodes"] == factor * found["cpu_nodes"] and more["actors"] == factor * found["actors"]
    for name in ("images_per_s", "micro_batches_per_s", "gpu_host_in_bytes_per_s", "store_read_bytes_per_s"):
        assert more[name] == pytest.approx(factor * found[name]), name
    assert more["limits"] == pytest.approx({name: factor * used for name, used in found["limits"].items()})


def test_twice_the_gpus_are_twice_the_nodes_and_the_same_for_each_gpu_host(report: Path) -> None:
    found, more = plan(report), plan(report, gpus=32)
    assert (more["cpu_nodes"], more["gpu_hosts"], more["in_flight"]) == (6, 4, 2 * found["in_flight"])
    for name in ("gpu_host_in_bytes_per_s", "object_store_bytes_per_gpu_host"):
        assert more[name] == found[name]
    assert more["actors_per_gpu"] == pytest.approx(found["actors_per_gpu"])
    # A host that is not full gets only its GPUs' bytes.
    assert plan(report, images_per_s_per_gpu=1000.0, gpus=2)["gpu_host_in_bytes_per_s"] == 2 * 1000 * 150_000


def test_twice_the_micro_batch_halves_the_micro_batches_and_keeps_the_network_and_memory(report: Path) -> None:
    found, more = plan(report), plan(report, {"micro_batch": 200, "micro_batch_bytes": 30_000_000})
    assert more["micro_batches_per_s"] == 100 and more["in_flight"] == found["in_flight"] / 2
    assert more["gpu_host_in_bytes_per_s"] == found["gpu_host_in_bytes_per_s"]
    assert more["object_store_bytes"] == found["object_store_bytes"]  # a block has half as many


def test_there_are_never_too_few_actors_nodes_or_hosts(report: Path) -> None:
    for rate, gpus, cpus, cpus_per_actor in itertools.product((1.0, 777.0), (1, 9), (1, 7), (0.5, 1.0)):
        target = {"images_per_s_per_gpu": rate, "gpus": gpus, "headroom": 0.15}
        found = plan(report, **target, cpus_per_node=cpus, cpus_per_actor=cpus_per_actor)
        assert found["actors"] * 500 >= rate * gpus * 1.15 - 1e-6
        assert found["cpu_nodes"] * cpus / cpus_per_actor >= found["actors"]
        assert found["gpu_hosts"] >= 1 and found["gpu_hosts"] * 8 >= gpus


def test_nodes_are_added_for_a_slow_network_and_for_small_object_stores(report: Path) -> None:
    slow = plan(report, gbps_per_node=4.0)  # 500 MB/s, of 3 GB/s
    assert (slow["cpu_nodes"], slow["sized_by"]) == (6, "network") and slow["node_out_bytes_per_s"] <= 0.5e9
    small = plan(report, memory_gib_per_node=2.0)
    assert small["sized_by"] == "object store" and small["cpu_nodes"] > 3
    assert small["object_store_bytes_per_node"] <= 0.3 * 2 * 2**30


# The verdict


def test_the_verdict_names_the_first_limit_where_it_is_hit_and_what_to_change(report: Path) -> None:
    text = plan(report, execution_limit=125.0)["verdict"]
    assert text.startswith("Nothing is exceeded: the first limit, execution, is hit at 1,562 images/s per GPU")
    assert "takes 80% of it" in text and "raise pool.block (to 4, say)" in text


def test_what_ray_brings_into_a_gpu_host_is_a_limit_that_is_to_be_measured_or_left_out(report: Path) -> None:
    text = plan(report, object_manager_mb_per_s=790.0)["verdict"]  # 8 GPUs of a host take 1,500 MB/s
    assert text.startswith("Perhaps out of reach: the first limit, object manager, is hit at 658 images/s per GPU")
    assert "hops.py --address auto" in text and "--object-manager-mb-per-s" in text
    assert plan(report, object_manager_mb_per_s=790.0, gpus=2)["limits"]["object_manager"] < 1
    assert "object_manager" not in plan(report, object_manager_mb_per_s=0.0)["limits"]


def test_a_target_beyond_one_execution_says_how_many_gpus_it_may_serve_and_how_large_blocks_must_be(
    report: Path,
) -> None:
    text = plan(report, execution_limit=30.0)["verdict"]
    assert text.startswith("Out of reach: the first limit, execution, is hit at 375 images/s per GPU")
    assert "raise pool.executions, so that each serves at most 4 GPUs, or raise pool.block (to 7, say)" in text
    assert plan(report, execution_limit=30.0)["micro_batches_per_s"] / 7 <= 30
    assert plan(report, gpus=4, execution_limit=30.0)["limits"]["execution"] <= 1


def test_one_execution_is_limited_by_blocks_so_the_size_of_micro_batches_that_share_one_does_not_matter(
    report: Path,
) -> None:
    # 0.5 s of an actor, by 1 or 5 micro-batches
    used = [
        plan(report, {"micro_batch": size, "micro_batch_bytes": size * 150_000})["limits"]["execution"]
        for size in (50, 250)
    ]
    assert used == pytest.approx([80 / 200] * 2)


@pytest.mark.parametrize(
    ("nodes", "first", "advice"),
    [
        ({"gbps_per_gpu_host": 1.0}, "gpu_host_network", "transform.decode=gpu"),
        ({"store_mb_per_s": 10.0}, "store", "--short-side"),
        ({"max_nodes": 1}, "cpu_nodes", "allow more"),
    ],
)
def test_each_limit_has_advice_of_its_own(nodes: dict[str, float], first: str, advice: str, report: Path) -> None:
    found = plan(report, **nodes)
    assert found["first_limit"] == first and advice in found["verdict"]


# The command


def run(*args: object) -> None:
    main(["plan-capacity", *map(str, args)])


def test_the_table_is_for_people_and_the_last_line_is_json(
    report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(report, "--images-per-s-per-gpu", 1000, "--gpus=8", "--headroom=0", "--object-manager-mb-per-s=5000")
    *shown, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert (found["actors"], found["cpu_nodes"], found["first_limit"]) == (16, 1, "execution")
    assert found["limits"]["execution"] == pytest.approx(8000 / 200 / 60)
    assert shown[-1] == found["verdict"] and "limit: execution" in "\n".join(shown)


def test_what_is_missing_is_one_line_with_what_to_do(
    report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.json").write_text(json.dumps({"ceiling_images_per_s": 1000.0}))
    for args, message in (
        (
            (tmp_path / "old.json", "--images-per-s-per-gpu=1"),
            "old.json: stream_images_per_s is None, which bench",
        ),
        ((tmp_path / "none.json", "--images-per-s-per-gpu=1"), "none.json cannot be read"),
        ((report, "--images-per-s-per-gpu=1", "--cpus-per-node=2", "--cpus-per-actor=4"), "holds no actor of 4"),
    ):
        with pytest.raises(SystemExit) as caught:
            run(*args)
        (line,) = capsys.readouterr().err.splitlines()
        assert caught.value.code == 1 and message in line


@pytest.mark.parametrize(
    "option",
    ["--images-per-s-per-gpu=nan", "--gpus=0", "--headroom=-0.1", "--execution-limit=0", "--max-nodes=-1"],
)
def test_what_cannot_be_is_refused_by_its_name(
    option: str, report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(report, "--images-per-s-per-gpu=1", option)
    assert caught.value.code == 2
    assert option.partition("=")[0].removeprefix("--").replace("-", "_") in capsys.readouterr().err


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "many", True, [3], None])
def test_a_report_with_a_figure_that_is_none_is_refused(value: Any, report: Path) -> None:
    for name in ("stream_images_per_s", "read"):
        with pytest.raises(ConfigError, match=rf"report\.json: {name} is .*make it anew by `raypipe bench"):
            plan(report, {name: value})
