"""The two scripts of docs/moving.md, plain and ported, run as a user would run them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from documented import ROOT, blocks
from watched import lines, planned

import raypipe

PLAIN, PORTED = (
    code for code in blocks("python", ROOT / "docs" / "moving.md") if "sys.argv" in code
)
EPOCHS, DIES_AT, SEED = 3, 14, 0  # it dies in the second epoch, of 8 steps each


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


def plain_accuracy(
    images: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> float:
    """That of the plain script, whose last epoch is one of a second start."""
    workers = '"num_workers": 2, "persistent_workers": True'
    assert workers in PLAIN
    for num, expected in (
        (EPOCHS - 1, list(range(EPOCHS - 1))),
        (EPOCHS, [EPOCHS - 1]),
    ):
        run_here(
            PLAIN.replace(workers, '"num_workers": 0'),
            *images,
            folder / "plain.pt",
            num,
        )
        found = re.findall(r"epoch (\d+): accuracy ([\d.]+)", capsys.readouterr().out)
        assert [int(epoch) for epoch, _ in found] == expected
    return float(found[-1][1])


def counted(code: str) -> int:
    """Lines that are neither empty nor comments."""
    return sum(
        bool(line.strip()) and not line.strip().startswith("#")
        for line in code.splitlines()
    )


def data(code: str) -> str:
    return code[code.index("# Data") : code.index("# Model")]


def test_the_ported_script_is_shorter_as_the_page_says() -> None:
    page = (ROOT / "docs" / "moving.md").read_text()
    assert f"{counted(PORTED)} lines against {counted(PLAIN)}," in page
    assert (
        f"{counted(data(PORTED))} against {counted(data(PLAIN))} under `# Data`" in page
    )
    assert counted(PORTED) < counted(PLAIN) and counted(data(PORTED)) < counted(
        data(PLAIN)
    )


@pytest.mark.cluster
@pytest.mark.soak  # 100 s; tests/streaming/saving/test_checkpoints.py and tests/test_docs.py have its parts
@pytest.mark.usefixtures("two_cpus")
def test_the_ported_script_goes_on_after_sigkill_on_two_workers(
    images: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import ray

    expected = plain_accuracy(images, tmp_path, capsys)
    watched = f"watched.loader({str(tmp_path)!r}, {DIES_AT}, DRIVER, "
    code = "import os\nimport watched\nDRIVER = os.getpid()\n" + PORTED.replace(
        "raypipe.loader(", watched
    )
    assert "global_step % 100" in code
    code = code.replace("global_step % 100", "global_step % 3")
    arguments = [*images, str(tmp_path / "runs"), str(EPOCHS)]

    (tmp_path / "ported.py").write_text(code)
    environment = {
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    killed = subprocess.run(
        [sys.executable, str(tmp_path / "ported.py"), *arguments, "1"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    plan = raypipe.PlanConfig(epochs=EPOCHS, micro_batch_size=64, global_batch_size=128)
    plan = raypipe.open_stream(*images, plan=plan).plan
    before = lines(tmp_path, "seen-0")
    assert before == planned(plan, 0, 1)[: len(before)] and before[-1][:4] == [
        "train",
        1,
        5,
        1,
    ]
    assert plan.steps_per_epoch == 8 and [
        step for step, _ in lines(tmp_path, "reported")
    ] == [3, 6, 8, 9, 12]

    run_here(code, *arguments, 2)
    after = [lines(tmp_path, f"seen-{rank}") for rank in range(2)]
    _, epoch, step, *_ = after[0][0]
    began_at = 8 * epoch + step
    # where Ray Train has not seen the last checkpoint, it was not made
    assert began_at in (
        9,
        12,
    )
    for rank in range(2):
        assert after[rank] == planned(plan, rank, 2, began_at)
    step, metrics = lines(tmp_path, "reported")[-1]
    assert step == 8 * EPOCHS
    assert metrics["accuracy"] > 0.6 and abs(metrics["accuracy"] - expected) < 0.15
