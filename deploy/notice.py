"""Drain this machine's Ray node when it is about to be taken away. Needs only Python, and `ray` on PATH.

    python deploy/notice.py watch        beside `ray start` on AWS or Google Cloud: looks for the cloud's notice
    python deploy/notice.py drain 100    before a pod ends (preStop): drains, and waits 100 s for the node to end

A drained node gets no new work, and its trainers are told in time to make a checkpoint. Ray ends the node once it
is idle. AWS gives notice of two minutes to spot machines, Google of half a minute.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

PERIOD_S = 5.0  # AWS asks to look so often
SERVER = "http://169.254.169.254"  # of the machine's metadata, on both clouds
GOOGLE_S = 25.0


def _answer(path: str, headers: dict[str, str], method: str = "GET") -> str:
    """Of the metadata server; empty where it has nothing of that name, or does not answer."""
    request = urllib.request.Request(
        os.environ.get("RAYPIPE_METADATA_SERVER", SERVER) + path,
        headers=headers,
        method=method,
    )
    with (
        contextlib.suppress(OSError),
        urllib.request.urlopen(request, timeout=2) as answer,
    ):
        return str(answer.read().decode())
    return ""


def of_aws() -> float | None:
    """Seconds until AWS takes this spot machine away; None = there is no notice."""
    token = _answer(
        "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT"
    )
    if not token:
        return None
    notice = _answer(
        "/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token}
    )
    if not notice:
        return None
    at = datetime.datetime.fromisoformat(
        json.loads(notice)["time"].replace("Z", "+00:00")
    )
    return at.timestamp() - time.time()


def of_google() -> float | None:
    """The same of Google Cloud."""
    preempted = _answer(
        "/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}
    )
    return GOOGLE_S if preempted == "TRUE" else None


def drain(seconds: float, reason: str) -> bool:
    """Drain the node; returns whether Ray has accepted it, which it does not where no node runs.

    Args:
        seconds: until the machine ends.
    """
    command = [
        "ray",
        "drain-node",
        "--reason",
        "DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message",
        reason,
    ]
    deadline = ["--deadline-remaining-seconds", str(max(0, int(seconds)))]
    done = subprocess.run(
        [*command, *deadline], capture_output=True, text=True, check=False
    )
    said = "drained" if done.returncode == 0 else f"not drained: {done.stderr[-1000:]}"
    print(f"{reason}, in {seconds:.0f} s: {said}", flush=True)
    return done.returncode == 0


def watch(
    notices: tuple[Callable[[], float | None], ...] = (of_aws, of_google),
) -> None:
    """Wait for a notice; drain the node until Ray has accepted it. One process of a machine does; others end."""
    with Path(tempfile.gettempdir(), "raypipe-notice.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        while True:
            for notice in notices:
                seconds = notice()
                if seconds is not None and drain(
                    seconds, "the cloud takes this machine away"
                ):
                    return
            time.sleep(PERIOD_S)


def _has_raylet() -> bool:
    names = Path("/proc").glob("[0-9]*/comm")
    for name in names:
        with contextlib.suppress(OSError):
            if name.read_text().strip() == "raylet":
                return True
    return False


def wait_for_end(seconds: float) -> None:
    """Wait until Ray has ended its node here, which it does once that is idle."""
    until = time.monotonic() + seconds
    while _has_raylet() and time.monotonic() < until:
        time.sleep(0.5)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["watch"]:
            watch()
        case ["drain", within]:
            if drain(float(within), "the pod ends"):
                wait_for_end(float(within))
        case _:
            sys.exit(__doc__)
