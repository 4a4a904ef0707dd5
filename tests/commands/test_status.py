"""`raypipe status`, of runs that go on, stand still, and have ended."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from raypipe.commands.cli import main
from raypipe.commands.status import print_status, standing, status
from raypipe.errors import ConfigError
from raypipe.launch.run_folder import write_error
from raypipe.storage.filesystem import open_filesystem
from raypipe.storage.lease import lease
from raypipe.streaming.run_log import RunLog

WROTE: dict[str, Any] = {
    "time": 100.0,
    "every_s": 5.0,
    "host": "a",
    "pid": 7,
    "workers": 2,
    "step": 40,
    "step_at": 60.0,
    "begun": 50.0,
    "to_step": 90,
    "waits_for": "the checkpoint",
    "whom": "storage",
    "since": 70.0,
}


LEFT = {"every_s": 0}
DONE = {"every_s": 0, "step": 90}
ERROR = {"error": "no space"}


@pytest.mark.parametrize(
    ("wrote", "now", "is_held", "known", "state"),
    [
        ({}, 119.0, True, {}, "running"),
        ({}, 121.0, True, {}, "silent"),
        ({}, 101.0, True, {"died_at": 51.0}, "restarting"),
        ({}, 101.0, True, {"died_at": 49.0}, "running"),
        (LEFT, 1e6, True, {}, "restarting"),
        (LEFT, 1e6, False, {}, "stopped"),
        (DONE, 1e6, False, {}, "ended"),
        (LEFT, 1e6, False, ERROR, "failed"),
        (DONE, 1e6, False, ERROR, "failed"),
        ({}, 1e6, False, ERROR, "failed"),  # its rank 0 was killed
        ({}, 101.0, True, ERROR, "running"),  # it is being ended
    ],
)
def test_a_run_goes_on_is_silent_restarting_or_at_its_end(
    wrote: dict[str, Any], now: float, is_held: bool, known: Any, state: str
) -> None:
    known = {"died_at": 0.0, **known}
    assert standing(WROTE | wrote, now, is_held, **known)["state"] == state


def shown(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    """What the command prints for people, and for programs."""
    main(["status", str(run)])
    found = json.loads(capsys.readouterr().out)
    print_status(found)
    return capsys.readouterr().out, found


def test_the_command_tells_as_text_and_json_what_a_run_has_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_log = RunLog(2, 0, open_filesystem(tmp_path.as_uri()))
    cause = "the previous one is being written"
    shares = ("remembered", "val_remembered")
    expected: dict[str, Any] = {
        "state": "running",
        "step": 40,
        "to_step": 90,
        "epoch": 1,
        "images_per_s": 10.0,
        "gpu_utilization": 0.5,
        "remembered": 0.734,
        "val_remembered": 0.9,
        "waits_for": "the checkpoint",
        "whom": cause,
        "faults": ["a transform actor died"],
        "checkpoint": None,
        "start_s": {"starting Ray on this machine": 1.5, "starting 1 trainer": 2.25},
    }
    shown_in_text = (
        "after 3.8 s (starting Ray on this machine 1.5, starting",
        "GPU 50%, 73% remembered, 90% in validation",
        "40 of 90",
    )
    with lease(tmp_path.as_uri()):
        run_log.begin(False, lambda: {"settings": {"to_step": 90}}, None)
        run_log.step = 40
        trained = ("epoch", "images_per_s", "gpu_utilization", *shares)
        run_log.recorded("train", "", {name: expected[name] for name in trained})
        run_log.recorded("fault", "", {"text": "a transform actor died"})
        run_log.recorded("phases", "", {"begun": 1.0, "seconds": expected["start_s"]})
        run_log.saving(lambda: cause)
        run_log._look(time.time())
        text, found = shown(tmp_path, capsys)
        run_log.saved()
        assert {name: found[name] for name in expected} == expected
        assert "process" in found["held_by"]
        assert all(part in text for part in shown_in_text)
        assert re.search(f"the checkpoint for [0-9]+ s: {cause}", text)
        run_log.closed()
        assert shown(tmp_path, capsys)[1]["state"] == "restarting"
    found = shown(tmp_path, capsys)[1]
    assert (found["state"], found["held_by"], found["waits_for"]) == ("stopped", "", "")
    write_error(tmp_path.as_uri(), "no space left\n\nTraceback")
    text, found = shown(tmp_path, capsys)
    assert found["state"] == "failed" and found["error"] == "no space left"
    assert "no space left" in text and "Traceback" not in text


def test_a_run_that_has_not_begun_to_train_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("# A run of raypipe: its settings.\n")

    def error_of(run: Path) -> str:
        with pytest.raises(SystemExit):
            main(["status", str(run)])
        return capsys.readouterr().err

    not_begun = "has no status.json: the run has not begun to train"
    assert not_begun in error_of(tmp_path)
    write_error(tmp_path.as_uri(), "no GPU")
    failed = "the run has failed before it began to train: no GPU"
    assert failed in error_of(tmp_path)
    no_folder = "config.yaml cannot be used: [Errno 20] Not a directory"
    assert no_folder in error_of(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    "content", [[], {}, 5, None, {"step": "x"}, WROTE | {"step": "x"}]
)
def test_a_damaged_status_is_one_error(content: Any, tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"status\.json or metrics\.jsonl is damaged"):
        status(str(tmp_path))
