"""The command `audit`: its exit codes, and what it prints."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from logged_runs import run_logged
from small_runs import last_result, run_command

from raypipe.commands.audit import print_audit
from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.streaming.opening import open_stream

Audit = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(stores: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch of 16 micro-batches, and its validation of 4."""
    spec = open_stream(
        stores["train"],
        stores["val"],
        plan=PlanConfig(epochs=1, micro_batch_size=6, global_batch_size=24, seed=3),
        transform=TransformConfig(train="small", val="resize", size=12),
        pool=PoolConfig(engine="inline", max_actors=0),
    )
    folder = tmp_path_factory.mktemp("runs") / "run"
    run_logged(spec, folder)
    return folder


@pytest.fixture
def audit(capsys: pytest.CaptureFixture[str]) -> Audit:
    """Runs the command in this process, and gives the object that it prints."""
    return lambda *words: run_command(capsys, "audit", *words, "--json")


def test_a_sound_run_passes_by_chosen_micro_batches(
    run: Path, audit: Audit, capsys: pytest.CaptureFixture[str]
) -> None:
    result = audit(run, "--samples", 5, "--seed", 11)
    assert result["ok"] and result["findings"] == [] and result["seconds"] > 0
    assert (result["recorded"], result["compared"], result["seed"]) == (20, 5, 11)
    assert result["epochs"]["0"]["micro_batches"] == 20
    print_audit(result)
    assert "if 45% or more of them were altered" in capsys.readouterr().out
    assert audit(run, "--all")["compared"] == 20
    first, second = (audit(run, "--samples", 0) for _ in range(2))
    assert first["seed"] != second["seed"] and first["root"] == result["root"]


def test_an_altered_run_ends_with_exit_code_1_and_names_the_change(
    run: Path, tmp_path: Path, audit: Audit, capsys: pytest.CaptureFixture[str]
) -> None:
    altered = Path(shutil.copytree(run, tmp_path / "altered"))
    (file,) = (altered / "digests").glob("*.jsonl")
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:5] + lines[6:]))
    with pytest.raises(SystemExit, match="1"):
        audit(altered)
    print_audit(last_result(capsys))
    text = capsys.readouterr().out
    found = f"lines: epoch 0: {file.name} has other lines than its rank has written"
    assert text.endswith(f"{found}\n1 finding\n")


def test_another_root_than_the_published_one_is_a_finding(
    run: Path, audit: Audit, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = audit(run, "--samples", 0)
    for root in (plain["root"], plain["epochs"]["0"]["root"]):
        assert audit(run, "--samples", 0, "--root", root)["ok"]
    with pytest.raises(SystemExit, match="1"):
        audit(run, "--samples", 0, "--root", "0" * 64)
    assert "the published 000" in last_result(capsys)["findings"][0]["text"]
