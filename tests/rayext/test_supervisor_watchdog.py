"""Each rank watches the stream's Supervisor, and tells it how long it has waited."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from patience import until

from raypipe.rayext import watchdog
from raypipe.rayext.processes import Process, _stat
from raypipe.rayext.watchdog import SupervisorWatchdog

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Supervisor:
    """One that answers, or does not, from the process of a subprocess."""

    def __init__(self, process: Process) -> None:
        self.answers, self.process = True, process
        self.heard: list[tuple[int, float]] = []
        self.notes: list[str] = []
        self.rank_waits = SimpleNamespace(remote=self._hears)
        self.note = SimpleNamespace(
            remote=lambda text, kind: self.notes.append(f"{kind}: {text}")
        )

    def _hears(self, rank: int, waited_s: float) -> Any:
        self.heard.append((rank, waited_s))
        return self


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def supervisor(
    busy: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> Supervisor:
    made = Supervisor(
        Process("supervisor", busy.pid, _stat(busy.pid)[1], "10.0.0.1", "here")
    )
    ray = SimpleNamespace(
        wait=lambda asked, timeout: (asked, []) if made.answers else ([], asked),
        get=lambda asked: asked.process,
        is_initialized=lambda: True,
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "here"),
    )
    monkeypatch.setattr(watchdog, "ray", ray)
    return made


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(19)
    until(lambda: _stat(process.pid)[0] == "T")


def test_another_nodes_process_is_left_to_the_rank_there(
    busy: subprocess.Popen[bytes], supervisor: Supervisor
) -> None:
    supervisor.process = supervisor.process._replace(node="there")
    watch = SupervisorWatchdog(supervisor, 1, lambda: 0.0)
    watch.turn(0.0)
    stop(busy)
    supervisor.answers = False
    watch.turn(1.0)
    watch.turn(100.0)
    assert busy.poll() is None
