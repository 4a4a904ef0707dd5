"""Runs whose targets are no classes: what they learn, report and refuse. Without a cluster."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import without_ray
from small_runs import small_run
from torch.nn.functional import mse_loss

from raypipe.config import AugmentConfig, RunConfig, StoreConfig
from raypipe.errors import BadSamplesError, ConfigError
from raypipe.launch.run_checks import check_augment, num_classes_of
from raypipe.metrics.records import read_records
from raypipe.stores import open_writer
from raypipe.streaming.opening import spec_of


def squared(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return mse_loss(
        outputs, target.reshape(len(target), -1).float(), reduction="none"
    ).mean(1)


def mean_squared(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return squared(outputs, target).mean()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores of grey images whose score is their brightness."""
    folder = tmp_path_factory.mktemp("stores")
    rng = np.random.default_rng(0)
    columns = {
        "image": "binary",
        "score": "float64",
        "both": "float32[2]",
        "several": "int64[2]",
        "grid": "float32[2,2]",
    }
    for name, num in (("train", 48), ("val", 10)):
        with open_writer(folder / f"{name}.lmdb", columns) as writer:
            for score in rng.random(num).tolist():
                pixels = np.full((12, 12, 3), round(255 * score), np.uint8)
                image = cv2.imencode(".png", pixels)[1].tobytes()
                pair = np.array([score, 1 - score], np.float32)
                several, grid = np.array([1, round(score)]), np.tile(pair, (2, 1))
                writer.append(
                    {
                        "image": image,
                        "score": score,
                        "both": pair,
                        "several": several,
                        "grid": grid,
                    }
                )
    return folder


def run(
    folder: Path, runs: Path, label: str, columns: Any = (), **train: Any
) -> RunConfig:
    given = {"loss": f"{__name__}:squared", **train}
    plain = small_run(runs, folder / "train.lmdb", folder / "val.lmdb", 4, 2, **given)
    stores = [str(folder / f"{name}.lmdb") for name in ("train", "val")]
    return dataclasses.replace(
        plain, store=StoreConfig(*stores, target_column=label, columns=columns or [])
    )


@pytest.mark.parametrize(("label", "mixup"), [("score", 0.0), ("both", 0.4)])
def test_a_run_learns_floats_and_reports_its_loss_and_no_accuracy(
    folder: Path, tmp_path: Path, label: str, mixup: float
) -> None:
    config = dataclasses.replace(
        run(folder, tmp_path, label), augment=AugmentConfig(mixup_alpha=mixup)
    )
    found = without_ray.train(config)
    records = read_records(Path(found["run_dir"]).as_uri())
    validations = [record for record in records if record["kind"] == "val"]
    losses = [record["loss"] for record in validations]
    assert len(losses) == 4 and losses[-1] < 0.7 * losses[0]
    assert not any("accuracy" in record for record in validations)
    assert found["val_accuracy"] is None and found["val_loss"] == losses[-1]


def test_a_validation_of_bad_samples_alone_is_an_error(
    folder: Path, tmp_path: Path
) -> None:
    plain = run(folder, tmp_path, "score")
    damaged = tmp_path / "damaged.lmdb"
    with open_writer(damaged, {"image": "binary", "score": "float64"}) as writer:
        for _ in range(4):
            writer.append({"image": b"no image", "score": 0.5})
    store = dataclasses.replace(plain.store, val=str(damaged))
    with pytest.raises(
        BadSamplesError,
        match=r"no sample of the validation can be read: `raypipe verify .*damaged",
    ):
        without_ray.train(dataclasses.replace(plain, store=store))


def outputs_of(config: RunConfig) -> int:
    spec = spec_of(config)
    check_augment(config.augment, spec.device_input)
    return num_classes_of(config, spec)


def test_a_run_without_a_target_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"needs targets, but store\.target_column is ''"
    ):
        outputs_of(run(folder, tmp_path, ""))


def test_a_model_has_as_many_outputs_as_its_target_or_as_are_set(
    folder: Path, tmp_path: Path
) -> None:
    assert outputs_of(run(folder, tmp_path, "score")) == 1
    assert outputs_of(run(folder, tmp_path, "both")) == 2
    # probabilities
    assert outputs_of(run(folder, tmp_path, "both", loss="cross_entropy")) == 2
    assert (
        outputs_of(
            run(folder, tmp_path, "grid", model={"name": "small", "num_classes": 4})
        )
        == 4
    )


@pytest.mark.parametrize(
    ("label", "train", "augment", "message"),
    [
        (
            "score",
            {"loss": "cross_entropy"},
            {},
            "targets are float64, but train.loss=cross_entropy",
        ),
        (
            "several",
            {"loss": "cross_entropy"},
            {},
            r"targets are int64 \(2,\), but train.loss=cross_entropy",
        ),
        ("grid", {}, {}, r"targets are float32 \(2, 2\): set num_classes in train"),
        (
            "several",
            {},
            {"cutmix_alpha": 1.0},
            r"augment.cutmix_alpha mixes targets, and two that are int64 \(2,\)",
        ),
    ],
)
def test_what_has_no_meaning_for_a_target_is_refused_before_the_run(
    folder: Path,
    tmp_path: Path,
    label: str,
    train: dict[str, Any],
    augment: dict[str, Any],
    message: str,
) -> None:
    config = dataclasses.replace(
        run(folder, tmp_path, label, **train), augment=AugmentConfig(**augment)
    )
    with pytest.raises(ConfigError, match=message):
        outputs_of(config)


def test_a_declared_dtype_makes_a_target_that_can_be_mixed(
    folder: Path, tmp_path: Path
) -> None:
    columns = {"several": {"dtype": "float32"}}
    config = run(folder, tmp_path, "several", columns)
    assert (
        outputs_of(dataclasses.replace(config, augment=AugmentConfig(mixup_alpha=0.1)))
        == 2
    )


def test_a_loss_that_gives_one_number_for_all_is_told(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="must return one loss per sample"):
        without_ray.train(
            run(folder, tmp_path, "score", loss=f"{__name__}:mean_squared")
        )
