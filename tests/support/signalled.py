"""Runs of jobs/train.py with a Ray of their own, and what becomes of them at a signal; processes to kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

JOB = Path(__file__).parents[2] / "jobs" / "train.py"


def started(
    settings: list[str],
    ray_folder: str,
    environment: Mapping[str, str] | None = None,
    stderr: int | None = None,
) -> subprocess.Popen[str]:
    """A run in a process group of its own; `ray_folder` is where it finds no other cluster."""
    ours = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.Popen(
        [sys.executable, str(JOB), *settings],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**ours, "RAY_TMPDIR": ray_folder, **(environment or {})},
        start_new_session=True,
        bufsize=1,
    )


def ended_by(signum: int, run: subprocess.Popen[str], to_group: bool) -> str:
    """What a run says after a signal that it gets at its first step.

    On a busy machine its trainers may not answer in time: then it is aborted.
    """
    assert run.stdout
    # and its log ends only with the run
    assert any("step 1/" in line for line in run.stdout)
    (os.killpg if to_group else os.kill)(run.pid, signum)
    said, _ = run.communicate()
    assert run.returncode in (75, 130), said
    return said


def assert_tells_how_to_go_on(said: str, folder: Path) -> dict[str, Any]:
    """Its last checkpoint and the command that resumes it; returns its result, nothing of one that was aborted."""
    lines = said.splitlines()
    kept = sorted(path.parent for path in folder.glob("checkpoint_*/checkpoint.json"))
    where = f"with {kept[-1].name}" if kept else "before the first checkpoint"
    assert (
        f"stopped {where}. Continue with: jobs/train.py --resume {folder}" in lines
    ), lines
    result = json.loads(lines[-1]) if lines[-1].startswith("{") else {}
    assert not result or (result["stopped"] and result["steps"] >= 1 and kept)
    return result


def own_processes(named: str) -> Iterator[int]:
    """The ids of the processes of this session's own cluster that Ray has named so: no other's is ever killed."""
    for pid in (
        int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()
    ):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text()
            if (
                command.startswith("ray::")
                and named in command
                and _descends_from(pid, os.getpid())
            ):
                yield pid
        except OSError:  # it has ended
            continue


def _descends_from(pid: int, ancestor: int) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def kill_a_worker_at(
    folder: Path, step: int, killed: list[int], named: str = "RayTrainWorker"
) -> None:
    """Kill a trainer of this session's cluster, or what is `named`, once a run has done so many steps."""

    def steps() -> int:
        try:
            lines = (folder / "metrics.jsonl").read_text().split("\n")[:-1]
        except OSError:
            return 0
        return max(
            [r["step"] for r in map(json.loads, lines) if r["kind"] == "train"],
            default=0,
        )

    deadline = time.monotonic() + 300
    while steps() < step and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in own_processes(named):
        killed.append(pid)
        os.kill(pid, signal.SIGKILL)
        return
