"""The script of docs/moving.md with raypipe's DataLoader, run as a user would run it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from documented import ROOT, blocks

(PLAIN,) = (
    code for code in blocks("python", ROOT / "docs" / "moving.md") if "sys.argv" in code
)


def write_store(path: Path, num: int) -> str:
    """Images of ten colors, which are their classes."""
    colors = np.random.default_rng(0).integers(0, 256, (10, 3), np.uint8)
    plain = [np.full((32, 32, 3), color, np.uint8) for color in colors]
    encoded = [cv2.imencode(".png", pixels)[1].tobytes() for pixels in plain]
    images = [{"bytes": encoded[i % 10], "path": f"{i}.png"} for i in range(num)]
    labels = [i % 10 for i in range(num)]
    pa.parquet.write_table(pa.table({"image": images, "label": labels}), path)
    return str(path)


def run_here(code: str, *arguments: object) -> None:
    """A script in this process, which has imported all that it needs."""
    before, sys.argv = sys.argv, ["script.py", *map(str, arguments)]
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(compile(code, "moving.md", "exec"), names)
    finally:
        sys.argv = before
        # A stream has the Dataset, whose methods have these names, among them that of the loader.
        names.clear()


@pytest.mark.cluster
@pytest.mark.pages
@pytest.mark.usefixtures("two_cpus")
def test_the_script_trains_with_one_name_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = "from raypipe import DataLoader\nfrom torch.utils.data import Dataset"
    theirs = "from torch.utils.data import DataLoader, Dataset"
    assert PLAIN.count(theirs) == 1
    images = [write_store(tmp_path / f"{num}.parquet", num) for num in (1100, 500)]
    run_here(PLAIN.replace(theirs, ours), *images, tmp_path / "ours.pt", 2)
    # a stream of an earlier test, freed only now, may print its last line behind it
    accuracy = capsys.readouterr().out.split("epoch 1: accuracy ")[1].split()[0]
    assert float(accuracy) > 0.3 and (tmp_path / "ours.pt").is_file()
