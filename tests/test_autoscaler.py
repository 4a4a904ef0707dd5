"""The pool and the cluster of a real stream, on nodes that Ray's own autoscaler adds and removes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent / "autoscale_bench.py"


@pytest.mark.cluster
@pytest.mark.timeout(420)
def test_nodes_come_for_a_stream_that_starves_and_go_and_none_come_for_a_slow_trainer(tmp_path: Path) -> None:
    output = tmp_path / "timeline.json"
    command = [sys.executable, str(BENCH), "--starving-s=60", "--slow-s=20", f"--output={output}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(output.read_text())
    assert found["max_actors"] == 6  # of nodes that were not there yet
    assert all(found["reached"].values()), found["reached"]  # no nodes before, between and after the streams

    def most(what: str, phase: str) -> int:
        return max(seen[what] for seen in found["timeline"] if seen["phase"] == phase)

    assert most("nodes", "the trainer takes all") >= 2 and most("actors", "the trainer takes all") >= 3
    assert most("actors", "the trainer is slow") >= 3  # at first; and at last:
    at_last = [seen for seen in found["timeline"] if seen["phase"] == "the trainer is slow"][-1]
    assert at_last["actors"] == 1
    assert most("nodes", "slow from the start") == most("actors", "slow from the start") == 1
    texts = {name: [text for which, text in found["events"] if which == name] for name in ("fast", "slow")}
    assert any("the ranks waited for" in text and "of the actors were busy" in text for text in texts["fast"])
    assert any("→ 1 transform actors: the ranks waited for 0%" in text for text in texts["fast"])
    assert texts["slow"] == []
