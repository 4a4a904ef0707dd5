"""The contracts for scripts: commands as people type them, and the JSON on their last line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

ROOT = Path(__file__).parent.parent


def run(*command: str, code: int = 0, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"RAYPIPE_CACHE": str(cache)} if cache else {})}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=220, env=environment, check=False
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def last_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return json.loads(done.stdout.splitlines()[-1])


def test_train_without_a_store_learns_the_digits(tmp_path: Path) -> None:
    settings = [f"--runs={tmp_path}/runs", "--plan.epochs=4", "--name=digits"]
    result = last_line(run(f"{ROOT}/jobs/train.py", *settings, cache=tmp_path))
    assert result["val_accuracy"] > 0.9  # of the whole run: ≥ 0.97
    assert result["steps"] == 4 * 11 and result["run_dir"] == f"{tmp_path}/runs/digits"
    assert {"images_per_s", "wait_fraction"} <= result.keys()


def test_digest_prints_the_same_for_other_actors_and_workers_and_for_a_resume(stores: dict[str, Path]) -> None:
    command = ["-m", "raypipe.cli", "digest", str(stores["train"]), "--epochs", "2", "--micro-batch", "10"]
    command += ["--per-step", "2", "--seed", "3", "--size", "16"]
    one = last_line(run(*command, "--actors", "1"))
    assert one["samples"] == 200 and one["micro_batches"] == 20 and len(one["digest"]) == 32
    other = last_line(run(*command, "--actors", "3", "--workers", "2", "--from-step", "4"))
    assert other["digest"] == other["unbroken_tail_digest"] != one["digest"]
    assert other["unbroken_digest"] == one["digest"] and other["micro_batches"] == 12


def test_bench_prints_ceiling_stream_and_gaps(stores: dict[str, Path]) -> None:
    command = ["-m", "raypipe.cli", "bench", str(stores["train"]), "--transform", "light", "--size", "64"]
    done = run(*command, "--seconds", "2", "--micro-batch", "32", "--actors", "1")
    found = last_line(done)
    assert list(found) == [
        "ceiling_images_per_s",
        "stream_images_per_s",
        "ratio",
        "first_batch_s",
        "boundary_gap_ratio",
    ]
    assert all(value > 0 for value in found.values())
    assert "stream / ceiling" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digest", "/nowhere.lmdb"], "StoreError: /nowhere.lmdb does not exist"),
        (["digest", "STORE", "--workers", "2"], "ConfigError: 2 workers cannot share the 1 micro-batches"),
        (["digest", "STORE", "--micro-batch", "1000"], "ConfigError: .* has 100 samples, fewer than one step"),
    ],
)
def test_an_error_is_one_line_on_standard_error(
    arguments: list[str], message: str, stores: dict[str, Path]
) -> None:
    import re

    given = [str(stores["train"]) if a == "STORE" else a for a in arguments]
    done = run("-m", "raypipe.cli", *given, code=1)
    assert re.match(message, done.stderr.splitlines()[0]) and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_wrong_usage_ends_with_code_2() -> None:
    assert "nonsense" in run("-m", "raypipe.cli", "digest", "x.lmdb", "--nonsense", "1", code=2).stderr
