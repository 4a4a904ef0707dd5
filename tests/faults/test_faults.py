"""The fault bench in short; `pytest --tier soak tests/faults` runs the long form and prints its table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import is_soak

BENCH = Path(__file__).parent / "bench.py"


@pytest.mark.cluster
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "kinds", ["reader,node,drained node", "frozen actor,frozen node", "frozen trainer"]
)
def test_whatever_dies_or_hangs_the_consumer_sees_the_same_stream(
    kinds: str, request: pytest.FixtureRequest
) -> None:
    soak, num = is_soak(request.config), kinds.count(",") + 1
    options = [
        "--kinds",
        kinds,
        "--scenarios",
        str(num),
        "--stores",
        "parquet",
        "--samples",
        "160",
    ]
    # each that comes late takes a core from those that are there
    options += [
        "--max-actors",
        "2",
    ]
    if soak:
        options = (
            ["--scenarios", "36"]
            if "reader" in kinds
            else ["--kinds", kinds, "--scenarios", str(5 * num)]
        )
    # A process of its own: a process can be connected to one cluster only.
    done = subprocess.run(
        [sys.executable, str(BENCH), *options],
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ok"] and found["equal"] == found["scenarios"] >= num
