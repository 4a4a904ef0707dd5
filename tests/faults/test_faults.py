"""The fault bench in short; `pytest --tier soak tests/faults` runs the long form and prints its table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import is_soak

BENCH = Path(__file__).parent / "bench.py"


KINDS = "reader,node,drained node,frozen actor,frozen node,frozen trainer"


@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_whatever_dies_or_hangs_the_consumer_sees_the_same_stream(
    request: pytest.FixtureRequest,
) -> None:
    num = 6
    # an actor that comes late takes a core from those that are there
    options = ["--kinds", KINDS, "--stores", "parquet", "--samples", "160"]
    options += ["--max-actors", "2"]
    if is_soak(request.config):
        num = 36
        options = []
    options += ["--scenarios", str(num)]
    # A process of its own: a process can be connected to one cluster only. A scenario that hangs ends it.
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
