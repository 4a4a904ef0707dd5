from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_a_store_of_ten_times_the_object_store_streams_without_spilling_whoever_is_slow() -> None:
    # A process and a cluster of its own, with an object store of 80 MiB.
    script = Path(__file__).parents[2] / "benchmarks" / "flow.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(*found, sep="\n")
    assert len(found) == 4 and found[0]["streamed_mib"] >= 10 * found[0]["store_mib"]
    for case in found:
        assert case["micro_batches"] == case["expected"]
        assert case["spilled_mib"] == 0
        # What lies above the micro-batches in flight was let go, and waits for Ray to free it, once a second.
        assert case["peak_mib"] <= case["store_mib"]
        assert case["grown_mib"] < 150
