from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from raypipe.commands.bench import ceiling, compared, measured_settings, steady, summary, verdict
from raypipe.commands.capacity import plan_capacity
from raypipe.config import TransformConfig
from raypipe.errors import ConfigError
from raypipe.stores import open_store

from conftest import samples  # isort: skip

STREAM = {"images_per_s": 900.0, "first_batch_s": 5.0, "boundary_gap_ratio": 1.2, "micro_batch_bytes": 1_000_000}
CEILING = {
    "images_per_s": 1000.0,
    "read_cpu_s_per_image": 0.0001,
    "transform_cpu_s_per_image": 0.002,
    "encoded_bytes_per_image": 110_000.0,
}
ONE = compared(CEILING, STREAM, CEILING)


def measured(ceiling_per_s: float, **stream: float) -> dict[str, float]:
    """Ceilings that drift around a mean."""
    before, after = (CEILING | {"images_per_s": ceiling_per_s * x} for x in (0.9, 1.1))
    return compared(before, STREAM | stream, after)


def test_one_repeat_is_its_own_summary() -> None:
    assert summary([ONE]) == pytest.approx(
        {
            "ceiling_images_per_s": 1000.0,
            "stream_images_per_s": 900.0,
            "ratio": 0.9,
            "first_batch_s": 5.0,
            "boundary_gap_ratio": 1.2,
            "read_cpu_s_per_image": 0.0001,
            "transform_cpu_s_per_image": 0.002,
            "encoded_bytes_per_image": 110_000.0,
            "micro_batch_bytes": 1_000_000,
        }
    )


def test_repeats_are_summed_up_by_their_medians() -> None:
    outlier, other = (measured(1000.0, first_batch_s=seconds) for seconds in (500.0, 7.0))
    assert summary([ONE, outlier, ONE])["first_batch_s"] == 5.0
    assert summary([ONE, other])["first_batch_s"] == 6.0


def test_ratios_are_medians_of_each_repeats_ratio_not_ratios_of_medians() -> None:
    # A machine whose speed drifts: each repeat compares with its own ceiling.
    drifting = [
        measured(1000.0, images_per_s=900.0, boundary_gap_ratio=1.0),
        measured(2000.0, images_per_s=1600.0, boundary_gap_ratio=1.5),
        measured(1500.0, images_per_s=1500.0, boundary_gap_ratio=2.0),
    ]
    found = summary(drifting)
    assert found["ratio"] == pytest.approx(0.9)  # of 0.9, 0.8, 1.0; the ratio of the medians is 1.0
    assert found["boundary_gap_ratio"] == pytest.approx(1.5)


def arrivals(num: int, of_segment: int, clump: int = 1) -> list[tuple[float, int, tuple[str, int]]]:
    """Blocks of 100 images, 10 a second; `clump` of them come together, as those of so many actors do."""
    return [(clump * (number // clump) / 10, 100, ("train", number // of_segment)) for number in range(num)]


def test_clumps_of_blocks_do_not_raise_the_rate() -> None:
    # Between the first block of a clump and the last of another there is a clump more than the time allows.
    for num_blocks in range(40, 48):
        assert steady(arrivals(num_blocks, 16, clump=4))["images_per_s"] == pytest.approx(1000, rel=0.02)


def test_a_boundary_is_compared_with_the_gaps_between_other_blocks() -> None:
    late = [(at + 0.1 * segment, images, (split, segment)) for at, images, (split, segment) in arrivals(60, 6)]
    assert steady(late)["boundary_gap_ratio"] == pytest.approx(2)


def test_segments_of_one_block_have_no_boundary_to_compare_and_the_verdict_says_so() -> None:
    found = steady(arrivals(40, of_segment=1))
    assert "boundary_gap_ratio" not in found
    stream = {**found, "first_batch_s": 5.0, "micro_batch_bytes": 1_000_000}
    one = summary([compared(CEILING, stream, CEILING), ONE])
    assert "boundary_gap_ratio" not in one and "one block" in verdict(one, actors=2)


def test_too_few_blocks_are_an_error_that_says_what_to_raise() -> None:
    with pytest.raises(ConfigError, match=r"brought 3 blocks.*--seconds"):
        steady(arrivals(3, 1))


def test_a_stream_above_its_ceiling_is_explained() -> None:
    assert verdict(measured(900.0), actors=2).startswith(
        "The stream runs at 100% of the rate at which 2 processes"
    )
    assert "drift" in verdict(measured(800.0), actors=2) and "drift" not in verdict(measured(1000.0), actors=2)


def test_the_report_of_a_bench_is_what_a_cluster_is_sized_by(stores: dict[str, Path], tmp_path: Path) -> None:
    config = TransformConfig(train="light", size=32)
    one = ceiling(open_store(stores["train"]), config, processes=1, seconds=0.5)
    # A process of its own: its CPU time cannot exceed the time that it took.
    read_s, transform_s = one["read_cpu_s_per_image"], one["transform_cpu_s_per_image"]
    assert 0 < transform_s <= 1.02 / one["images_per_s"] and 0 < read_s < transform_s
    assert one["encoded_bytes_per_image"] == sum(len(sample["image"]) for sample in samples(100)) / 100  # type: ignore[arg-type]
    found = summary([compared(one, STREAM, one)]) | measured_settings(
        open_store(stores["parquet"]), config, 2, 256
    )
    (tmp_path / "report.json").write_text(json.dumps(found))
    assert plan_capacity(str(tmp_path / "report.json"), images_per_s_per_gpu=1.0)["actors"] == 1
    assert (found["actors"], found["micro_batch"], found["read"]) == (2, 100, "stage")
    assert (
        found["versions"]["ray"]
        and measured_settings(open_store(stores["train"]), config, 2, 8)["read"] == "actor"
    )


@pytest.mark.cluster
def test_in_a_cluster_the_ceiling_is_that_of_its_actors(
    ray_cluster: None, stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "of the cluster that this process is connected to")
    found = ceiling(
        open_store(stores["train"]), TransformConfig(train="center", size=16), processes=2, seconds=0.5
    )
    assert found["images_per_s"] > 0 and found["transform_cpu_s_per_image"] > 0
    assert found["encoded_bytes_per_image"] == pytest.approx(np.mean([len(s["image"]) for s in samples(100)]))  # type: ignore[arg-type]
