from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe.commands.trial import Progress, Trial
from raypipe.config import (
    AugmentConfig,
    PlanConfig,
    PoolConfig,
    RunConfig,
    StoreConfig,
    TrainConfig,
    TransformConfig,
)
from raypipe.metrics.records import read_records


class Alone(Trial):
    """A trial outside of Ray Tune, which gives it the rest of its arguments."""

    def __init__(self, runs: list[RunConfig], number: int = 0) -> None:
        self._given = runs
        super().__init__({"number": number})

    def setup(self, config: dict[str, Any], *_: Any) -> None:  # type: ignore[override]
        super().setup(config, self._given, 1)


def state(trial: Trial, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    trial.save_checkpoint(str(folder))
    return torch.load(max(folder.glob("checkpoint_*/state.pt")), weights_only=True)["model"]


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_a_trial_goes_epoch_by_epoch_and_from_its_checkpoint_and_its_process_takes_another(
    stores: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        RunConfig(
            store=StoreConfig(str(stores["train"]), str(stores["val"])),
            plan=PlanConfig(epochs=2, micro_batch=10, per_step=2, seed=1),
            transform=TransformConfig(train="small", val="resize", size=8),
            pool=PoolConfig(max_actors=1, cpus_per_actor=0.5),
            train=TrainConfig(model="small", workers=1),
            augment=AugmentConfig(mixup_alpha=0.4),
            runs=str(tmp_path),
            name=name,
        )
        for name in ("whole", "broken")
    ]
    trial = Alone(runs)
    first, second = trial.train(), trial.train()
    assert [first["done"], second["done"]] == [False, True]
    assert [(each["steps"], each["epochs"]) for each in (first, second)] == [(5, 1), (10, 2)]
    assert {"val_accuracy", "val_loss"} <= first.keys()
    whole = state(trial, tmp_path / "whole-end")

    assert trial.reset_config({"number": 1})
    trial.train()
    state(trial, tmp_path / "half")
    trial.cleanup()
    resumed = Alone(runs, 1)
    resumed.load_checkpoint(str(tmp_path / "half"))
    again, last = resumed.train(), resumed.train()
    assert not again["done"] and again["epochs"] == 1 and again["val_accuracy"] == first["val_accuracy"]
    assert last["done"] and last["steps"] == 10 and last["val_accuracy"] == second["val_accuracy"]
    for name, value in state(resumed, tmp_path / "broken-end").items():
        assert torch.equal(value, whole[name]), name
    resumed.cleanup()
    found = read_records((tmp_path / "broken").as_uri())
    assert found is not None
    kinds = [record["kind"] for record in found.kept]
    assert kinds.count("train") == kinds.count("val") == 2  # that of the first epoch was done again
    assert "epoch" not in capsys.readouterr().out


def test_progress_names_the_training_and_its_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    class Begun:
        config = {"number": 1}  # noqa: RUF012

    progress = Progress(["light", "heavy"])
    progress.on_trial_result(0, [], Begun, {"epochs": 3, "val_accuracy": 0.91})
    progress.on_trial_result(0, [], Begun, {"epochs": 4, "val_accuracy": None})
    progress.on_trial_error(0, [], Begun)
    assert capsys.readouterr().out.splitlines() == [
        "2/2  epoch 3  validation accuracy 0.9100  heavy",
        "2/2  epoch 4  validation accuracy not yet known  heavy",
        "2/2  failed  heavy",
    ]
