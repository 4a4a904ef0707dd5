"""`raypipe status`, of runs that go on, stand still, and have ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raypipe.commands.cli import main
from raypipe.commands.status import told
from raypipe.config import PoolConfig
from raypipe.storage.filesystem import open_filesystem
from raypipe.streaming.chronicle import Chronicle

WROTE: dict[str, Any] = {
    **{"time": 100.0, "every_s": 5.0, "host": "a", "pid": 7, "workers": 2, "step": 40, "step_at": 60.0},
    **{"to_step": 90, "waits_for": "the checkpoint", "whom": "storage", "since": 70.0},
}


def test_who_waits_for_what_and_for_how_long() -> None:
    found = told(WROTE, 103.0)
    assert found["state"] == "runs" and found["age_s"] == 3 and found["step_age_s"] == 43
    assert (found["waits_for"], found["whom"], found["since_s"]) == ("the checkpoint", "storage", 33)


def test_a_run_that_says_nothing_is_silent_and_one_that_has_left_its_loop_has_ended() -> None:
    assert told(WROTE, 119.0)["state"] == "runs" and told(WROTE, 121.0)["state"] == "silent"
    assert told(WROTE | {"every_s": 0}, 1e6)["state"] == "ended"


def test_the_command_reads_what_a_chronicle_and_the_record_have_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chronicle = Chronicle(PoolConfig(), 2, 0, open_filesystem(tmp_path.as_uri()))
    chronicle.begin(False, lambda: {"to_step": 90}, None)
    chronicle.step = 40
    chronicle.record("train", images_per_s=10.0, epoch=1)
    chronicle.record("fault", text="a transform actor died")
    with chronicle.waiting("the checkpoint", lambda: "the one before is being written"):
        chronicle._write_status(5.0)
        main(["status", str(tmp_path)])
    *shown, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert found["state"] == "runs" and found["step"] == 40 and found["to_step"] == 90 and found["epoch"] == 1
    assert found["waits_for"] == "the checkpoint" and found["whom"] == "the one before is being written"
    assert found["faults"] == ["a transform actor died"] and found["checkpoint"] is None
    assert any("the checkpoint, for 0 s" in line for line in shown) and any("40 of 90" in line for line in shown)
    chronicle.close()
    main(["status", str(tmp_path)])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["state"] == "ended"


def test_a_run_that_has_not_begun_to_train_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("# A run of raypipe: its settings.\n")
    with pytest.raises(SystemExit):
        main(["status", str(tmp_path)])
    assert "has no status.json: it has not begun to train" in capsys.readouterr().err
