from __future__ import annotations

import math
from typing import Any

import pytest

from raypipe.errors import ConfigError
from raypipe.metrics.measured import Report, trainer_images_per_s

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


def train(images_per_s: float, wait_fraction: float = 0.0) -> dict[str, Any]:
    return {"kind": "train", "images_per_s": images_per_s, "wait_fraction": wait_fraction}


def start(workers: int) -> dict[str, Any]:
    return {"kind": "start", "workers": workers}


# The report


def test_a_report_is_read_with_what_else_is_in_it_left_out() -> None:
    report = Report.of({**CONTENT, "ratio": 0.9, "versions": {}}, "report.json")
    assert report.images_per_s_per_actor == 500 and report.pixel_bytes_per_image == 150_000


@pytest.mark.parametrize("name", CONTENT)
def test_a_report_that_lacks_a_field_is_refused_by_its_name(name: str) -> None:
    rest = {key: value for key, value in CONTENT.items() if key != name}
    with pytest.raises(ConfigError, match=rf"report\.json has no field '{name}': make it anew by `raypipe bench"):
        Report.of(rest, "report.json")


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "many", True, [3]])
def test_a_report_with_a_figure_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="stream_images_per_s must be a positive number"):
        Report.of({**CONTENT, "stream_images_per_s": value}, "report.json")


def test_what_is_no_report_is_refused() -> None:
    with pytest.raises(ConfigError, match="read must be 'actor' or 'stage', got 'often'"):
        Report.of({**CONTENT, "read": "often"}, "report.json")
    with pytest.raises(ConfigError, match=r"report\.json is no bench report"):
        Report.of([1, 2], "report.json")


# The trainers of a run


def test_a_trainer_is_as_fast_as_if_it_never_waited() -> None:
    records = [start(4), train(10), train(800, 0.5), train(1600), {"kind": "val"}, train(1500, 0.0625)]
    assert trainer_images_per_s(records, "run") == (400.0, 4)


def test_only_the_last_start_that_made_progress_counts() -> None:
    records = [start(4), train(1), train(100), start(2), train(1), train(300), start(8)]
    assert trainer_images_per_s(records, "run") == (150.0, 2)


def test_a_run_of_one_line_is_judged_by_it() -> None:
    assert trainer_images_per_s([start(1), train(70)], "run") == (70.0, 1)


def test_a_run_that_tells_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="my-run has recorded no training"):
        trainer_images_per_s([start(1)], "my-run")
    with pytest.raises(ConfigError, match="my-run waits for data 98% of its time, which hides"):
        trainer_images_per_s([start(1), train(1), train(50, 0.98), train(50, 0.98)], "my-run")
    with pytest.raises(ConfigError, match=r"my-run: metrics\.jsonl is no record of a run"):
        trainer_images_per_s([{"kind": "train"}], "my-run")
