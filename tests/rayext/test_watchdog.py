from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from patience import until
from ray import cloudpickle

from raypipe.rayext.processes import Process, _stat, kill_stopped
from raypipe.rayext.watchdog import StreamWatchdog

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

cloudpickle.register_pickle_by_value(sys.modules[__name__])

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
    until(lambda: _stat(process.pid)[0] == "T")


def test_a_stopped_process_is_killed_and_a_busy_one_is_not(
    processes: list[subprocess.Popen[bytes]],
) -> None:
    stopped, busy = processes
    known = [(each.pid, _stat(each.pid)[1]) for each in processes]
    assert kill_stopped(known) == []
    stop(stopped)
    assert kill_stopped(known) == [stopped.pid]
    assert stopped.wait() == -signal.SIGKILL and busy.poll() is None


def test_a_later_process_of_the_same_number_is_left_alone(
    processes: list[subprocess.Popen[bytes]],
) -> None:
    stopped, _ = processes
    stop(stopped)
    assert kill_stopped([(stopped.pid, "1"), (stopped.pid, ""), (2**22 + 1, "1")]) == []
    assert stopped.poll() is None


def test_a_process_that_goes_on_within_a_moment_is_left_alone(
    processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    paused, _ = processes
    stop(paused)

    def resume(_: float) -> None:
        paused.send_signal(signal.SIGCONT)
        until(lambda: _stat(paused.pid)[0] != "T")

    moment = SimpleNamespace(sleep=resume)
    monkeypatch.setattr("raypipe.rayext.processes.time", moment)
    assert kill_stopped([(paused.pid, _stat(paused.pid)[1])]) == []
    assert paused.poll() is None


# The watch


def test_a_stream_whose_execution_has_ended_is_not_looked_at() -> None:
    watch = StreamWatchdog(lambda *note: None)
    watch.add("a", Process("transform actor", 1, "1", "127.0.0.1", "node"))
    watch.execution_progress("an execution", 60.0)
    watch.remove("an execution")
    watch.turn(time.monotonic())
    assert not watch._looks
