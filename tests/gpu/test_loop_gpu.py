"""Runs of jobs/train.py on a GPU: as a user starts one, killed in its middle, and with more ranks than GPUs."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from local_head import RAY_ON_THIS_MACHINE
from recorded_runs import records
from signalled import kill_a_worker_at
from small_runs import small_run

from raypipe.commands.doctor import examined
from raypipe.config import AugmentConfig, RunConfig
from raypipe.errors import ResourceError, RunError
from raypipe.launch.run import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("cuda_or_pretended"),
    pytest.mark.cluster,
]
ROOT = Path(__file__).parents[2]


def run_of(stores: dict[str, Path], runs: Path, **settings: Any) -> RunConfig:
    settings = {
        "checkpoint_interval": 3,
        "optimizer": {"name": "adamw", "max_grad_norm": 1.0, "ema_decay": 0.9},
        **settings,
    }
    plain = small_run(runs, stores["train"], stores["val"], 3, 4, **settings)
    augment = AugmentConfig(preset="standard", mixup_alpha=0.2, cutmix_alpha=1.0)
    return dataclasses.replace(plain, augment=augment)


def losses(result: dict[str, Any]) -> list[float]:
    return [loss for (loss,) in records(result, "train", "loss")]


def test_the_doctor_finds_the_device() -> None:
    found = examined("torch")
    assert found["status"] == "ok" and torch.cuda.get_device_name() in found["found"]


def test_the_job_trains_on_the_gpu_without_being_asked_to(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    given = [
        "--plan.epochs=2",
        "--plan.micro_batch_size=6",
        "--plan.global_batch_size=24",
        "--transform.train=light",
    ]
    given += ["--transform.val=center", "--transform.size=32", "--train.model=resnet18"]
    given += [
        f"--store.train={stores['train']}",
        f"--store.val={stores['val']}",
        f"--storage_path={tmp_path}",
    ]
    given += [
        "--augment.preset=standard",
        "--train.log_interval=1",
        "--train.lr=0.001",
        "--pool.max_actors=2",
    ]
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RAY_ADDRESS")
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "jobs/train.py"), *given],
        capture_output=True,
        text=True,
        env={**ours, **RAY_ON_THIS_MACHINE},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["steps"] == 8 and "trainers   1 x GPU" in done.stdout
    assert all(loss < 10 for loss in losses(result))
    assert "of a GPU is" in records(result, "diagnosis", "text")[-1][0]


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_a_run_whose_trainer_is_killed_learns_what_an_unbroken_one_does(
    amp: Any, stores: dict[str, Path], tmp_path: Path
) -> None:
    run, killed = (
        run_of(stores, tmp_path, amp=amp, deterministic_reduce=True, max_failures=0),
        list[int](),
    )
    unbroken = launch(dataclasses.replace(run, name="unbroken"))
    killer = threading.Thread(
        target=kill_a_worker_at, args=(tmp_path / "killed", 7, killed), daemon=True
    )
    killer.start()
    with pytest.raises(RunError):
        launch(dataclasses.replace(run, name="killed"))
    killer.join()
    resumed = launch(dataclasses.replace(run, resume=str(tmp_path / "killed")))
    assert killed and [step for (step,) in records(resumed, "start", "step")][1] in (
        6,
        8,
        9,
    )
    assert losses(resumed) == pytest.approx(losses(unbroken), rel=0.02)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="has as many GPUs")
def test_more_trainers_than_gpus_are_refused_at_once_with_the_settings(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(
        ResourceError,
        match=r"2 trainers need 2 GPUs, but the cluster has 1: .*train\.use_gpu=false",
    ):
        run = run_of(stores, tmp_path)
        launch(
            dataclasses.replace(
                run, train=dataclasses.replace(run.train, num_workers=2)
            )
        )


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(
    ("optimizer", "amp"), [("sgd", "off"), ("adamw", "bf16"), ("sgd", "fp16")]
)
def test_a_process_for_each_of_two_gpus_learns_by_nccl_what_one_does(
    optimizer: Any, amp: Any, stores: dict[str, Path], tmp_path: Path
) -> None:
    run, found = run_of(stores, tmp_path, amp=amp, deterministic_reduce=True), []
    for num_workers in (1, 2):
        settings = dataclasses.replace(
            run.train, optimizer=optimizer, num_workers=num_workers
        )
        found.append(
            losses(
                launch(
                    dataclasses.replace(
                        run, train=settings, name=f"{num_workers}-workers"
                    )
                )
            )
        )
    assert len(found[0]) == len(found[1]) > 0 and found[1] == pytest.approx(
        found[0], rel=0.02
    )
