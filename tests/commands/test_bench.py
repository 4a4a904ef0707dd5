from __future__ import annotations

import time
from typing import Any

import pytest

from raypipe.commands.bench import (
    compared,
    costs,
    needs,
    print_bench,
    steady,
    stream_once,
    summary,
    verdict,
)
from raypipe.config import PoolConfig, TransformConfig
from raypipe.errors import ConfigError
from raypipe.stores.memory import MemoryStore

from pictures import samples  # isort: skip

STREAM = {"images_per_s": 900.0, "first_batch_s": 5.0, "micro_batch_bytes": 1_000_000}
STREAM |= {"torch_ms_per_batch": 11.0, "torch_images_per_s": 909.0}
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


def test_ratios_are_medians_of_each_repeats_ratio_not_ratios_of_medians() -> None:
    # A machine whose speed drifts: each repeat compares with its own ceiling.
    drifting = [
        measured(1000.0, images_per_s=900.0),
        measured(2000.0, images_per_s=1600.0),
        measured(1500.0, images_per_s=1500.0),
    ]
    found = summary(drifting)
    # of 0.9, 0.8, 1.0; the ratio of the medians is 1.0
    assert found["ratio"] == pytest.approx(0.9)


def arrivals(num: int, clump: int = 1) -> list[tuple[float, int]]:
    """Blocks of 100 images, 10 a second; `clump` of them come together, as those of so many actors do."""
    return [(clump * (number // clump) / 10, 100) for number in range(num)]


def test_clumps_of_blocks_do_not_raise_the_rate() -> None:
    # Between the first block of a clump and the last of another there is a clump more than the time allows.
    for num_blocks in range(40, 48):
        assert steady(arrivals(num_blocks, clump=4)) == pytest.approx(1000, rel=0.02)


def test_too_few_blocks_are_an_error_that_says_what_to_raise() -> None:
    with pytest.raises(ConfigError, match=r"brought 3 batches.*--seconds"):
        steady(arrivals(3))


def test_torchs_benchmark_measures_the_next_batch_of_a_loader() -> None:
    class SlowStore(MemoryStore):
        def read(self, *arguments: Any) -> Any:
            time.sleep(0.01)
            return super().read(*arguments)

    store = SlowStore([sample["image"] for sample in samples(8)], [0] * 8)
    config = TransformConfig(train="center", size=16)
    found = stream_once(store, config, PoolConfig(engine="inline"), 4, 0.2, 400.0)
    assert 1 <= found["micro_batch_bytes"] / (4 * 16 * 16 * 3) < 1.2
    assert found["torch_ms_per_batch"] >= 10, "each batch is read apart"
    assert found["torch_images_per_s"] == pytest.approx(
        4000 / found["torch_ms_per_batch"]
    )


def test_a_stream_above_its_ceiling_is_explained() -> None:
    assert verdict(measured(900.0), actors=2).startswith(
        "The stream runs at 100% of the rate at which 2 processes"
    )
    assert "drift" in verdict(measured(800.0), actors=2) and "drift" not in verdict(
        measured(1000.0), actors=2
    )


def test_the_cpus_for_a_rate_are_whole_actors_and_some_to_spare() -> None:
    found: Any = {"stream_images_per_s": 1000.0, "actors": 2}
    found |= {"read_gb_per_million": 110.0, "sent_gb_per_million": 100.0}
    assert needs(found, 20_000, 1.0) == {
        "wanted_images_per_s": 20_000,
        "cpus_needed": 46,  # 20,000 x 1.15 / 500
        "read_gbit_per_s": pytest.approx(17.6),
        "sent_gbit_per_s": pytest.approx(16.0),
    }
    assert needs(found, 20_000, 0.5)["cpus_needed"] == 23
    assert needs(found, 1, 2.0)["cpus_needed"] == 2


def test_a_million_images_have_core_hours_gigabytes_and_a_price(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # 900 images/s
    figures: dict[str, Any] = summary([ONE]) | {
        "actors": 2,
        "micro_batch": 10,
    }
    million = costs(figures, 0.5, 0.04, 0.01)
    core_hours = 1e6 / 900 / 3600
    assert million == {
        "core_hours_per_million": pytest.approx(core_hours),
        "read_gb_per_million": 110.0,
        "sent_gb_per_million": 100.0,
        "dollars_per_million": pytest.approx(0.04 * core_hours + 0.01 * 100),
    }
    assert "dollars_per_million" not in costs(figures, 0.5, 0, 0)
    print_bench(figures | million | {"store": "a.lmdb", "transform": "light"})
    out = capsys.readouterr().out
    assert out.startswith("a.lmdb\n") and "  dollars per million        1.012\n" in out
