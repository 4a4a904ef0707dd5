"""The pool and the cluster of a real stream, on nodes that Ray's own autoscaler adds and removes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raypipe.rayext import autoscaler
from raypipe.rayext.admission import Amounts
from raypipe.rayext.autoscaler import PoolAutoscaler
from raypipe.rayext.pool_size import Decision

BENCH = Path(__file__).parents[1] / "autoscale_bench.py"


@pytest.mark.cluster
@pytest.mark.timeout(420)
def test_nodes_come_for_a_stream_that_starves_and_go_and_none_come_for_a_slow_trainer(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    soak = request.config.getoption("--soak")  # without: that a slow trainer gets no more, test_pool_size.py shows
    output = tmp_path / "timeline.json"
    command = [sys.executable, str(BENCH), "--starving-s=60", "--slow-s=20", f"--output={output}"]
    command += [] if soak else ["--streams=fast"]
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
    texts = {name: [text for which, text in found["events"] if which == name] for name in ("fast", "slow")}
    assert any("the ranks waited for" in text and "of the actors were busy" in text for text in texts["fast"])
    assert any("→ 1 transform actors: the ranks waited for 0%" in text for text in texts["fast"])
    if soak:
        assert most("nodes", "slow from the start") == most("actors", "slow from the start") == 1
        assert not [
            text for text in texts["slow"] if "→" in text
        ]  # beside: its first actor had to wait for a node


def test_a_pool_does_not_grow_into_what_another_run_has_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    claims, said = Amounts(CPU=2), list[str]()
    monkeypatch.setattr(autoscaler, "claimed_by_others", lambda: claims)
    scaler: Any = object.__new__(PoolAutoscaler)  # its sizes are Ray Data's to know: this is about the decision
    scaler._looked_at = scaler._pending_since = float("-inf")
    scaler._told, scaler._target, scaler._waiting = False, None, lambda: 1.0
    scaler._sizer = SimpleNamespace(observe=lambda *_, **__: Decision(4, "the ranks waited"))
    scaler._supervisor = SimpleNamespace(scaled=SimpleNamespace(remote=said.append))
    pool = SimpleNamespace(
        current_size=lambda: 2,
        min_size=lambda: 1,
        num_pending_actors=lambda: 0,
        num_running_actors=lambda: 2,
        num_active_actors=lambda: 2,
    )
    op = SimpleNamespace(
        has_completed=lambda: False, _inputs_complete=False, metrics=SimpleNamespace(num_task_outputs_generated=9)
    )

    def asked_for() -> int:
        scaler._looked_at = float("-inf")
        return scaler._derive_target_scaling_config(pool, op, None).delta

    assert asked_for() == 0 and not said
    claims.clear()
    assert asked_for() == 2 and said == ["2 → 4 transform actors: the ranks waited"]
