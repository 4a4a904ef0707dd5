"""Streams that remember, on a cluster whose object store is small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import is_soak

SUPPORT = Path(__file__).parents[2] / "support"


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_streams_that_remember_stay_below_all_limits(
    stores: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    seconds = 600 if is_soak(request.config) else 20
    command = [sys.executable, str(SUPPORT / "remembering_streams.py")]
    command += [str(stores["train"]), str(stores["val"]), str(seconds)]
    environment = {**os.environ, "RAYPIPE_CACHE": str(tmp_path)}
    environment["PYTHONPATH"] = str(SUPPORT)
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    print(json.dumps(found, indent=1))
    assert found["most_used"] <= found["store_bytes"] and not found["spilled"]
    assert 0 < found["most_remembered"] <= found["room_bytes"]
    assert 0 < found["most_on_disk"] <= found["disk_bytes"]
    assert not found["memory_is_left"]
    for name, stream in found["streams"].items():
        assert stream["is_equal"] and not stream["error"], found
        assert stream["remembered"] or name.startswith("disk"), found
