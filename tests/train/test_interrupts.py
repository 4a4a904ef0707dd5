from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from raypipe.config import PlanConfig, PoolConfig, RunConfig, StoreConfig, TrainConfig, TransformConfig
from raypipe.train.launch import Interrupts, train

ROOT = Path(__file__).parents[2]


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_kept_until_it_is_looked_at_and_the_second_gets_the_handler_that_stood_before(
    signum: int, capsys: pytest.CaptureFixture[str]
) -> None:
    caught: list[int] = []
    before = {each: signal.signal(each, lambda *_: None) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with Interrupts() as interrupts:
            interrupts.check()
            # As Ray does while it connects.
            signal.signal(signal.SIGTERM, lambda number, _: caught.append(number))
            signal.signal(signal.SIGINT, lambda number, _: caught.append(number))
            interrupts.stand()
            send(signum)
            assert "stopping before the trainers are started" in capsys.readouterr().out and not caught
            with pytest.raises(KeyboardInterrupt):
                interrupts.check()
            send(signum)
            assert caught == [signum]
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_trainers_that_can_be_asked_are_asked_at_the_signal_or_if_it_came_before() -> None:
    asked: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        interrupts.hand_over(lambda: asked.append("at once"))
        send(signal.SIGINT)
    with Interrupts() as interrupts:
        send(signal.SIGINT)
        interrupts.hand_over(lambda: asked.append("late"))
    assert asked == ["at once", "late"] and signal.getsignal(signal.SIGINT) is before


def test_another_thread_leaves_signals_alone() -> None:
    before, seen = signal.getsignal(signal.SIGINT), list[object]()

    def use() -> None:
        with Interrupts() as interrupts:
            interrupts.stand()
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [before]


@pytest.fixture
def ray_folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="rp-", dir="/tmp") as folder:  # short: sockets are made below it
        yield folder


@pytest.mark.cluster
def test_ctrl_c_while_ray_starts_ends_the_run_before_its_trainers(
    tmp_path: Path, ray_folder: str, stores: dict[str, Path]
) -> None:
    command = [sys.executable, str(ROOT / "jobs" / "train.py"), f"--storage_path={tmp_path}", "--name=early"]
    command += [f"--store.train={stores['train']}", "--train.model=small", "--transform.size=12"]
    command += ["--train.use_gpu=false", "--plan.micro_batch_size=10"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["RAY_TMPDIR"] = ray_folder  # where it finds no other cluster
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as run:
        process = psutil.Process(run.pid)
        while not any("gcs_server" in child.name() for child in process.children()):
            assert run.poll() is None
            time.sleep(0.01)
        run.send_signal(signal.SIGINT)
        said, _ = run.communicate(timeout=100)
    assert said == "stopping before the trainers are started; once more aborts\n" and run.returncode == 130
    assert not (tmp_path / "early" / "metrics.jsonl").exists()


@pytest.mark.soak  # tests/train/test_loop.py has the first; both are one handler's, as the first test here shows
@pytest.mark.cluster
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_trainers_ends_the_run_without_them(
    signum: int, ray_cluster: None, tmp_path: Path, stores: dict[str, Path]
) -> None:
    run = RunConfig(
        store=StoreConfig(str(stores["train"])),
        plan=PlanConfig(micro_batch_size=10),
        transform=TransformConfig(size=12),
        pool=PoolConfig(engine="inline"),
        train=TrainConfig(model="small", use_gpu=False),
        storage_path=str(tmp_path),
        name="early",
    )

    def interrupt() -> None:
        while not (tmp_path / "early" / "config.yaml").exists():
            time.sleep(0.001)
        send(signum)

    waiting = threading.Thread(target=interrupt)
    waiting.start()
    try:
        result = train(run)
    except KeyboardInterrupt:
        pass
    else:  # it was too late for that, and the trainers were asked
        assert result["stopped"] and result["steps"] <= 1
    waiting.join()
    assert "".join(file.read_text() for file in tmp_path.glob("early/metrics.jsonl")).count('"train"') <= 1
