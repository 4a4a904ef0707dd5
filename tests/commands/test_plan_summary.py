from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from documented import ROOT, blocks, commands

from raypipe.commands import cli
from raypipe.commands.audit import print_plan
from raypipe.commands.plan_summary import summary
from raypipe.config import PlanConfig, TransformConfig
from raypipe.stores.base import MemoryStore
from raypipe.streaming.opening import open_stream
from raypipe.streaming.spec import StreamSpec


def spec_of(stores: dict[str, Path], train: Any = None, **config: Any) -> StreamSpec:
    plan = PlanConfig(**{"epochs": 4, "micro_batch_size": 6, "global_batch_size": 24, **config})
    return open_stream(train or stores["train"], stores["val"], plan=plan, transform=TransformConfig(size=12))


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_plain_plan_tells_its_steps_its_left_overs_and_its_validations(stores: dict[str, Path]) -> None:
    found = summary(spec_of(stores))
    num_val = found["val_samples"]
    assert (found["steps"], found["samples"], found["left_over"]) == (4, 96, 4)
    assert found["drawn"] == {"min": 0, "mean": 0.96, "max": 1}
    assert found["val_padding"] == -num_val % 24 and found["validations"] == 4
    assert "sources" not in found and "classes" not in found


def test_the_sources_and_the_classes_of_a_mixture_are_told(stores: dict[str, Path]) -> None:
    shares = {0: {"a": 1, "b": 1}, 2: {"a": 3, "b": 1}}
    found = summary(spec_of(stores, {"a": stores["train"], "b": stores["val"]}, mixture=shares, class_balance=1.0))
    assert found["sources"]["a"]["share"] == [0.5, 0.75] and found["sources"]["a"]["samples"] == 100
    assert len(found["classes"]) == 5 and sum(drawn for _, drawn in found["classes"].values()) == pytest.approx(1)


def test_the_command_shows_the_plan_as_a_table(
    stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "run.yaml").write_text(blocks("yaml", ROOT / "docs" / "sampling.md")[0])
    (words,) = [words for words in commands(ROOT / "docs" / "sampling.md") if words[1] == "plan"]
    ours = f"{{photos: {stores['train']}, drawings: {stores['val']}}}"
    small = ["--plan.micro_batch_size=4", "--plan.global_batch_size=16", "--plan.epoch_samples=100"]
    cli.main([*words[1:], f"--store.train={ours}", "--store.filter=label != 3", *small])
    found = json.loads(capsys.readouterr().out)
    assert found["samples"] == 96 and found["excluded"] > 0 and set(found["sources"]) == {"photos", "drawings"}
    print_plan(found)
    lines = capsys.readouterr().out.splitlines()
    rows = {name: text for name, _, text in (line.strip().partition("  ") for line in lines)}
    assert "100 samples, 20 excluded, share (0.5, 0.5), passes (0.6" in rows["sources photos"]
    assert "% to " in rows["shares of 4 classes, drawn"]


def test_a_schedule_of_sizes_is_told(stores: dict[str, Path]) -> None:
    plan = PlanConfig(epochs=2, micro_batch_size=6)
    found = summary(open_stream(stores["train"], plan=plan, transform=TransformConfig(size={0: 8, 1: 16})))
    assert found["sizes"] == {"0": 8, "1": 16}


BUCKETS = ["16x16", "16x24", "16x99"]


def sized(num_squares: int, num_wide: int) -> MemoryStore:
    num = num_squares + num_wide
    columns = {"width": [50] * num_squares + [75] * num_wide, "height": [50] * num}
    return MemoryStore([b"x"] * num, [0] * num, columns=columns)


def bucketed(train: Any, **config: Any) -> dict[str, Any]:
    plan = {"epochs": 2, "micro_batch_size": 4, "global_batch_size": 8, "buckets": BUCKETS, **config}
    spec = open_stream(train, sized(9, 2), plan=PlanConfig(**plan))
    return summary(spec)


def test_the_left_overs_of_buckets_are_told() -> None:
    found = bucketed(sized(30, 23))
    assert found["buckets"] == {
        "16x16": {"samples": 30, "micro_batches": 7, "left_over": 2, "share": [7 / 12] * 2},
        "16x24": {"samples": 23, "micro_batches": 5, "left_over": 3, "share": [5 / 12] * 2},
        "16x99": {"samples": 0, "micro_batches": 0, "left_over": 0, "share": [0, 0]},
    }
    assert (found["steps"], found["buckets_left_over"], found["left_over"]) == (6, 0, 5)
    found = bucketed(sized(30, 23), aug_repeats=2)
    assert (found["steps"], found["buckets"]["16x24"]["micro_batches"], found["buckets_left_over"]) == (12, 10, 0)
    found = bucketed(sized(30, 23), epoch_samples=20)
    assert (found["steps"], found["buckets_left_over"]) == (2, None)
    found = bucketed(sized(30, 23), global_batch_size=20)
    assert (found["steps"], found["buckets_left_over"], found["left_over"]) == (2, 2, 13)


def test_buckets_of_mixtures_and_of_validations_are_told() -> None:
    stores = {"a": sized(40, 10), "b": sized(5, 45)}
    mixture = {0: {"a": 1, "b": 0}, 1: {"a": 1, "b": 1}}
    found = bucketed(stores, mixture=mixture, val_buckets=True, epoch_samples=400, class_balance=0.5)
    squares, wide = found["buckets"]["16x16"], found["buckets"]["16x24"]
    assert (squares["samples"], squares["left_over"]) == (45, 0)
    assert squares["share"] == pytest.approx([0.8, 0.45], abs=0.02) and abs(wide["micro_batches"] - 20) <= 2
    assert found["sources"]["b"]["share"] == [0, pytest.approx(0.5, abs=0.02)]
    assert found["buckets_left_over"] is None and found["val_buckets"]["16x16"] == {
        "samples": 9,
        "micro_batches": 3,
    }
