"""The GPU's utilization, where NVML counts it, and in all that shows it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from without_ray import every_batch

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.metrics.prometheus import TrainerMetrics
from raypipe.metrics.records import read_records
from raypipe.metrics.timing import StageClock
from raypipe.stores import digits_stores
from raypipe.streaming.handover import loader
from raypipe.streaming.opening import open_stream

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_samples_are_shares_whose_mean_is_that_of_a_stretch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = mock.Mock(side_effect=[40, 90, 101])
    monkeypatch.setattr(torch.cuda, "utilization", nvml)
    clock = StageClock(CUDA)
    assert clock.gpu_utilization is clock.times("train").gpu_utilization is None
    assert clock.sample() == 0.4
    before = clock.times("train")
    assert clock.sample() == 0.9 and clock.sample() == clock.gpu_utilization == 1.0
    assert (clock.times("train") - before).gpu_utilization == pytest.approx(
        0.95
    ) and nvml.mock_calls == [mock.call(CUDA)] * 3


def test_a_device_that_nobody_counts_is_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = ModuleNotFoundError("pynvml does not seem to be installed")
    nvml = mock.Mock(side_effect=[missing, 40])
    monkeypatch.setattr(torch.cuda, "utilization", nvml)
    clock = StageClock(CUDA)
    assert clock.sample() is None and clock.sample() is None
    assert StageClock(CPU).sample() is None and nvml.call_count == 1
    assert clock.gpu_utilization is clock.times("train").gpu_utilization is None


def test_the_thread_of_the_gauges_shows_what_it_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[float | None] = [None, 0.4]
    metrics = TrainerMetrics("test", 0, lambda: answers.pop(0))
    for expected in (None, 0.4):
        metrics.sample()
        assert metrics._gauges.get("trainer_gpu_utilization") == expected


def test_records_the_diagnosis_and_the_status_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = open_stream(
        digits_stores()[0],
        plan=PlanConfig(epochs=1, micro_batch_size=64, global_batch_size=256),
        transform=TransformConfig(train="small", size=8),
        pool=PoolConfig(engine="inline"),
    )
    one = loader(spec, run_dir=tmp_path)
    one.metrics.interval_s, clock = 0, one.metrics.clock
    answers = itertools.cycle([40, 60])
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: next(answers))
    clock._is_utilization_known = True
    for _ in every_batch(one):
        clock.sample()
    records = read_records(tmp_path.as_uri())
    shares = [each["gpu_utilization"] for each in records if each["kind"] == "train"]
    assert len(shares) > 3 and all(0.4 <= share <= 0.6 for share in shares)
    (diagnosis,) = (each for each in records if each["kind"] == "diagnosis")
    assert diagnosis["gpu_utilization"] == pytest.approx(0.5, abs=0.02)
    assert "executes kernels for 50%" in diagnosis["text"]
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["gpu_utilization"] == shares[-1]
