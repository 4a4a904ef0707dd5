"""The command `trace`, and the folders that stand for settings; faults are in tests/faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_runs import small_run

from raypipe.commands.trace import check_has_settings, trace
from raypipe.config import RunConfig
from raypipe.errors import ConfigError
from raypipe.launch.run_folder import CONFIG_HEAD
from raypipe.metrics.chrome_trace import Chunk, to_json


def test_a_run_that_was_traced_has_its_trace_copied(tmp_path: Path) -> None:
    event = {"name": "compute", "ph": "X", "ts": 0.0, "dur": 2e6, "tid": "main"}
    args = {"micro_batches": ["train-e0000"]}
    text = to_json([Chunk("trainer 0", json.dumps([event | {"args": args}]))], {})
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(CONFIG_HEAD)
    (run / "trace.json").write_text(text)
    output = tmp_path / "copy.json"
    found = trace(RunConfig(), str(run), output=str(output))
    assert output.read_text() == text
    assert found["processes"] == 1 and found["events"] == len(
        json.loads(text)["traceEvents"]
    )


def test_an_own_loop_is_told_how_to_trace_itself(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"own loop.*raypipe\.loader\(spec, trace="):
        trace(RunConfig(), str(run), output=str(tmp_path / "t.json"))
    (run / "config.yaml").write_text(CONFIG_HEAD)
    check_has_settings(str(run))
    check_has_settings("")
    check_has_settings(str(tmp_path / "train.lmdb"))


def test_a_place_that_cannot_be_written_is_an_error_before_the_run(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="existing, writable folder"):
        trace(RunConfig(), output=str(tmp_path / "none" / "t.json"))


@pytest.mark.system
def test_a_traced_run_stops_with_its_trace_and_leaves_nothing(
    ray_cluster: None, stores: dict[str, Path], tmp_path: Path
) -> None:
    run = small_run(tmp_path / "runs", stores["train"], stores["val"], 1000, 2)
    output = tmp_path / "t.json"
    found = trace(run, output=str(output), seconds=0.5)
    events = json.loads(output.read_text())["traceEvents"]
    assert found["processes"] >= 1 and len(events) == found["events"]
    assert list((tmp_path / "runs").iterdir()) == []
