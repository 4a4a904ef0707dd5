from __future__ import annotations

import dataclasses
import math

import pytest

from raypipe.bench import Measured, summary

ONE = Measured(
    ceiling_images_per_s=1000.0,
    stream_images_per_s=900.0,
    first_batch_s=5.0,
    ordinary_gap_s=0.1,
    boundary_gap_s=0.12,
)


def test_one_repeat_is_its_own_summary() -> None:
    assert summary([ONE]) == pytest.approx(
        {
            "ceiling_images_per_s": 1000.0,
            "stream_images_per_s": 900.0,
            "ratio": 0.9,
            "first_batch_s": 5.0,
            "boundary_gap_ratio": 1.2,
        }
    )


def test_repeats_are_summed_up_by_their_medians() -> None:
    outlier = dataclasses.replace(ONE, first_batch_s=500.0)
    assert summary([ONE, outlier, ONE])["first_batch_s"] == 5.0
    assert summary([ONE, dataclasses.replace(ONE, first_batch_s=7.0)])["first_batch_s"] == 6.0


def test_ratios_are_medians_of_each_repeats_ratio_not_ratios_of_medians() -> None:
    # A machine whose speed drifts: each repeat compares with its own ceiling.
    drifting = [
        Measured(1000.0, 900.0, 1.0, 0.1, 0.1),
        Measured(2000.0, 1600.0, 1.0, 0.2, 0.3),
        Measured(1500.0, 1500.0, 1.0, 0.1, 0.2),
    ]
    found = summary(drifting)
    assert found["ratio"] == pytest.approx(0.9)  # of 0.9, 0.8, 1.0; the ratio of the medians is 1.0
    assert found["boundary_gap_ratio"] == pytest.approx(1.5)


def test_a_run_without_boundaries_says_so() -> None:
    assert math.isnan(summary([dataclasses.replace(ONE, boundary_gap_s=math.nan)])["boundary_gap_ratio"])
