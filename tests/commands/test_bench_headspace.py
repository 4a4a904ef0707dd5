"""The headspace of a run: rates of its records, and the printed sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.commands.bench import bench, print_bench
from raypipe.commands.bench_headspace import lasting, rate_of
from raypipe.config import AugmentConfig, RunConfig, TransformConfig
from raypipe.errors import ConfigError


def records_of(*rates: float, every: int = 5) -> list[dict[str, Any]]:
    start = [{"kind": "start", "step": 0, "workers": 1}]
    return start + [
        {"kind": "train", "step": every * (number + 1), "images_per_s": rate}
        for number, rate in enumerate(rates)
    ]


def test_a_rate_is_all_images_by_all_seconds_after_the_first_third() -> None:
    # the mean of rates would be 75
    assert rate_of(records_of(1, 1, 1, 9, 100, 50, 100, 50, 100), 10) == pytest.approx(
        5 * 50 / (50 / 100 * 3 + 50 / 50 * 2)
    )
    assert rate_of(records_of(1, 1, 1, 100, 100, 100, 100), 10) < 101


def test_too_few_records_are_an_error_that_says_what_to_raise() -> None:
    with pytest.raises(ConfigError, match="raise --seconds, or lower train"):
        rate_of(records_of(1, 2), 10)


def test_an_own_loop_is_told_how_to_measure_itself(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"own loop.*headspace=True"):
        bench(RunConfig(), str(tmp_path), headspace=True)


def test_the_result_is_printed_as_a_sentence(capsys: pytest.CaptureFixture) -> None:
    print_bench({"text": "From the stream 1,163 images/s."})
    assert capsys.readouterr().out == "From the stream 1,163 images/s.\n"


def test_a_measured_run_is_augmented_as_in_its_middle() -> None:
    run = RunConfig(
        transform=TransformConfig(strength=(0.5, 0.8, 0.2)),
        augment=AugmentConfig(strength=(0.0, 0.6, 0.3)),
    )
    measured = lasting(run)
    assert measured.transform.strength_at(0.0) == 0.8
    assert measured.augment.strength_at(0.0) == 0.6
    assert lasting(RunConfig()).augment.strength_at(0.0) == 1.0
