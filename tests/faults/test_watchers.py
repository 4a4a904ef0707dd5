"""Freezes and kills each process of a run, the watchers too: each is found, and the run goes on or says why.

docs/failures.md has the table: who notices, after how many seconds, and what happens.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import s3_server
from pictures import samples
from signalled import started

from raypipe.stores.destination import write_atomically

# Generous: a busy machine with two cores restarts processes slowly. Before, runs hung for 15 minutes, or for ever.
LIMIT_S = 240.0
ACTOR, READER, COORDINATOR = "TransformWorker", "ReadPlan", "SplitCoordinator"
SUPERVISOR, CONTROLLER, TRAINER = "Supervisor", "TrainController", "RayTrainWorker"


class Run:
    """A run of jobs/train.py with a cluster of its own, in a process group of its own.

    Attributes:
        lines: what it has said.
    """

    def __init__(
        self,
        folder: Path,
        ray_folder: str,
        *settings: str,
        storage: str = "",
        environment: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder / "one"
        write_atomically(str(folder / "train.parquet"), samples(256), tuple("abcde"))
        common = [
            f"--storage_path={storage or folder}",
            "--name=one",
            f"--store.train={folder / 'train.parquet'}",
            "--train.model=small",
            "--transform.size=12",
            "--train.use_gpu=false",
            "--resume=auto",
            "--plan.micro_batch_size=8",
            "--plan.global_batch_size=16",
            "--plan.epochs=100000",
            "--train.num_workers=2",
            "--train.cpus_per_worker=0.25",
            "--pool.cpus_per_actor=0.25",
            "--pool.max_actors=2",
            "--pool.reader=separate",
            "--pool.head_start=1",
            "--train.checkpoint_interval=2s",
            "--train.max_failures=20",
            "--train.log_interval=5",
        ]
        self._process = started(
            [*common, *settings], ray_folder, environment, subprocess.STDOUT
        )
        self.lines: list[str] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout
        with (self.folder.parent / "said.txt").open("w") as file:
            for line in self._process.stdout:
                self.lines.append(line)
                print(f"{time.strftime('%X')} {line}", end="", file=file, flush=True)

    @property
    def records(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    @property
    def faults(self) -> list[str]:
        return [record["text"] for record in self.records if record["kind"] == "fault"]

    @property
    def step(self) -> int:
        return max(
            (record["step"] for record in self.records if record["kind"] == "train"),
            default=0,
        )

    def until(self, is_so: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not is_so():
            assert self._process.poll() is None, (
                what,
                self._process.returncode,
                "".join(self.lines[-40:]),
            )
            assert time.monotonic() < deadline, (
                what,
                self.faults,
                "".join(self.lines[-40:]),
            )
            time.sleep(0.1)

    def trains_on(self) -> None:
        step = self.step
        self.until(lambda: self.step > step + 10, "it trains on")

    def process(self, title: str) -> psutil.Process:
        found: list[psutil.Process] = []

        def is_there() -> bool:
            found[:] = [each for each, name in self._below() if title in name]
            return bool(found)

        self.until(is_there, f"there is a {title}")
        return found[0]

    def _below(self) -> list[tuple[psutil.Process, str]]:
        below = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            try:
                below.append((process, " ".join(process.cmdline()[:1])))
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return below

    def hurts(self, title: str, number: int) -> None:
        self.process(title).send_signal(number)

    def is_found(
        self, pattern: str, known: int, hurt: Callable[[], None] = lambda: None
    ) -> None:
        """Wait for a fault. What is hurt may have ended by itself just before: then another one is."""
        again = time.monotonic() + LIMIT_S / 4

        def is_told() -> bool:
            nonlocal again
            if time.monotonic() > again:
                again += LIMIT_S / 4
                hurt()
            return any(re.search(pattern, text) for text in self.faults[known:])

        self.until(is_told, pattern)

    def said(self, pattern: str) -> bool:
        return any(re.search(pattern, line) for line in self.lines)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def ends(self) -> int:
        """Wait for the end of the run, and until its last line is heard."""
        code = self._process.wait(LIMIT_S)
        self._listener.join(LIMIT_S)
        return code

    def close(self) -> None:
        """End the run and all processes that it has started."""
        below = (
            [process for process, _ in self._below()]
            if self._process.poll() is None
            else []
        )
        for process in [*below, self._process]:
            try:
                process.kill()
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        self._process.wait()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run that goes on through all faults that it heals."""
    with tempfile.TemporaryDirectory(prefix="rp-", dir="/tmp") as ray_folder:
        made = Run(tmp_path_factory.mktemp("run"), ray_folder)
        yield made
        made.close()


STOPPED = "killed a stopped process .*"
HEALED = [
    (ACTOR, signal.SIGKILL, "a transform actor died"),
    (ACTOR, signal.SIGSTOP, STOPPED + "transform actor"),
    (READER, signal.SIGSTOP, STOPPED + "reader"),
    (READER, signal.SIGKILL, "the reader of .* died"),
    (SUPERVISOR, signal.SIGKILL, "the stream's supervisor died"),
    (SUPERVISOR, signal.SIGSTOP, STOPPED + "supervisor"),
    (COORDINATOR, signal.SIGSTOP, "the coordinator died"),
    # It may have brought nothing yet. The next ones restart the trainers, and so wait for no pool that starts.
    (COORDINATOR, signal.SIGKILL, "the coordinator died"),
    (TRAINER, signal.SIGSTOP, "restarting the trainers: trainers? .* died"),
    (TRAINER, signal.SIGKILL, "restarting the trainers: trainers? .* died"),
    (
        CONTROLLER,
        signal.SIGSTOP,
        "restarting the trainers: Ray Train's controller died",
    ),
    (
        CONTROLLER,
        signal.SIGKILL,
        "restarting the trainers: Ray Train's controller died",
    ),
]


@pytest.mark.system
@pytest.mark.cluster
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("who", "number", "fault"),
    HEALED,
    ids=[f"{who}-{signal.Signals(number).name}" for who, number, _ in HEALED],
)
def test_whoever_dies_or_hangs_is_found_and_the_run_goes_on(
    who: str, number: int, fault: str, run: Run
) -> None:
    run.until(lambda: run.step > 1, "steps of its pool")
    known = len(run.faults)
    hurt = functools.partial(run.hurts, who, number)
    hurt()
    run.is_found(fault, known, hurt)
    run.trains_on()
    if who == COORDINATOR:
        assert not any("restarting the trainers" in text for text in run.faults[known:])


@pytest.mark.system
@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_an_actor_that_hangs_after_the_supervisors_death_is_found(run: Run) -> None:
    run.until(lambda: run.step > 1, "steps of its pool")
    known = len(run.faults)
    supervisor, actor = run.process(SUPERVISOR), run.process(ACTOR)
    supervisor.kill()
    actor.suspend()
    run.is_found(STOPPED + "transform actor", known)
    assert any("the stream's supervisor died" in text for text in run.faults[known:])
    run.trains_on()


@pytest.mark.system
@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_stopped_driver_leaves_the_run_going_and_then_takes_its_signal(
    run: Run,
) -> None:
    run.until(lambda: run.step > 1, "steps of its pool")
    run.signal(signal.SIGSTOP)
    run.trains_on()
    run.signal(signal.SIGCONT)
    run.signal(signal.SIGTERM)
    assert run.ends() == os.EX_TEMPFAIL, "".join(run.lines[-40:])


# Most of the following is waiting, and so two runs wait side by side.


@contextlib.contextmanager
def run_of_its_own(folder: Path, *settings: str, **options: Any) -> Iterator[Run]:
    folder.mkdir()
    with tempfile.TemporaryDirectory(prefix="rp-", dir="/tmp") as ray_folder:
        run = Run(folder, ray_folder, *settings, **options)
        try:
            yield run
        finally:
            run.close()


@pytest.mark.system
@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_lost_head_is_told_and_ends_the_run_at_its_limit(tmp_path: Path) -> None:
    environment = {"RAY_gcs_rpc_server_reconnect_timeout_s": "50"}
    limit = "--pool.stall_timeout_s=25"
    with (
        run_of_its_own(tmp_path / "f", limit, environment=environment) as frozen,
        run_of_its_own(tmp_path / "k", environment=environment) as killed,
    ):
        cases = (
            (frozen, signal.SIGSTOP, "has not answered for"),
            (killed, signal.SIGKILL, "is gone, and refuses connections, for"),
        )
        for run, number, _ in cases:
            run.until(lambda run=run: run.step > 0, "its first steps")
            run.hurts("gcs_server", number)
        for run, _, said in cases:
            told = f"the head of the Ray cluster {said} [0-9]+ s; the run ends in"
            run.until(lambda run=run, told=told: run.said(told), "a line")
        for run, _, said in cases:
            assert run.ends() == 1
            ended = f"{said} .*: restart the cluster, then continue with: jobs/train.py --resume"
            assert run.said(ended), "".join(run.lines[-40:])
            # raypipe status has it too
            assert re.search(ended, (run.folder / "error.txt").read_text())


@pytest.mark.system
@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_stop_ends_a_run_whose_storage_does_not_answer(tmp_path: Path) -> None:
    with s3_server.s3_server() as endpoint, s3_server.FaultyProxy(endpoint) as proxy:
        environment = s3_server.environment(proxy.endpoint)
        for bucket in ("once", "twice"):
            s3_server.make_bucket(endpoint, bucket)
        with (
            run_of_its_own(
                tmp_path / "once",
                "--train.stop_grace_s=3",
                storage="s3://once/here",
                environment=environment,
            ) as once,
            run_of_its_own(
                tmp_path / "twice",
                "--train.stop_grace_s=1000",
                storage="s3://twice/here",
                environment=environment,
            ) as twice,
        ):
            for run in (once, twice):
                run.until(lambda run=run: run.said("step 16/16"), "its first epoch")
            proxy.outage = lambda authorization: (503, "SlowDown")
            once.signal(signal.SIGTERM)
            twice.signal(signal.SIGTERM)
            time.sleep(5)  # within a second it would be one signal
            twice.signal(signal.SIGTERM)
            for run in (once, twice):
                assert run.ends() == os.EX_TEMPFAIL, "".join(run.lines[-40:])
