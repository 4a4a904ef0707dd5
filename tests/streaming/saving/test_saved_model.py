"""Models from checkpoints: what a run, or an own loop, leaves is enough to use its model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import without_ray
from small_runs import small_run

import raypipe
from raypipe.config import (
    AugmentConfig,
    PlanConfig,
    PoolConfig,
    RunConfig,
    TransformConfig,
)
from raypipe.errors import ConfigError, SampleError
from raypipe.plan.places import Cursor
from raypipe.stores import open_store
from raypipe.streaming.opening import open_stream
from raypipe.streaming.saving.checkpoints import write_checkpoint
from raypipe.streaming.saving.saved_model import input_of
from raypipe.streaming.saving.stateful import saved
from raypipe.train.models import build_model

Stores = dict[str, Path]

INLINE = PoolConfig(engine="inline")


@pytest.fixture
def run(stores: Stores, tmp_path: Path) -> RunConfig:
    run = small_run(tmp_path, stores["train"], stores["val"], 1, 4)
    augment = AugmentConfig(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    return dataclasses.replace(run, name="trained", augment=augment)


def test_a_run_leaves_all_that_its_model_needs(run: RunConfig, stores: Stores) -> None:
    folder = without_ray.train(run)["run_dir"]
    found = raypipe.read_checkpoint(folder)
    assert found.model == "small"
    assert found.classes == list(open_store(stores["val"]).classes or ())
    assert (found.epoch, found.step) == (1, 0)
    model = build_model(found.model, len(found.classes)).eval()
    model.load_state_dict(found.state["model"])
    # The inputs are those of the run's own validation, and so is the accuracy.
    store = open_store(stores["val"])
    samples = store.read(np.arange(len(store)))
    images = torch.stack([found.prepare(bytes(image)) for image in samples["image"]])
    with torch.no_grad():
        hits = model(images).argmax(1).numpy() == np.asarray(samples["label"])
    assert hits.mean() == pytest.approx(found.metrics["val_accuracy"])


def described(
    stores: Stores, folder: Path, **options: Any
) -> raypipe.streaming.saving.saved_model.SavedModel:
    plan = PlanConfig(epochs=1, micro_batch_size=8)
    spec = open_stream(
        stores["train"], stores["val"], plan=plan, pool=INLINE, **options
    )
    content = saved({"net": {"w": torch.ones(2)}})
    cursor = Cursor(0, 1, spec.plan.fingerprint)
    write_checkpoint(
        folder.as_uri(), cursor, content, {"loss": 2.0}, described=input_of(spec, None)
    )
    return raypipe.read_checkpoint(folder)


def test_an_own_loop_that_normalizes_gets_bytes(stores: Stores, tmp_path: Path) -> None:
    sizes = {0: 16, 3: 24}  # keys of JSON are text
    transform = TransformConfig(train="light", val="center", size=sizes)
    found = described(stores, tmp_path, transform=transform, val_transform="center")
    image = bytes(open_store(stores["train"]).read(np.array([0]))["image"][0])
    assert found.prepare(image).dtype is torch.uint8 and found.prepare(image).shape == (
        3,
        24,
        24,
    )
    assert found.metrics == {"loss": 2.0} and found.state["net"]["w"].tolist() == [1, 1]


def test_what_cannot_be_used_says_why(stores: Stores, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no raypipe checkpoint at .*empty"):
        raypipe.read_checkpoint(tmp_path / "empty")
    config = TransformConfig(size=16)
    found = described(stores, tmp_path / "a", transform=config)
    with pytest.raises(SampleError):
        found.prepare(b"no image")
    found = described(
        stores,
        tmp_path / "b",
        transform=config,
        train_transform=lambda image: image,
        val_transform=lambda image: image,
    )
    with pytest.raises(ConfigError, match="validation transform that is an object"):
        found.prepare(b"")
    (manifest,) = (tmp_path / "a").glob("*/checkpoint.json")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"input": {}}))
    with pytest.raises(ConfigError, match="does not describe its model's input"):
        raypipe.read_checkpoint(tmp_path / "a")
