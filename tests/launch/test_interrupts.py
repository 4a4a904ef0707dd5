from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
from signalled import started

from raypipe.config import (
    RunConfig,
    StoreConfig,
)
from raypipe.errors import OutageError
from raypipe.launch import run as launch_run
from raypipe.launch.interrupts import Interrupts, Stopped
from raypipe.launch.run import launch
from raypipe.storage import retries


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)


@pytest.fixture
def each_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two signals at one time are two."""
    monkeypatch.setattr("raypipe.launch.interrupts._ONE_SIGNAL_S", -1.0)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_kept_the_second_aborts_the_third_is_pythons(
    signum: int, each_is_meant: None, capsys: pytest.CaptureFixture[str]
) -> None:
    caught: list[int] = []
    both = (signal.SIGINT, signal.SIGTERM)
    before = {
        each: signal.signal(each, lambda number, _: caught.append(number))
        for each in both
    }
    try:
        with Interrupts() as interrupts:
            interrupts.check()
            for each in both:  # as Ray does while it connects
                signal.signal(each, lambda *_: None)
            signal.signal(signal.SIGTERM, lambda number, _: caught.append(number))
            interrupts.stand()
            send(signum)
            assert (
                "stopping before the trainers are started" in capsys.readouterr().out
                and not caught
            )
            with pytest.raises(KeyboardInterrupt):
                interrupts.check()
            with pytest.raises(KeyboardInterrupt):
                send(signum)
            send(signum)
            assert caught == [signum]
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_trainers_are_asked_at_the_signal_or_if_it_came_before() -> None:
    asked: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        interrupts.hand_over(lambda: asked.append("at once"))
        send(signal.SIGINT)
    with Interrupts() as interrupts:
        send(signal.SIGINT)
        interrupts.hand_over(lambda: asked.append("late"))
    assert asked == ["at once", "late"] and signal.getsignal(signal.SIGINT) is before


def test_a_signal_that_comes_twice_at_one_time_as_timeout_sends_it_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raypipe.launch.interrupts._ONE_SIGNAL_S", 1000.0)
    asked: list[str] = []
    with Interrupts() as interrupts:
        interrupts.hand_over(lambda: asked.append("once"))
        for _ in range(3):
            send(signal.SIGTERM)
    assert asked == ["once"]


@pytest.mark.parametrize("fails", [False, True])
def test_trainers_that_do_not_answer_or_cannot_be_asked_are_aborted(
    fails: bool, each_is_meant: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask() -> None:
        if fails:
            raise OSError("No space left on device")

    with Interrupts(grace_s=0.1) as interrupts, pytest.raises(KeyboardInterrupt):
        interrupts.hand_over(ask, lambda: False)
        send(signal.SIGTERM)
        time.sleep(60)


def test_a_request_held_up_by_storage_ends_at_the_grace_or_a_signal(
    each_is_meant: None,
) -> None:
    for second in (False, True):
        held = threading.Event()
        try:
            with (
                Interrupts(grace_s=1000.0 if second else 0.2) as interrupts,
                pytest.raises(KeyboardInterrupt),
            ):
                interrupts.hand_over(lambda held=held: held.wait(), lambda: False)
                send(signal.SIGTERM)
                if second:
                    send(signal.SIGTERM)
                time.sleep(60)
            assert retries._lost.is_set(), (
                "the end of the run asks storage once, and does not wait"
            )
        finally:
            held.set()
            retries.allow_retries()


def test_a_slow_step_has_the_grace_that_is_set(each_is_meant: None) -> None:
    asked: list[str] = []
    step_ends = threading.Event()
    with Interrupts(grace_s=1000.0) as interrupts:
        interrupts.hand_over(lambda: asked.append("once"), step_ends.is_set)
        send(signal.SIGTERM)
        time.sleep(1.0)  # without an abort
        step_ends.set()
    assert asked == ["once"]


def test_a_run_that_cannot_go_on_ends_with_the_reason() -> None:
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        interrupts.give_up("the head is silent")
        time.sleep(60)
    assert interrupts.reason == "the head is silent"
    retries.allow_retries()


@pytest.mark.parametrize("newest", ["checkpoint_0000_0000004_00000000", "", None])
def test_a_stopped_run_with_a_checkpoint_or_unknown_ones_exits_as_such(
    newest: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(run_uri: str) -> str:
        if newest is None:
            raise OutageError("s3 was unavailable")
        return newest

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch_run, "newest_name", ask)
    monkeypatch.setattr(launch_run, "_train", interrupted)
    run = RunConfig(
        store=StoreConfig("nowhere.lmdb"), storage_path=str(tmp_path), name="one"
    )
    with pytest.raises(KeyboardInterrupt) as caught:
        launch(run)
    assert (type(caught.value) is Stopped) == (newest != ""), (
        "75, so that a scheduler starts it again"
    )


@pytest.fixture
def job(tmp_path: Path, stores: dict[str, Path]) -> list[str]:
    """The settings of a run."""
    settings = [
        f"--storage_path={tmp_path}",
        "--name=one",
        f"--store.train={stores['train']}",
    ]
    settings += ["--train.model=small", "--transform.size=12", "--train.use_gpu=false"]
    return [*settings, "--plan.micro_batch_size=10"]


@pytest.mark.cluster
def test_ctrl_c_while_ray_starts_ends_the_run_before_its_trainers(
    tmp_path: Path, ray_folder: str, job: list[str]
) -> None:
    with started(job, ray_folder) as run:
        process = psutil.Process(run.pid)
        while not any("gcs_server" in child.name() for child in process.children()):
            assert run.poll() is None
            time.sleep(0.01)
        os.killpg(run.pid, signal.SIGINT)
        said, _ = run.communicate()
    assert (
        said.endswith(
            "stopping before the trainers are started; press Ctrl-C again to abort\n"
        )
        and run.returncode == 130
    )
    assert not (tmp_path / "one" / "metrics.jsonl").exists()
