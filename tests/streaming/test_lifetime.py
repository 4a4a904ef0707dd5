"""Streams that are left, on a cluster; tests/streaming/test_loader.py has what needs none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import is_soak

SUPPORT = Path(__file__).parents[1] / "support"
PROGRAM = SUPPORT / "left_streams.py"
NUM_WAYS = 2 * 6  # each without a head start, and with one


@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_streams_leave_nothing_of_theirs_however_they_are_left(
    stores: dict[str, Path], request: pytest.FixtureRequest
) -> None:
    num = 5 * NUM_WAYS if is_soak(request.config) else NUM_WAYS
    command = [sys.executable, str(PROGRAM), str(stores["train"]), str(num)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    *each, last = [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")
    ]
    assert len(each) == num and [one for one in each if one["more"]] == []
    assert last["more"] == {}, last


@pytest.mark.cluster
def test_a_stream_goes_on_after_the_end_of_ray_and_an_interrupted_start(
    stores: dict[str, Path],
) -> None:
    command = [sys.executable, str(SUPPORT / "shut_down.py"), str(stores["train"])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # A slow machine has lines of the waits, too.
    printed = [
        line for line in done.stdout.splitlines() if not line.startswith("waiting for ")
    ]
    why, places, thread = printed
    assert why.startswith("the stream has ended, since Ray was shut down: ")
    assert places == "train-e0000-s000000-m000 train-e0000-s000001-m000"
    assert thread == "it ended"
    assert "Traceback" not in done.stderr and "Exception raised" not in done.stderr
