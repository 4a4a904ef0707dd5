"""Loops that others wrote, in two processes that are killed in mid-epoch: they go on with the very next step."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
from local_head import free_port
from torch.nn.functional import cross_entropy

from raypipe.config import PlanConfig
from raypipe.errors import ConfigError
from raypipe.streaming.handover import loader

sys.path.append(str(Path(__file__).parent))
import ranks

WORLD_SIZE = 2


@pytest.fixture(scope="module")
def processes() -> Iterator[Any]:
    """They are forked from one that has imported all that they need, which takes it many seconds."""
    context = multiprocessing.get_context("forkserver")
    libraries = ["lightning.pytorch", "accelerate", "transformers"]
    ours = [
        f"raypipe.{name}" for name in ("integrations.lightning", "integrations.transformers", "streaming.inline")
    ]
    context.set_forkserver_preload(["ranks", *libraries, *ours, "albumentations"])
    with pytest.MonkeyPatch.context() as patch:  # the server does not have this process's sys.path
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()
    yield context


def run(processes: Any, library: str, store: Path, folder: Path, dies_at: int) -> None:
    """Both ranks, to their end."""
    port = free_port()
    started = []
    for rank in range(WORLD_SIZE):
        arguments = (library, rank, WORLD_SIZE, port, str(store), str(folder), dies_at)
        started.append(processes.Process(target=ranks.run, args=arguments))
        started[-1].start()
    for rank in started:
        rank.join(100)
        rank.kill()
        rank.join()
    codes = [rank.exitcode for rank in started]
    assert codes == [0, 0] if dies_at == 0 else -signal.SIGKILL in codes and 0 not in codes, codes


def seen(folder: Path, rank: int) -> list[list[int]]:
    file = folder / f"seen-{rank}"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.unlink()
    return rows


@pytest.mark.timeout(240)
@pytest.mark.parametrize("library", ["lightning", "accelerate", "transformers"])
def test_a_run_that_is_killed_in_mid_epoch_goes_on_with_the_very_next_step(
    library: str, processes: Any, stores: dict[str, Path], tmp_path: Path
) -> None:
    run(processes, library, stores["train"], tmp_path, dies_at=9)  # of 12, in the second epoch
    assert (tmp_path / "resumed").read_text() == "0"
    before = [seen(tmp_path, rank) for rank in range(WORLD_SIZE)]
    run(processes, library, stores["train"], tmp_path, dies_at=0)
    at = int((tmp_path / "resumed").read_text())
    plan = ranks.spec_of(str(stores["train"])).plan
    assert at == 8 and plan.steps_per_epoch == 6
    delivered = [row for rank in before for row in rank if row[0] == "val" or 6 * row[1] + row[2] < at]
    delivered += [row for rank in range(WORLD_SIZE) for row in seen(tmp_path, rank)]
    expected = [
        [place.split, place.epoch, place.step, place.micro, *plan.indices(place).tolist()]
        for place in plan.micro_batches(plan.start())
    ]
    assert sorted(delivered) == sorted(expected)
    if library == "transformers":
        found = float((tmp_path / "eval_loss").read_text())
        assert found == pytest.approx(mean_loss(stores["train"], tmp_path / "trained.pt"), rel=1e-4)


@torch.no_grad()
def mean_loss(store: Path, weights: Path) -> float:
    """Over the samples of a validation, each by itself."""
    spec, net, losses = ranks.spec_of(str(store)), ranks.Net(), []
    net.load_state_dict(torch.load(weights, weights_only=True))
    pending = dataclasses.replace(spec.plan.start(), step=spec.plan.steps_per_epoch)
    for batch in next(loader(spec, cursor=pending).epochs()).val:
        logits = net.layer((batch.image.float() / 255).flatten(1))
        losses += cross_entropy(logits, batch.target, reduction="none")[batch.weight > 0].tolist()
    assert len(losses) == 100
    return sum(losses) / len(losses)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_steps": 5}, "max_steps is 5, and the plan has the epochs"),
        ({"eval_strategy": "steps"}, "eval_strategy is .*leave it at 'epoch'"),
    ],
)
def test_arguments_of_a_trainer_that_are_at_odds_with_the_plan_are_named(
    changed: dict[str, object], message: str, stores: dict[str, Path], tmp_path: Path
) -> None:
    from transformers import TrainingArguments

    from raypipe.integrations.transformers import StreamTrainer

    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], **changed)  # type: ignore
    with pytest.raises(ConfigError, match=message):
        StreamTrainer(ranks.Net(), arguments, loader=loader(ranks.spec_of(str(stores["train"]))))


def test_a_trainer_is_not_given_batches_that_are_gone_when_it_uses_them(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    from transformers import TrainingArguments

    from raypipe.integrations.transformers import StreamTrainer

    one = loader(ranks.spec_of(str(stores["train"])), keep=2)
    one.device = torch.device("cuda")
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ConfigError, match=r"takes all 4 batches of a step .* keep=3"):
        StreamTrainer(ranks.Net(), arguments, loader=one)


def test_lightning_is_told_what_the_plan_has(stores: dict[str, Path]) -> None:
    from raypipe.integrations.lightning import StreamDataModule

    spec = ranks.spec_of(str(stores["train"]))
    settings = StreamDataModule.settings(loader(spec))
    assert settings["max_epochs"] == 2 and settings["accumulate_grad_batches"] == 4
    without = dataclasses.replace(
        spec.plan, config=PlanConfig(epochs=2, val_interval=0), num_val=0, num_val_rows=0
    )
    module = StreamDataModule(loader(spec.replace(plan=without)))
    assert module.val_dataloader() == []
