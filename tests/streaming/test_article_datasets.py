"""Datasets of articles, as they stand there, through `raypipe.DataLoader`: one digest for all ways to run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import article_datasets
import pytest
from article_datasets import EPOCHS, GLOBAL_BATCH
from pictures import samples

NUM = 24
PLAIN = [sys.executable]
TORCHRUN = [*PLAIN, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
# --multi_gpu is its word for several processes
ACCELERATE = [*PLAIN, "-m", "accelerate.commands.launch", "--multi_gpu"]
ACCELERATE += ["--num_processes=2", "--num_machines=1", "--main_process_port=0"]
ACCELERATE += ["--mixed_precision=no", "--dynamo_backend=no"]


def trained(
    folder: Path,
    out: Path,
    kind: str,
    workers: int,
    launcher: list[str] = PLAIN,
    dies_at: int = 0,
) -> list[list[str]]:
    """The samples that each of the processes has got, killed or not; it forgets them."""
    program = [article_datasets.__file__, kind, str(folder), str(out), str(workers)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("RAY_ADDRESS", None)
    code = subprocess.call([*launcher, *program, str(dies_at)], env=environment)
    assert bool(code) == bool(dies_at)
    files = [out / f"seen-{rank}" for rank in range(1 if launcher is PLAIN else 2)]
    lines = [file.read_text().splitlines() for file in files]
    for file in files:
        file.unlink()
    return lines


def together(halves: list[list[str]]) -> list[str]:
    """The samples of two ranks in the order of one."""
    size = GLOBAL_BATCH // 2
    return [
        line
        for first in range(0, len(halves[0]), size)
        for half in halves
        for line in half[first : first + size]
    ]


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("kind", "killed", "resumed", "workers"),
    [("custom", TORCHRUN, PLAIN, 0), ("optimized", PLAIN, ACCELERATE, 1)],
)
def test_an_articles_dataset_has_one_digest_through_kills(
    kind: str, killed: list[str], resumed: list[str], workers: int, tmp_path: Path
) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for number, sample in enumerate(samples(NUM)):
        path = folder / f"img{number:03d}_{number % 5}.jpg"
        path.write_bytes(sample["image"])  # type: ignore[arg-type]
    (whole,) = trained(folder, tmp_path, kind, workers=0)
    assert len(whole) == NUM * EPOCHS and len(set(whole)) == NUM * EPOCHS
    (tmp_path / "state").unlink()
    before = trained(folder, tmp_path, kind, workers=0, launcher=killed, dies_at=4)
    after = trained(folder, tmp_path, kind, workers, resumed)
    seen = [together(half) if len(half) == 2 else half[0] for half in (before, after)]
    assert seen[0] + seen[1] == whole
