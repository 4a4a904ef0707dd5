"""The script of docs/moving.md with raypipe's DataLoader, run as a user would run it."""

from __future__ import annotations

import sys
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from documented import ROOT, blocks

(PLAIN,) = (
    code for code in blocks("python", ROOT / "docs" / "moving.md") if "sys.argv" in code
)
SEED = 0


def write_store(path: Path, num: int, first: int = 0) -> None:
    """Of ten classes, each with a pattern of its own, which noise makes hard to tell at times."""
    patterns = np.random.default_rng(SEED).uniform(60, 200, (10, 4, 4, 3))
    images = []
    for index in range(first, first + num):
        noise = np.random.default_rng([SEED, index]).normal(0, 40, (4, 4, 3))
        pixels = np.clip(
            cv2.resize(patterns[index % 10] + noise, (32, 32)), 0, 255
        ).astype(np.uint8)
        images.append(
            {"bytes": cv2.imencode(".png", pixels)[1].tobytes(), "path": f"{index}.png"}
        )
    labels = pa.array([index % 10 for index in range(first, first + num)], pa.int64())
    pa.parquet.write_table(
        pa.table({"image": images, "label": labels}), path, row_group_size=200
    )


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The paths of a training and of a validation store."""
    folder = tmp_path_factory.mktemp("images")
    write_store(folder / "train.parquet", 1100)
    write_store(folder / "test.parquet", 500, first=10_000)
    return [str(folder / "train.parquet"), str(folder / "test.parquet")]


def run_here(code: str, *arguments: object) -> None:
    """A script in this process, which has imported all that it needs."""
    before, sys.argv = sys.argv, ["script.py", *map(str, arguments)]
    try:
        exec(compile(code, "moving.md", "exec"), {"__name__": "__main__"})
    finally:
        sys.argv = before


@pytest.mark.cluster
@pytest.mark.pages
@pytest.mark.usefixtures("two_cpus")
def test_the_script_trains_with_one_name_changed(
    images: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = "from raypipe import DataLoader\nfrom torch.utils.data import Dataset"
    theirs = "from torch.utils.data import DataLoader, Dataset"
    assert PLAIN.count(theirs) == 1
    run_here(PLAIN.replace(theirs, ours), *images, tmp_path / "ours.pt", 2)
    accuracy = float(capsys.readouterr().out.split()[-1])
    assert accuracy > 0.3 and (tmp_path / "ours.pt").is_file()
