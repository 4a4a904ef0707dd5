from __future__ import annotations

import dataclasses
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import ray.train
import torch
import without_ray
from patience import until
from ray.train.v2._internal.execution import train_fn_utils
from recorded_runs import records
from signalled import kill_a_worker_at
from small_runs import small_run

from raypipe.commands.audit import audit
from raypipe.config import (
    AugmentConfig,
    PoolConfig,
    RunConfig,
)
from raypipe.errors import ResourceError, RunError
from raypipe.launch.run import launch
from raypipe.metrics.records import SAMPLES, read_records
from raypipe.streaming import supervisor
from raypipe.streaming.opening import spec_of
from raypipe.streaming.spec import StreamSpec
from raypipe.train.loop import Trainer

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("ray_cluster"),
]


@pytest.fixture(scope="module")
def run(stores: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    train_config = {
        "log": ["samples", "digest"],
        "checkpoint_interval": 3,
        "optimizer": {"name": "adamw", "max_grad_norm": 1.0, "ema_decay": 0.9},
    }
    plain = small_run(
        tmp_path_factory.mktemp("runs"),
        stores["train"],
        stores["val"],
        3,
        4,
        **train_config,
    )
    augment = AugmentConfig(
        preset="standard", mixup_alpha=0.2, cutmix_alpha=1.0, strength=(0.3, 1, 0.3)
    )
    return dataclasses.replace(plain, augment=augment)


@pytest.fixture(scope="module")
def alone(run: RunConfig) -> dict[str, Any]:
    """What a run of one worker comes to that nothing happens to."""
    return without_ray.train(dataclasses.replace(run, name="alone"))


def sample_log(result: dict[str, Any]) -> list[dict[str, Any]]:
    found = read_records(Path(result["run_dir"]).as_uri(), SAMPLES)
    return [record for record in found if "indices" in record]


def final_state(result: dict[str, Any]) -> dict[str, Any]:
    last = sorted(Path(result["run_dir"]).glob("checkpoint_*/"))[-1]
    state = torch.load(last / "state.pt", weights_only=True)
    return state["model"] | {
        f"ema.{name}": value for name, value in state["ema"].items()
    }


def assert_leaves_what_it_should(result: dict[str, Any]) -> None:
    """Its result, metrics and configuration."""
    assert result["steps"] == 12 and result["first_batch_s"] > 0
    assert 0 <= result["val_accuracy"] <= 1 and 0 <= result["wait_fraction"] <= 1
    folder = Path(result["run_dir"])
    trained = records(result, "train", "step", "strength")
    assert [step for step, _ in trained] == list(range(1, 13))
    strengths = [strength for _, strength in trained[:5]]
    assert strengths == pytest.approx([0, 0.278, 0.556, 0.833, 1], abs=1e-3)
    assert records(result, "val", "step", "samples") == [(4, 22), (8, 22), (12, 22)]
    assert len(records(result, "diagnosis", "text")) == 3
    assert "micro_batch_size: 6" in (folder / "config.yaml").read_text()
    assert len(sample_log(result)) == 12 * 4
    assert not (folder / "lease").exists() and not (folder / "stop").exists()


@pytest.mark.system
def test_a_killed_and_damaged_run_goes_on_to_the_same_weights(
    run: RunConfig, alone: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    name = "killed"
    folder, killed, actors = Path(run.storage_path) / name, list[int](), list[int]()

    def attempt(workers: int, resume: str = "") -> dict[str, Any]:
        settings = dataclasses.replace(
            run.train,
            num_workers=workers,
            cpus_per_worker=1 / workers,
            max_failures=0,
        )
        # Few micro-batches are made ahead, so that an actor that dies has work left.
        pool = PoolConfig(max_actors=workers, max_in_flight=(8, 1), head_start=0)
        return launch(
            dataclasses.replace(
                run, name=name, train=settings, pool=pool, resume=resume
            )
        )

    # An actor and a trainer are killed; then the newest checkpoint is damaged, and the records.
    actor = "MapWorker(MapBatches(Transform"
    for arguments in ((folder, 2, actors, actor), (folder, 7, killed)):
        threading.Thread(target=kill_a_worker_at, args=arguments, daemon=True).start()
    with pytest.raises(RunError, match=r"traceback: .*error\.txt"):
        attempt(1)
    newest = max(folder.glob("checkpoint_*/checkpoint.json")).parent
    # which the first rank finds
    (newest / "state.pt").write_bytes((newest / "state.pt").read_bytes()[:-1] + b"x")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'not of this run\n{"kind": "train", "st')
    result = attempt(2, str(folder))
    assert (
        f"not resumed from {newest.name}: the content of its state.pt has"
        in capsys.readouterr().out
    )
    assert len(killed) == len(actors) == 1
    assert records(result, "start", "workers") == [(1,), (2,)]
    assert sample_log(result) == sample_log(alone)
    losses, expected = (
        [loss for (loss,) in records(each, "train", "loss")] for each in (result, alone)
    )
    assert losses == pytest.approx(expected, rel=1e-6)
    for key, value in final_state(alone).items():
        assert torch.equal(value, final_state(result)[key]), key
    assert_leaves_what_it_should(result)
    audited = audit(result["run_dir"], all=True)
    assert audited["ok"] and audited["compared"] == 3 * (4 * 4 + 4), audited
    assert audited["root"] == audit(alone["run_dir"], samples=0)["root"]


@pytest.mark.system
def test_a_fault_before_the_first_micro_batch_is_recorded(
    run: RunConfig, tmp_path: Path
) -> None:
    def dies(image: Any) -> Any:
        os._exit(1)

    def trains(spec: StreamSpec) -> None:
        supervisor.MAX_ATTEMPTS = 1
        train_fn_utils._train_fn_utils = train_fn_utils.LocalTrainFnUtils("alone")
        list(Trainer(run, spec, 5, 1, tmp_path.as_uri(), device="cpu").epochs())

    spec = spec_of(run, tmp_path.as_uri())
    spec = dataclasses.replace(spec, transforms={**spec.transforms, "train": dies})
    # In a process of its own: with it goes the actor that Ray is about to start again.
    too_many = (
        r"1 transform actors have died in train-e0000-s.*lower plan\.micro_batch_size"
    )
    with pytest.raises(ResourceError, match=too_many):
        ray.get(ray.remote(num_cpus=0, max_calls=1)(trains).remote(spec))
    file = tmp_path / "metrics.jsonl"
    # that process writes its last events as it ends, behind its error
    until(lambda: '"fault"' in file.read_text())
    recorded = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["kind"] for record in recorded[:2]] == ["start", "fault"]
    # An actor that dies at once may take its report of what it had begun with it: then the next one's is there.
    faults = [record["text"] for record in recorded if record["kind"] == "fault"]
    assert any(
        "a transform actor died in train-e0000-s" in fault for fault in faults
    ), faults
