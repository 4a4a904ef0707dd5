"""The time from a kill to the next step of a run, and the CPU time that passes until then, by process.

    python benchmarks/recovery.py [--kill trainer,driver --trainers 2 --repeats 3 --env RAYPIPE_TWEAKS=0]

Each run is `jobs/train.py` on the digits that raypipe ships, in a cluster of its own. Ten seconds after its first
step, when the pool has taken over from the trainers' head starts, a process gets SIGKILL: one of the trainers,
which Ray Train restarts; or the driver, and `--resume auto` starts a new one. Both continue from the newest
checkpoint. Prints a table of medians; the last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from first_batch import process_times

_JOB = Path(__file__).parents[1] / "jobs" / "train.py"
_TRAINS_S = 10.0  # on a quiet machine longer than the trainers' head starts
_LOOK_S = 0.02
_START = '{"kind": "start"'
_STEP = '{"kind": "train"'
_LIMIT_S = 240.0
_SETTINGS = (
    "--train.model=small",
    "--train.use-gpu=false",
    "--train.cpus-per-worker=0.5",
    "--pool.cpus-per-actor=0.5",
    "--pool.max-actors=2",
    "--plan.epochs=100000",
    "--train.checkpoint-interval=1s",
    "--train.log-interval=1",
    "--train.max-failures=9",
)


class Run:
    """A run in a process group of its own.

    Attributes:
        moments: seconds since the command, or since the kill, at which something was seen first.
    """

    def __init__(
        self, folder: Path, trainers: int, environment: dict[str, str]
    ) -> None:
        self.folder = folder
        self.moments: dict[str, float] = {}
        self._begun = time.monotonic()
        self._lines = list[str]()
        command = [sys.executable, str(_JOB), *_SETTINGS]
        command += [f"--train.num-workers={trainers}", f"--storage-path={folder}"]
        self._process = subprocess.Popen(
            [*command, "--name=run", "--resume=auto"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _listen(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._lines.append(line)
            for text in (
                "starting Ray",
                "restarting the trainers",
                "starting 2 trainers",
                "starting the stream and the model",
                "waiting for the first micro-batch",
                "the pool makes them now",  # the kill came too early
            ):
                if text in line:
                    self.moments[text] = time.monotonic() - self._begun

    def num_starts(self) -> int:
        """Starts of the trainers that the run has recorded."""
        return self._records().count(_START)

    def await_steps(self, num: int, after_starts: int = 0) -> float:
        """Wait for so many steps after so many starts; returns the seconds since the command or the kill."""
        deadline = time.monotonic() + _LIMIT_S
        while True:
            parts = self._records().split(_START)
            if len(parts) > after_starts + 1 and parts[-1].count(_STEP) >= num:
                return time.monotonic() - self._begun
            if self._process.poll() is not None or time.monotonic() > deadline:
                sys.exit("".join(["the run does not go on\n", *self._lines[-30:]]))
            time.sleep(_LOOK_S)

    def _records(self) -> str:
        path = self.folder / "run" / "metrics.jsonl"
        return path.read_text() if path.exists() else ""

    def kill_trainer(self) -> None:
        """Kill the trainer with the highest process id."""
        trainers = [
            pid
            for pid, (name, _) in process_times(self.pid).items()
            if name == "trainer"
        ]
        self.moments = {}
        self._begun = time.monotonic()
        os.kill(max(trainers), signal.SIGKILL)

    def kill(self) -> None:
        """Kill the driver; its cluster ends with it."""
        self._process.kill()
        self._process.wait()


def _spent(before: dict[int, Any], after: dict[int, Any]) -> dict[str, float]:
    """CPU seconds by name between two looks."""
    seconds: dict[str, float] = defaultdict(float)
    for pid, (name, own) in after.items():
        of_before = before.get(pid, (name, 0.0))[1]
        seconds[name] += own - of_before
    return dict(seconds)


def _measure(kill: str, trainers: int, environment: dict[str, str]) -> dict[str, Any]:
    """One kill: seconds, moments, and CPU seconds by process."""
    folder = Path(tempfile.mkdtemp(prefix="recovery-"))
    ray_folder = tempfile.mkdtemp(prefix="rc-", dir="/tmp")
    environment = environment | {"RAY_TMPDIR": ray_folder}
    run = Run(folder, trainers, environment)
    try:
        run.await_steps(1)
        time.sleep(_TRAINS_S)
        while not list(folder.glob("run/checkpoint_*/checkpoint.json")):
            time.sleep(_LOOK_S)
        num_starts = run.num_starts()
        if kill == "trainer":
            before = process_times(run.pid)
            run.kill_trainer()
        else:
            run.kill()
            before = {}
            run = Run(folder, trainers, environment)
        seconds = run.await_steps(1, after_starts=num_starts)
        cpu_s = _spent(before, process_times(run.pid))
        return {"seconds": seconds, "moments": run.moments, "cpu_s": cpu_s}
    finally:
        run.kill()
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
        shutil.rmtree(ray_folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kill", default="trainer,driver")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    environment = {
        name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"
    }
    environment |= dict(pair.split("=", 1) for pair in options.env)
    results = {}
    for kill in options.kill.split(","):
        found = []
        for _ in range(options.repeats):
            one = _measure(kill, options.trainers, environment)
            one["load"] = os.getloadavg()[0]
            found.append(one)
            print(json.dumps({"kill": kill} | one), flush=True)
        results[kill] = found
        print(f"\n| {kill} killed: process | CPU s |\n| --- | ---: |")
        names = dict.fromkeys(name for one in found for name in one["cpu_s"])
        for name in names:
            spent = statistics.median(one["cpu_s"].get(name, 0.0) for one in found)
            if spent >= 0.02:
                print(f"| {name} | {spent:.2f} |")
        total = statistics.median(sum(one["cpu_s"].values()) for one in found)
        print(f"| all | {total:.2f} |\n")
        walls = ", ".join(f"{one['seconds']:.1f}" for one in found)
        loads = ", ".join(f"{one['load']:.1f}" for one in found)
        print(f"{walls} s until the next step, at a load of {loads}\n")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
