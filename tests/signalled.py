"""Runs of jobs/train.py with a Ray of their own, and what becomes of them at a signal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

JOB = Path(__file__).parent.parent / "jobs" / "train.py"


def started(
    settings: list[str], ray_folder: str, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """A run in a process group of its own; `ray_folder` is where it finds no other cluster."""
    ours = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.Popen(
        [sys.executable, str(JOB), *settings],
        stdout=subprocess.PIPE,
        text=True,
        env={**ours, "RAY_TMPDIR": ray_folder, **(environment or {})},
        start_new_session=True,
        bufsize=1,
    )


def ended_by(signum: int, run: subprocess.Popen[str], to_group: bool) -> str:
    """What a run says after a signal that it gets at its first step."""
    assert run.stdout
    assert any("step 1/" in line for line in run.stdout)  # and its log ends only with the run
    (os.killpg if to_group else os.kill)(run.pid, signum)
    said, _ = run.communicate(timeout=100)
    assert run.returncode == 0, said
    return said


def assert_tells_how_to_go_on(said: str, folder: Path) -> dict[str, Any]:
    """Its last checkpoint and the command that resumes it; returns its result."""
    *lines, last = said.splitlines()
    result = json.loads(last)
    assert result["stopped"] and result["steps"] >= 1
    kept = max(folder.glob("checkpoint_*"))
    expected = f"stopped; its last checkpoint is {kept.name}. Go on by: jobs/train.py --resume {folder}"
    assert expected in lines, lines
    return result
