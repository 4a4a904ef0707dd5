"""Small trainings on one CPU, for tests to change; the results of commands and runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import raypipe
from raypipe.commands import cli
from raypipe.commands.settings import parse_command
from raypipe.config import (
    PlanConfig,
    PoolConfig,
    RunConfig,
    StoreConfig,
    TrainConfig,
    TransformConfig,
)

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def small_run(
    runs: Path | str,
    train_store: Path | str,
    val_store: Path | str,
    epochs: int,
    per_step: int,
    **train: Any,
) -> RunConfig:
    """A run of the small model, in steps of `per_step` x 6 samples, that logs each.

    Args:
        runs: folder of its folder.
        train_store, val_store: as of the fixture `stores`.
        epochs, per_step: of the plan.
        train: more settings of TrainConfig.
    """
    return RunConfig(
        store=StoreConfig(str(train_store), str(val_store)),
        plan=PlanConfig(
            epochs=epochs, micro_batch_size=6, global_batch_size=per_step * 6, seed=1
        ),
        transform=TransformConfig(train="small", val="resize", size=12),
        pool=PoolConfig(max_actors=1),
        train=TrainConfig(
            lr=0.003,
            num_workers=1,
            cpus_per_worker=1.0,
            log_interval=1,
            **{"model": "small", "optimizer": "adamw", **train},
        ),
        storage_path=str(runs),
    )


def parse_run(args: list[str] | None, doc: str | None) -> RunConfig:
    """The RunConfig of a job's arguments."""

    def job(run: RunConfig) -> None: ...

    return parse_command("", job, args, doc)["run"]


def run_command(capsys: Capture, *words: object) -> dict[str, Any]:
    """The JSON of a command's last line."""
    cli.main([str(word) for word in words])
    return last_result(capsys)


def last_result(capsys: Capture) -> dict[str, Any]:
    """The JSON of the last line that was printed."""
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def final_weights(result: dict[str, Any]) -> dict[str, torch.Tensor]:
    last = sorted(Path(result["run_dir"]).glob("checkpoint_*/"))[-1]
    weights: dict[str, torch.Tensor] = raypipe.read_checkpoint(last).state["model"]
    return weights


def assert_equal_weights(one: Path, other: Path) -> None:
    """The models of the last checkpoints of two runs are equal to the bit."""
    models = []
    for run_dir in (one, other):
        newest = max(run_dir.glob("checkpoint_*/state.pt"))
        models.append(torch.load(newest, weights_only=True)["model"])
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
