"""Loops that others wrote, in two processes that are killed in mid-epoch: they go on with the very next step."""

from __future__ import annotations

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
from raypipe.plan.skipped import Skipped
from raypipe.streaming.handover import loader

sys.path.append(str(Path(__file__).parent))
import ranks
from ranks import Net, StreamTrainer, arguments_of, pixels_and_labels, spec_of

WORLD_SIZE = 2


@pytest.fixture(scope="module")
def processes() -> Iterator[Any]:
    """They are forked from one that has imported all that they need, which takes it many seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ranks", "albumentations"])
    with pytest.MonkeyPatch.context() as patch:
        # the server does not have this process's sys.path
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()
    yield context


def run(processes: Any, library: str, folder: Path, dies_at: int) -> None:
    """Both ranks, to their end."""
    port = free_port()
    started = []
    for rank in range(WORLD_SIZE):
        arguments = (library, rank, WORLD_SIZE, port, str(folder), dies_at)
        started.append(processes.Process(target=ranks.run, args=arguments))
        started[-1].start()
    for rank in started:
        rank.join()
    codes = [rank.exitcode for rank in started]
    if dies_at:
        assert -signal.SIGKILL in codes and 0 not in codes, codes
    else:
        assert codes == [0, 0]


def seen(folder: Path, rank: int) -> list[list[int]]:
    file = folder / f"seen-{rank}"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.unlink()
    return rows


@pytest.mark.system
@pytest.mark.parametrize("library", ["lightning", "accelerate", "transformers"])
def test_a_run_killed_in_mid_epoch_goes_on_with_the_next_step(
    library: str, processes: Any, tmp_path: Path
) -> None:
    # of 12, in the second epoch, with a checkpoint every second step
    run(processes, library, tmp_path, dies_at=9)
    before = [row for rank in range(WORLD_SIZE) for row in seen(tmp_path, rank)]
    run(processes, library, tmp_path, dies_at=0)
    after = [row for rank in range(WORLD_SIZE) for row in seen(tmp_path, rank)]
    plan = spec_of(4).plan
    resumed_at = 8
    first = plan.cursor_at(resumed_at)
    trained = [row[1:3] for row in after if row[0] == "train"]
    assert min(trained) == [first.epoch, first.step]
    delivered = after + [
        row
        for row in before
        if row[0] == "val" or ranks.STEPS * row[1] + row[2] < resumed_at
    ]
    expected = [
        [at.split, at.epoch, at.step, at.micro, *plan.indices(at).tolist()]
        for at in plan.micro_batches(plan.start())
    ]
    # A turn in which no rank has a sample is left out: the last one of each validation.
    padding = {-1}
    delivered = [row for row in delivered if set(row[4:]) != padding]
    assert sorted(delivered) == sorted(
        row for row in expected if set(row[4:]) != padding
    )
    if library == "transformers":
        result = torch.load(tmp_path / "result.pt", weights_only=True)
        expected_loss = mean_loss(result["net"])
        assert result["val_losses"][-1] == pytest.approx(expected_loss, rel=1e-4)


@torch.no_grad()
def mean_loss(weights: dict[str, torch.Tensor]) -> float:
    """Over the samples of a validation, each by itself."""
    net = Net()
    net.load_state_dict(weights)
    total = 0.0
    for batch in loader(spec_of(4)).validation():
        logits = net.layer((batch.image.float() / 255).flatten(1))
        losses = cross_entropy(logits, batch.target, reduction="none")
        total += float(losses[batch.weight > 0].sum())
    return total / ranks.NUM_VAL


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"max_steps": 13},
            "max_steps must be at most 12, or -1 for all of them, got 13",
        ),
        (
            {"num_train_epochs": 9},
            r"num_train_epochs must be 2, got 9: leave it out, since plan\.epochs sets it",
        ),
        (
            {"gradient_accumulation_steps": 3},
            "gradient_accumulation_steps must be 2, got 3",
        ),
        (
            {"per_device_eval_batch_size": 5},
            "per_device_eval_batch_size must be 4, got 5",
        ),
    ],
)
def test_arguments_of_a_trainer_that_are_at_odds_with_the_plan_are_named(
    changed: dict[str, object], message: str, tmp_path: Path
) -> None:
    arguments = arguments_of(tmp_path, **changed)
    with pytest.raises(ConfigError, match=message):
        StreamTrainer(Net(), arguments, loader=loader(spec_of()))


def test_a_trainer_is_not_given_batches_that_are_gone_when_it_uses_them(
    tmp_path: Path,
) -> None:
    one = loader(spec_of(4), keep_batches=2)
    one.device = torch.device("cuda")
    with pytest.raises(
        ConfigError, match=r"fetches all 4 batches of a step .* keep_batches=3"
    ):
        StreamTrainer(Net(), arguments_of(tmp_path), loader=one)


def trainer_of(model: torch.nn.Module, folder: Path, **more: Any) -> Any:
    compute_metrics = more.pop("compute_metrics", None)
    spec = spec_of(4, skip=more.pop("skip", []))
    usual = {"save_strategy": "epoch", "lr_scheduler_type": "linear"}
    return StreamTrainer(
        model,
        arguments_of(folder, **usual | more),
        loader=loader(spec),
        format=pixels_and_labels,
        compute_metrics=compute_metrics,
    )


@pytest.mark.parametrize(
    ("changed", "num_steps", "num_evaluations"),
    [
        ({}, 12, 2),
        (
            {"eval_strategy": "steps", "eval_steps": 5, "eval_on_start": True},
            12,
            4,
        ),  # and at the end
        ({"eval_strategy": "no"}, 12, 0),
        ({"eval_delay": 1}, 12, 2),
        ({"max_steps": 8}, 8, 2),  # the second where the training ends
        ({"batch_eval_metrics": True}, 12, 2),
        (
            {
                "eval_strategy": "steps",
                "eval_steps": 4,
                "save_strategy": "steps",
                "save_steps": 4,
            },
            12,
            3,
        ),
    ],
)
def test_an_argument_of_a_trainer_keeps_its_meaning(
    changed: dict[str, Any],
    num_steps: int,
    num_evaluations: int,
    tmp_path: Path,
) -> None:
    one = {"compute_metrics": number_counted, "save_strategy": "no"} | changed
    trainer = trainer_of(Net(), tmp_path, **one)
    trainer.train()
    assert trainer.state.global_step == num_steps
    counted = [
        entry["eval_counted"]
        for entry in trainer.state.log_history
        if "eval_loss" in entry
    ]
    assert counted == [ranks.NUM_VAL] * num_evaluations


@pytest.mark.parametrize("skip", [["1..2", 9], ["5..8"], [12], ["6..11"]])
def test_a_trainer_goes_around_skipped_steps_also_after_a_resume(
    skip: list[int | str], tmp_path: Path
) -> None:
    def trained(folder: str, resume: str | None = None) -> Any:
        saved = {"eval_strategy": "no", "save_strategy": "steps", "save_steps": 1}
        trainer = trainer_of(Net(), tmp_path / folder, skip=skip, **saved)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = trained("whole")
    assert whole.state.global_step == 12
    made = {int(path.name[11:]): path for path in tmp_path.glob("whole/checkpoint-*")}
    # a step before the end of an epoch whose rest is skipped counts that, too
    assert len(made) == 12 - Skipped.of(PlanConfig(skip=skip).skipped_ranges).count
    # its schedule has come to its end
    assert set(whole.lr_scheduler.get_last_lr()) == {0.0}
    for step in sorted(made)[1:-1:2]:
        again = trained(f"again{step}", str(made[step]))
        assert torch.equal(again.model.layer.weight, whole.model.layer.weight)


num_counted = [0]


def number_counted(predictions: Any, compute_result: bool = True) -> dict[str, int]:
    """A metric that sees all batches at once, or one after the other, as with `batch_eval_metrics`."""
    num_counted[0] += int((predictions.label_ids >= 0).sum())
    if not compute_result:
        return {}
    found, num_counted[0] = num_counted[0], 0
    return {"counted": found}


def test_a_trainer_evaluates_and_predicts_after_the_training(tmp_path: Path) -> None:
    trainer = trainer_of(
        Net(),
        tmp_path,
        save_strategy="no",
        compute_metrics=number_counted,
    )
    before = trainer.evaluate()
    trainer.train()
    last = [entry for entry in trainer.state.log_history if "eval_loss" in entry][-1]
    after, again, predicted = (
        trainer.evaluate(),
        trainer.evaluate(),
        trainer.predict(trainer.eval_dataset),
    )
    assert (
        before["eval_loss"]
        != after["eval_loss"]
        == again["eval_loss"]
        == last["eval_loss"]
    )
    assert predicted.metrics["test_loss"] == after["eval_loss"]
    assert after["eval_counted"] == predicted.metrics["test_counted"] == ranks.NUM_VAL
    own = [
        {"pixel_values": torch.rand(3, 12, 12), "labels": number % 5}
        for number in range(6)
    ]
    with torch.no_grad():
        losses = [
            trainer.model(each["pixel_values"][None], torch.tensor([each["labels"]]))[
                "loss"
            ]
            for each in own
        ]
    of_own = trainer.evaluate(own)
    assert of_own["eval_counted"] == 6
    assert of_own["eval_loss"] == pytest.approx(float(sum(losses)) / 6, rel=1e-4)


def vit(num_layers: int) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "num_hidden_layers": num_layers,
    }
    return ViTForImageClassification(
        ViTConfig(image_size=12, patch_size=4, num_labels=5, **sizes)
    )


class Deeper(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.Linear(5, 5)


@pytest.mark.parametrize(
    ("saved", "other", "message"),
    [
        (
            Net,
            Deeper,
            r"checkpoint-12 lacks 2 weights of the model \(more\.weight, more\.bias\)",
        ),
        (
            Deeper,
            Net,
            r"checkpoint-12 has 2 weights that the model lacks \(more\.",
        ),
        (
            lambda: vit(1),
            lambda: vit(2),
            r"checkpoint-12 lacks 16 weights of the model \(vit\.layers\.1\.",
        ),
    ],
)
def test_a_trainer_refuses_a_checkpoint_that_leaves_weights_as_they_are(
    saved: Any, other: Any, message: str, tmp_path: Path
) -> None:
    trainer_of(saved(), tmp_path).train()
    with pytest.raises(ConfigError, match=message):
        trainer_of(other(), tmp_path).train(resume_from_checkpoint=True)


def test_the_best_model_is_loaded_with_all_weights(tmp_path: Path) -> None:
    falling = iter(range(9, 0, -1))
    trainer = trainer_of(
        vit(1),
        tmp_path,
        load_best_model_at_end=True,
        metric_for_best_model="falling",
        compute_metrics=lambda _: {"falling": next(falling)},
    )
    trainer.train()
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-6"
    saved = type(trainer.model).from_pretrained(tmp_path / "checkpoint-6").state_dict()
    assert all(
        torch.equal(value, saved[name])
        for name, value in trainer.model.state_dict().items()
    )
