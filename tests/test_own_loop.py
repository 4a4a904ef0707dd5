"""The README's lines as a newcomer's program, and functions of the pages; tests/test_docs.py runs the rest."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cv2
import numpy as np
import pytest
import torch
from documented import ROOT, blocks, defined
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import raypipe
from raypipe.plan.places import CURSOR_FILE, Cursor
from raypipe.stores import digits_stores, open_writer

# What a newcomer puts around the README's lines, and in place of some of them.
BEFORE = """
import sys

import albumentations as A
import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

train_pipeline = A.Compose([A.RandomCrop(32, 32), A.HorizontalFlip()])
val_pipeline = A.Compose([A.CenterCrop(32, 32)])
criterion = torch.nn.CrossEntropyLoss()


def normalize(image):
    return image.float() / 127.5 - 1


def cnn():
    torch.manual_seed(0)
    first, last = torch.nn.Conv2d(3, 8, 5, stride=4), torch.nn.Linear(8 * 7 * 7, 5)
    return torch.nn.Sequential(first, torch.nn.ReLU(), torch.nn.Flatten(), last)
"""
AFTER = """
        loader.report({"right": right / total, "total": total}, model=model, optimizer=optimizer)


if __name__ == "__main__":
    ray.init(num_cpus=2, object_store_memory=200 << 20)
    folder = sys.argv[1]
    scaling_config = ScalingConfig(num_workers=1)
    CHECK
    retries = FailureConfig(max_failures=3)
    run_config = RunConfig(name="a", storage_path=folder, failure_config=retries)
    trainer = TorchTrainer(train_fn, train_loop_config={}, scaling_config=scaling_config, run_config=run_config)
    result = trainer.fit()
    print(result.metrics, result.checkpoint.path)
"""
FILLED_IN = {
    "epochs=90, micro_batch_size=128, global_batch_size=1024": "epochs=3, micro_batch_size=16, "
    "global_batch_size=32",
    "    for epoch in loader.epochs():\n": """\
    model = prepare_model(cnn())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader.restore(model=model, optimizer=optimizer)
    for epoch in loader.epochs():
        right = total = 0
""",
    "            if batch.ends_step:\n                ...": """\
            (loss / loader.accumulation_steps).backward()
            if batch.ends_step:
                optimizer.step()
                optimizer.zero_grad()""",
    "epoch.val:\n            loss = criterion(model(normalize(batch.image)), batch.target)\n": """\
epoch.val:
            found = model(normalize(batch.image)).argmax(1) == batch.target
            right, total = right + float(found.float() @ batch.weight), total + float(batch.weight.sum())
""",
}


def newcomers_program(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the README's lines, completed, on 32-px images of five colors and a cluster of two CPUs of its own."""
    _, code = blocks("python", ROOT / "README.md")
    for there, instead in FILLED_IN.items():
        assert code.count(there) == 1, there
        code = code.replace(there, instead)
    # that is for the program that calls `fit`
    code, check = code.rstrip().rsplit("\n\n\n", 1)
    (folder / "program.py").write_text(
        f"{BEFORE}{code}\n{AFTER.replace('CHECK', check)}"
    )
    rng = np.random.default_rng(0)
    for name, num in (("train", 160), ("val", 50)):
        with open_writer(
            folder / f"{name}.lmdb", {"image": "binary", "label": "int64"}
        ) as writer:
            for number in range(num):
                pixels = rng.integers(0, 80, (32, 32, 3), np.uint8)
                pixels[..., number % 5 % 3] += np.uint8(60 + number % 5 // 3 * 100)
                writer.append(
                    {
                        "image": cv2.imencode(".png", pixels)[1].tobytes(),
                        "label": number % 5,
                    }
                )
    return subprocess.run(
        [sys.executable, "program.py", str(folder / "runs")],
        cwd=folder,
        env=os.environ | {"RAYPIPE_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=180,
    )


@pytest.mark.cluster
def test_readmes_fifteen_lines_train_validate_and_leave_a_checkpoint(
    tmp_path: Path,
) -> None:
    done = newcomers_program(tmp_path)
    assert not done.returncode, done.stdout + done.stderr
    words, _, checkpoint = done.stdout.strip().splitlines()[-1].rpartition(" ")
    metrics = ast.literal_eval(words)
    assert metrics["total"] == 50 and metrics["right"] > 0.8
    assert Cursor.from_json((Path(checkpoint) / CURSOR_FILE).read_text()).epoch == 3


@pytest.mark.usefixtures("one_process_group")
def test_the_hooks_of_ddp_compress_the_gradient_of_each_step() -> None:
    """The page's hooks: in bf16, and by matrices of a low rank from a step on."""
    names = defined("training-loop.md", "compress_gradients")

    def gradients(**options: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(64, 32, bias=False)
        parallel = DistributedDataParallel(layer)
        if options:
            names["compress_gradients"](parallel, **options)
        found = []
        for _ in range(5):
            parallel.zero_grad()
            parallel(torch.randn(16, 64)).square().mean().backward()
            assert layer.weight.grad is not None
            found.append(layer.weight.grad.clone())
        return found

    plain = gradients()
    in_bf16 = gradients(rank=0)
    torch.testing.assert_close(in_bf16, plain, rtol=2**-6, atol=1e-4)
    assert not torch.equal(in_bf16[0], plain[0])
    low_rank = gradients(rank=2, after_steps=3)
    assert torch.allclose(low_rank[0], plain[0])
    assert torch.linalg.matrix_rank(low_rank[4], rtol=1e-4) == 2


def test_attacked_images_are_near_and_have_a_larger_loss() -> None:
    """The page's attack: a step of the pixels along the gradient, under the same augmentation."""
    names = defined("training-loop.md", "attacked")
    spec = raypipe.open_stream(
        *digits_stores(),
        plan=raypipe.PlanConfig(micro_batch_size=32),
        transform=raypipe.TransformConfig(train="resize", val="resize", size=8),
        pool=raypipe.PoolConfig(engine="inline"),
    )
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 10))
    for epoch in raypipe.loader(spec, augment=names["differentiable"]).epochs():
        batch = next(iter(epoch.train))
        image = names["attacked"](model, batch, 0.1)
        moved = (image - batch.image.detach()).abs().max().item()
        assert 0 < moved <= 0.1 / 0.5 + 1e-5, "in the normalized image"
        before, after = (
            nn.functional.cross_entropy(model(each), batch.target)
            for each in (batch.image, image)
        )
        assert after > before
        break


def test_metrics_reach_the_functions_of_the_page() -> None:
    """Of rank 0 alone; and Hydra's settings make a stream."""
    logged: list[tuple[dict[str, Any], int]] = []
    log = SimpleNamespace(log=lambda metrics, step: logged.append((metrics, step)))
    modules = {
        "wandb": SimpleNamespace(run=None, init=lambda **_: log),
        "omegaconf": SimpleNamespace(
            OmegaConf=SimpleNamespace(to_container=lambda config, resolve: config)
        ),
    }
    train, val = digits_stores()
    with mock.patch.dict(sys.modules, modules):
        names = defined("training-loop.md", "log_to_wandb", "stream_of")
        for rank in range(2):
            at = SimpleNamespace(rank=rank, global_step=8)
            names["log_to_wandb"](at, {"accuracy": 0.5})
        spec = names["stream_of"]({"train": train, "val": val, "plan": {"epochs": 3}})
    assert logged == [({"accuracy": 0.5}, 8)]
    assert spec.plan.num_val == 360 and spec.plan.config.epochs == 3
