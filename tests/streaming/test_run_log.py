from __future__ import annotations

import re
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import without_ray
from small_streams import spec_of
from without_ray import every_batch

import raypipe
from raypipe.config import PlanConfig
from raypipe.metrics.records import read_records
from raypipe.storage.files import read_json
from raypipe.storage.filesystem import open_filesystem
from raypipe.streaming import run_log
from raypipe.streaming.inline import inline_batches
from raypipe.streaming.loader import Loader
from raypipe.streaming.rank_stream import HostSource
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.fields import MicroBatch


@pytest.fixture
def spec(stores: dict[str, Path]) -> StreamSpec:
    """Two epochs of three steps and a validation, without Ray."""
    plan = PlanConfig(epochs=2, micro_batch_size=8, global_batch_size=32)
    return spec_of(stores["train"], stores["val"], plan=plan)


def kinds(run: Path) -> list[str]:
    found = read_records(run.as_uri())
    return [record["kind"] for record in found]


def test_an_own_loop_leaves_records_and_ends_with_a_diagnosis(
    spec: StreamSpec,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raypipe.metrics.timing._SETTLED_S", 0.0)
    run = tmp_path / "runs" / "mine"
    with without_ray.only_rank():
        loader = raypipe.loader(spec, device="cpu", run_dir=str(run))
        for epoch in loader.epochs():
            for _ in epoch.train:
                pass
            loader.report({"loss": 0.5 / loader.global_step, "step": 1, "name": "x"})
            for _ in epoch.val:
                pass
    assert kinds(run) == [
        "start",
        "train",
        "report",
        "diagnosis",
        "train",
        "report",
        "diagnosis",
    ]
    (said,) = capsys.readouterr().out.splitlines()
    assert "images/s; the time of a trainer is" in said and "CPU actor" in said
    records = read_records(run.as_uri())
    start, train, report, *_, diagnosis = records
    assert start["settings"]["plan.micro_batch_size"] == 8
    assert train["images_per_s"] > 0 and 0 <= train["wait_fraction"] <= 1
    assert report["values"] == {"loss": 0.5 / 3, "step": 1} and diagnosis["step"] == 6
    assert said.split(";")[0] in diagnosis["text"]


def test_a_loop_that_never_asks_for_the_end_leaves_its_diagnosis_too(
    spec: StreamSpec, tmp_path: Path
) -> None:
    loaders = raypipe.plain_loaders(
        raypipe.loader(spec, run_dir=str(tmp_path / "mine"))
    )
    for _ in range(spec.plan.config.epochs):
        for loader in loaders:
            batches = iter(loader)
            for _ in range(len(loader)):  # as Lightning does
                next(batches)
    assert kinds(tmp_path / "mine") == ["start", *["train", "diagnosis"] * 2]


def test_a_resume_keeps_what_was_recorded_before_it(
    spec: StreamSpec, tmp_path: Path
) -> None:
    run = tmp_path / "mine"
    one = raypipe.loader(spec, run_dir=str(run))
    epoch = next(one.epochs())
    list(epoch.train)
    other = raypipe.loader(spec, run_dir=str(run))
    # as Lightning does, once the loader is open
    other.load_state_dict(one.state_dict())
    assert len(list(every_batch(other))) > 0
    assert kinds(run) == ["start", "train", "start", "diagnosis", "train", "diagnosis"]


def test_what_a_loop_skips_is_no_throughput(spec: StreamSpec, tmp_path: Path) -> None:
    for epoch in raypipe.loader(spec, run_dir=str(tmp_path / "mine")).epochs():
        next(epoch.train)
    assert kinds(tmp_path / "mine") == ["start", "diagnosis", "diagnosis"]


def test_any_long_wait_is_a_line_that_says_for_what_and_is_no_compute(
    spec: StreamSpec,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(run_log, "_FIRST_TOLD_S", 0.01)
    monkeypatch.setattr(run_log, "_STATUS_S", 0.001)
    said: list[str] = []

    def until_told(of: str) -> None:
        while not any(re.search(of, line) for line in said):
            time.sleep(0.01)
            said.extend(capsys.readouterr().out.splitlines())

    def stalled() -> Iterator[MicroBatch]:
        batches = inline_batches(spec, spec.plan.start(), 0, 1)
        yield from islice(batches, 6)
        until_told("waiting for train-")
        yield from batches

    folder = open_filesystem(tmp_path.as_uri())
    loader = Loader(
        spec, HostSource(lambda _: stalled()), cursor=spec.plan.start(), folder=folder
    )
    batches = next(loader.epochs()).train
    for _ in range(8):
        asked, before = time.perf_counter(), loader.times()
        next(batches)
    assert any("s: this process makes it" in line for line in said)
    begun = time.perf_counter()
    with loader.metrics.saving(lambda: "the previous one is being written"):
        until_told("s: the previous one is being written")
        while (found := read_json(tmp_path / "status.json"))[
            "waits_for"
        ] != "the checkpoint":
            time.sleep(0.01)
    stalled_s = time.perf_counter() - begun
    assert (
        found["whom"] == "the previous one is being written"
        and found["step"] == 2
        and found["to_step"] == 6
    )
    until_told(
        "training has asked for nothing for [0-9]+ s: the loop computes, or waits for other ranks"
    )
    next(batches)
    after = loader.times() - before
    assert 0 < after.checkpoint_s <= stalled_s
    assert after.compute_s <= time.perf_counter() - asked - after.checkpoint_s
    loader.close()
    assert read_json(tmp_path / "status.json")["every_s"] == 0
