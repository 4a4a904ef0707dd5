from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from patience import until
from ray import cloudpickle

from raypipe.background import process_state
from raypipe.rayext.kv_store import forget, published_keys
from raypipe.rayext.processes import Process, kill_stopped, this_process
from raypipe.rayext.watchdog import StreamWatchdog, SupervisorWatchdog
from raypipe.streaming import supervisor as supervisor_of_streams
from raypipe.streaming.supervisor import (
    Supervisor,
    announce_trainer,
    start_supervisor,
    stream_name,
)

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
    until(lambda: process_state(process.pid)[0] == "T")


def known_as(pid: int) -> Process:
    return Process("actor", pid, process_state(pid)[1], "10.0.0.1", "here")


def test_a_stopped_process_is_killed_and_a_busy_one_is_not(
    processes: list[subprocess.Popen[bytes]],
) -> None:
    stopped, busy = processes
    known = [known_as(each.pid) for each in processes]
    assert kill_stopped(known) == []
    stop(stopped)
    assert kill_stopped(known) == known[:1]
    assert stopped.wait() == -signal.SIGKILL and busy.poll() is None


def test_a_later_process_of_the_same_number_is_left_alone(
    processes: list[subprocess.Popen[bytes]],
) -> None:
    stopped, _ = processes
    stop(stopped)
    later = [known_as(stopped.pid)._replace(started=started) for started in ("1", "")]
    assert kill_stopped([*later, known_as(2**22 + 1)]) == []
    assert stopped.poll() is None


def test_a_process_that_goes_on_within_a_moment_is_left_alone(
    processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    paused, _ = processes
    stop(paused)

    def resume(_: float) -> None:
        paused.send_signal(signal.SIGCONT)
        until(lambda: process_state(paused.pid)[0] != "T")

    moment = SimpleNamespace(sleep=resume)
    monkeypatch.setattr("raypipe.rayext.processes.time", moment)
    assert kill_stopped([known_as(paused.pid)]) == []
    assert paused.poll() is None


def test_the_state_of_no_process_is_empty() -> None:
    assert process_state(2**22 + 1) == ("", "") and process_state(os.getpid())[0] == "R"


# The watch


class Actor:
    """One that knows its process."""

    def process(self) -> Process:
        return this_process("transform actor")


@pytest.mark.system
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_a_stopped_actor_is_killed_only_while_the_stream_stands_still() -> None:
    notes: list[tuple[str, str]] = []
    watch = StreamWatchdog(
        lambda *note: notes.append(note), lambda key: f"in the block of {key}"
    )
    stopped, busy = (ray.remote(num_cpus=0)(Actor).remote() for _ in range(2))
    process = ray.get(stopped.process.remote())
    watch.add("a", process)
    watch.add("b", ray.get(busy.process.remote()))
    os.kill(process.pid, signal.SIGSTOP)
    watch.execution_progress("an execution", 0.0)
    watch.turn(time.monotonic())
    assert not watch._looks
    watch.execution_progress("an execution", 60.0)
    deadline = time.monotonic() + 300
    while not notes:
        assert time.monotonic() < deadline
        watch.turn(time.monotonic())
        time.sleep(0.1)
    text = f"transform actor ({process}, in the block of a)"
    assert notes == [
        (
            f"killed a stopped process (SIGSTOP) that blocked the stream: {text}",
            "stopped",
        )
    ]
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(stopped.process.remote(), timeout=600)
    assert ray.get(busy.process.remote(), timeout=600)
    ray.kill(busy)


def has_ended(supervisor: Any) -> bool:
    try:
        ray.get(supervisor.shared.remote("nothing"), timeout=600)
    except ray.exceptions.RayActorError:
        return True
    return False


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_a_trainer_that_stops_before_its_supervisor_runs_is_killed(
    processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = processes
    started = process_state(trainer.pid)[1]
    one = this_process("trainer 0")
    other = one._replace(role="trainer 1", pid=trainer.pid, started=started)
    monkeypatch.setattr(supervisor_of_streams, "this_process", lambda role: other)
    supervisor = start_supervisor(trainer=one, num_ranks=2)
    announce_trainer(supervisor, 1)
    stop(trainer)
    calls = SupervisorWatchdog(supervisor, 0, lambda: 0.0, lambda: None)
    calls.start()
    try:
        until(lambda: trainer.poll() is not None)
    finally:
        calls.stop()
        ray.kill(supervisor)
    # until it has ended, it may publish what it has just noted
    until(lambda: has_ended(supervisor))
    assert trainer.poll() == -signal.SIGKILL
    forget(supervisor)
    assert published_keys(stream_name(supervisor)) == []


def test_a_stream_whose_execution_has_ended_is_not_looked_at() -> None:
    watch = StreamWatchdog(lambda *note: None)
    watch.add("a", Process("transform actor", 1, "1", "127.0.0.1", "node"))
    watch.execution_progress("an execution", 60.0)
    watch.remove("an execution")
    watch.turn(time.monotonic())
    assert not watch._looks


class Looks(StreamWatchdog):
    """Counts its looks at the processes."""

    num = 0

    def _look(self) -> None:
        self.num += 1


def test_a_rank_that_calls_no_more_is_found_at_once_in_a_long_stall() -> None:
    watch = Looks(lambda *note: None)
    watch._still["an execution"] = 0.0
    # as long as the rank calls, it looks at 2, 3, 4, 5, 7 and 9 s
    for second in range(11):
        watch._still["rank 0"] = float(second)
        watch.turn(float(second))
    assert watch.num == 6
    watch.turn(12.0)  # for both
    watch.turn(13.0)
    assert watch.num == 8


def test_an_execution_that_stops_before_its_first_block_is_found_soon() -> None:
    watch = Looks(lambda *note: None)
    watch.execution_progress("an execution", -14.0)
    watch.turn(time.monotonic() + 2.0)
    assert watch.num == 1


def test_what_stops_right_after_a_long_start_is_found_soon() -> None:
    watch = Looks(lambda *note: None)
    watch._still["an execution"] = 0.0
    looked_at = 0.0
    for tick in range(200):
        now = tick / 2
        before = watch.num
        watch.turn(now)
        if watch.num > before:
            assert now - looked_at <= max(2.0, looked_at / 4 + 0.5)
            looked_at = now
    assert looked_at > 80


def test_a_reader_is_watched_between_two_shares_under_its_last_one() -> None:
    watched = Supervisor(3, watches=False)
    reader = Process("reader", 1, "1", "127.0.0.1", "node")
    for task in ("a", "b"):
        watched.reader_started(task, "4 micro-batches", reader)
        watched.reader_finished(task)
        assert watched._watch.state()[0] == {task: reader}


def test_an_execution_whose_ranks_all_compute_is_not_looked_at() -> None:
    waiting: list[int] = []
    watch = Looks(lambda *note: None, is_awaited=lambda: bool(waiting))
    watch._still = {"an execution": 0.0, "rank 0": 59.0}
    watch.turn(60.0)
    assert watch.num == 0
    waiting.append(0)
    watch.turn(60.0)
    assert watch.num == 1
    waiting.clear()
    watch.turn(90.0)  # the rank is silent
    assert watch.num == 2
