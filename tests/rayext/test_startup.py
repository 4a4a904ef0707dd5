from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from typing import Any

import pytest
import ray
from patience import PATIENCE_S, until

from raypipe.background import process_state
from raypipe.errors import ResourceError
from raypipe.rayext.cluster import connect
from raypipe.rayext.head import is_head_lost, wait_for_head
from raypipe.rayext.processes import Process
from raypipe.rayext.startup import Wait, _Starting, another_starts, only_start


class Clock:
    """Takes the place of the module `time`: it is as late as it was slept."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_wait_ends_with_what_it_was_for_and_lines_tell_of_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raypipe.rayext.startup.time", Clock())
    wait = Wait(2.5, setting="pool.stall_timeout_s")
    told = r"^waited 2\.5 s \(pool\.stall_timeout_s\) for room: 2 CPUs$"
    with pytest.raises(ResourceError, match=told):
        while True:
            wait.turn("room: 2 CPUs", 0.5)
    line = "waiting up to 2 s more (pool.stall_timeout_s) for room: 2 CPUs\n"
    assert capsys.readouterr().out == line


def test_a_missing_cluster_is_named_and_the_wait_can_be_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(
        ResourceError,
        match=rf"waited 1 s for the Ray cluster at {address} \(.*refused\)",
    ):
        wait_for_head(address, Wait(1.0))

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(KeyboardInterrupt):
        connect(wait=Wait(1000.0, interrupted))


def test_ray_client_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:1")
    with pytest.raises(ResourceError, match=r"Ray Client .*ray job submit"):
        connect()


@pytest.mark.parametrize("num", [1, 2])
def test_an_interrupt_is_held_until_ray_has_started_but_no_second_one(
    monkeypatch: pytest.MonkeyPatch, num: int
) -> None:
    returned = []
    # a finished `fit` leaves Ray's
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def start(**_: object) -> None:
        for number in range(num):
            signal.raise_signal(signal.SIGINT)
            returned.append(number)

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", start)
    with pytest.raises(KeyboardInterrupt):
        connect()
    assert returned == [0]
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_a_head_that_does_not_answer_is_not_awaited_in_silence() -> None:
    with socket.socket() as frozen:
        frozen.bind(("0.0.0.0", 0))
        frozen.listen()
        address = f"127.0.0.1:{frozen.getsockname()[1]}"
        with pytest.raises(
            ResourceError, match=r"\(it accepts connections, but does not answer\)"
        ):
            wait_for_head(address, Wait(2.0))


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_of_two_runs_that_start_together_one_waits_for_the_other() -> None:
    assert not is_head_lost()
    order: list[str] = []
    with only_start(Wait(PATIENCE_S), "first") as first:
        another = r"waited 0\.5 s for another run, until its trainers and its pool have started: run first "
        for thing, why in (
            ("", ""),
            ("room: 9 CPUs", ", which waits for room: 9 CPUs"),
        ):
            ray.get(first.tell.remote(thing))
            assert another_starts("second") and not another_starts("first")
            told = another + rf"\(process {os.getpid()} on \S+, node \w+\){why}$"
            with (
                pytest.raises(ResourceError, match=told),
                only_start(Wait(0.5), "second"),
            ):
                pass

        def release() -> None:
            time.sleep(0.2)
            order.append("killed")
            ray.kill(first)

        releasing = threading.Thread(target=release)
        releasing.start()
        with only_start(Wait(PATIENCE_S)):
            order.append("started")
        releasing.join()
    assert order == ["killed", "started"]
    with only_start(Wait(PATIENCE_S)):  # each has given up the name
        pass
    assert not another_starts("second")


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_a_stopped_run_that_holds_up_others_is_named() -> None:
    node = ray.get_runtime_context().get_node_id()
    with subprocess.Popen(["sleep", "1000"]) as sleeping:
        sleeping.send_signal(signal.SIGSTOP)
        until(lambda: process_state(sleeping.pid)[0] == "T")
        stopped = Process(
            "driver", sleeping.pid, process_state(sleeping.pid)[1], "10.0.0.1", node
        )
        holder: Any = ray.remote(_Starting).options(num_cpus=0).remote("night", stopped)
        text = ray.get(holder.state.remote())
        assert (
            text
            == f"run night ({stopped}), which is stopped (SIGSTOP): continue or end it"
        )
        ray.kill(holder)
        sleeping.kill()
