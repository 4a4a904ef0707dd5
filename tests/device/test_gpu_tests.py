"""What is kept for a machine with a GPU: its script, and benchmarks/results/gpu.md's list of what was not run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from raypipe.device.fused import PRESETS

ROOT = Path(__file__).parents[2]
SCRIPT = (ROOT / "tests" / "gpu" / "run").read_text()
STEPS = [
    shlex.split(line.partition("step ")[2])
    for line in SCRIPT.splitlines()
    if re.match(r"(SHOWN=\d+ )?step ", line)
]


def test_the_script_ends_within_40_minutes_and_what_it_runs_is_there() -> None:
    subprocess.run(["bash", "-n", str(ROOT / "tests" / "gpu" / "run")], check=True)
    assert [name for name, *_ in STEPS] == [
        "doctor",
        "tests",
        "cluster-tests",
        "first-run",
        "benchmark",
    ]
    assert sum(int(limit) for _, limit, *_ in STEPS) <= 40 * 60
    for _, _, *command in STEPS:
        for word in command:
            assert (
                "/" not in word or word.startswith("$logs") or (ROOT / word).exists()
            ), word


@pytest.mark.soak
@pytest.mark.cluster
def test_the_benchmark_runs_to_its_end_on_a_cpu() -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu.py"),
        "--device",
        "cpu",
        "--quick",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["device"].startswith("CPU (")
    parts = ("resident", "ring", "augmented", "stream", "stream_inline", "small_stream")
    assert all(found[f"{part}_images_per_s"] > 0 for part in parts)
    assert all(found[f"preset_{preset}_host_ms"] > 0 for preset in PRESETS)
    assert found["beside"] > 0 and found["beside_inline"] > 0
