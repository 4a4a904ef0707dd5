"""A user's own Tuner over TorchTrainers, whose trials differ in learning rate, model, global batch and workers."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle, tune
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.streaming.handover import loader
from raypipe.streaming.opening import open_stream

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [
    pytest.mark.soak,
    pytest.mark.cluster,
    pytest.mark.usefixtures("ray_cluster"),
]

COMPARED = 40
SHARES_S = 120.0


def train_fn(config: dict[str, Any]) -> dict[str, Any]:
    """Read until some micro-batches were remembered, or it takes too long."""
    spec = open_stream(
        config["store"],
        plan=PlanConfig(
            epochs=1000,
            micro_batch_size=8,
            global_batch_size=config["global_batch"],
            seed=5,
        ),
        transform=TransformConfig(train="light", size=24),
        pool=PoolConfig(
            max_actors=1,
            cpus_per_actor=0.5,
            max_in_flight=(0, 2),
            head_start=0,
        ),
    )
    one = loader(spec)
    sums = list[int]()
    end = time.monotonic() + SHARES_S
    for epoch in one.epochs():
        for batch in epoch.train:
            sums.append(int(batch.image.long().sum()) * config["rate"])
            time.sleep(0.02)
            others = len(list(Path(config["folder"]).glob("shares-*")))
            share = one.times("train").remembered_fraction
            if share and not others:
                Path(config["folder"], f"shares-{config['rate']}").touch()
            is_over = others or time.monotonic() > end
            if is_over and len(sums) >= COMPARED:
                one.close()
                # Ray Train drops what is reported without a checkpoint
                return {
                    "sums": [total // config["rate"] for total in sums[:COMPARED]],
                    "share": share,
                }
    raise AssertionError("the stream ended before the trials shared")


def test_trials_of_a_tuner_share_without_a_setting(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    def trial(config: dict[str, Any]) -> None:
        trainer = TorchTrainer(
            train_fn,
            train_loop_config=config,
            scaling_config=ScalingConfig(
                num_workers=1, resources_per_worker={"CPU": 0.1}
            ),
            run_config=RunConfig(
                storage_path=str(tmp_path), name=f"rate-{config['rate']}"
            ),
        )
        result = trainer.fit()
        assert result.return_value is not None
        tune.report(result.return_value)

    space = {
        "store": str(stores["train"]),
        "folder": str(tmp_path),
        "rate": tune.grid_search([1, 3]),
        "global_batch": tune.sample_from(lambda config: {1: 8, 3: 16}[config["rate"]]),
    }
    trainable = tune.with_resources(trial, {"CPU": 0.1})
    results = tune.Tuner(
        trainable,
        param_space=space,
        run_config=tune.RunConfig(storage_path=str(tmp_path), name="search"),
    ).fit()
    assert not results.errors
    found = [results[number].metrics or {} for number in range(2)]
    assert found[0]["sums"] == found[1]["sums"]
    assert sum(of_trial["share"] for of_trial in found) > 0
