from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from raypipe.rayext.watch import _stat, end_stopped

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

BUSY = [sys.executable, "-c", "while True: pass"]


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two busy processes."""
    started = [subprocess.Popen(BUSY) for _ in range(2)]
    yield started
    for each in started:
        each.kill()
        each.wait()


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 20
    while _stat(process.pid)[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stopped_process_is_killed_and_a_busy_one_is_not(processes: list[subprocess.Popen[bytes]]) -> None:
    stopped, busy = processes
    known = [(each.pid, _stat(each.pid)[1]) for each in processes]
    assert end_stopped(known) == []
    stop(stopped)
    assert end_stopped(known) == [stopped.pid]
    assert stopped.wait(20) == -signal.SIGKILL and busy.poll() is None


def test_a_later_process_of_the_same_number_is_left_alone(processes: list[subprocess.Popen[bytes]]) -> None:
    stopped, _ = processes
    stop(stopped)
    assert end_stopped([(stopped.pid, "1"), (stopped.pid, ""), (2**22 + 1, "1")]) == []
    assert stopped.poll() is None


def test_a_process_that_goes_on_within_a_moment_is_left_alone(processes: list[subprocess.Popen[bytes]]) -> None:
    paused, _ = processes
    stop(paused)
    resume = subprocess.Popen(["sh", "-c", f"sleep 0.1; kill -CONT {paused.pid}"])
    assert end_stopped([(paused.pid, _stat(paused.pid)[1])]) == []
    assert resume.wait(20) == 0 and paused.poll() is None


def test_the_state_of_no_process_is_empty() -> None:
    assert _stat(2**22 + 1) == ("", "") and _stat(os.getpid())[0] == "R"
