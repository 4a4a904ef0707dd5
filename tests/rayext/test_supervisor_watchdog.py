"""Each rank watches the stream's Supervisor, and tells it how long it has waited."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from patience import until

from raypipe.background import process_state
from raypipe.rayext import watchdog
from raypipe.rayext.processes import Process
from raypipe.rayext.watchdog import SupervisorWatchdog

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_another_nodes_process_is_left_to_the_rank_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The Supervisor answers once, from a process that then stops.
    with subprocess.Popen(["sleep", "1000"]) as stopped:
        started = process_state(stopped.pid)[1]
        process = Process("supervisor", stopped.pid, started, "10.0.0.1", "there")
        answers = iter([True, False, False])
        ray = SimpleNamespace(
            wait=lambda asked, timeout: (asked, []) if next(answers) else ([], asked),
            get=lambda asked: SimpleNamespace(process=process, lacks_room=False),
            get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "here"),
        )
        monkeypatch.setattr(watchdog, "ray", ray)
        asked = SimpleNamespace(remote=lambda rank, waited_s: rank)
        supervisor: Any = SimpleNamespace(rank_waits=asked)
        watch = SupervisorWatchdog(supervisor, 1, lambda: 0.0, lambda: None)
        watch.turn(0.0)
        stopped.send_signal(signal.SIGSTOP)
        until(lambda: process_state(stopped.pid)[0] == "T")
        watch.turn(1.0)
        watch.turn(100.0)
        assert stopped.poll() is None
        stopped.kill()
