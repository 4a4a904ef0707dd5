"""Streams that share their micro-batches, on nodes of a cluster of its own, while all that can die is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "killed_trials.py"


@pytest.mark.soak
@pytest.mark.cluster
def test_streams_share_and_are_equal_after_each_kill(stores: dict[str, Path]) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(stores["train"])],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    remembered = json.loads(done.stdout.splitlines()[-1])
    kills = ["a trial", "MapWorker", "ClusterLedger", "Keeper", "node"]
    assert list(remembered) == ["nothing", *kills]
    assert all(num >= 8 for num in remembered.values())
