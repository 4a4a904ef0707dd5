"""The CPU time that passes until a stream's first micro-batch, by process, and the images of its first seconds.

    python benchmarks/first_batch.py STORE [--transform light --size 224 --repeats 5 --env RAYPIPE_TWEAKS=0]
    python benchmarks/first_batch.py STORE --seconds 15 --pool '{}' '{"head_start": 0}'

Each run is a new process, which imports raypipe, opens the store, makes a loader, and takes one micro-batch. At
that moment it reads the CPU times of its descendants from Linux, and again after `--after` seconds: what a start
puts off is not saved. With `--seconds` it takes micro-batches for so long, and counts their images. Several
settings of the pool take turns. `--burners` starts processes that keep a core busy each, meanwhile. Prints a table
of medians for each; the last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

_TICKS = os.sysconf("SC_CLK_TCK")
# Of a process's title or command line: how the table names it; the first that it contains.
_NAMES = {
    "/raylet/raylet ": "raylet",
    "gcs_server": "gcs",
    "DashboardAgent": "agent of the dashboard",
    "dashboard/agent.py": "agent of the dashboard",
    "RuntimeEnvAgent": "agent of runtime environments",
    "runtime_env/agent/main.py": "agent of runtime environments",
    "log_monitor": "log monitor",
    "_private/monitor.py": "monitor",
    "Supervisor": "Supervisor",
    "TransformWorker": "transform actor",
    "TrainController": "controller",
    "RayTrainWorker": "trainer",
    "SplitCoordinator": "coordinator",
    "ray::IDLE": "idle worker",
    "default_worker.py": "idle worker",
    "ray::": "reader",
    "forked_worker.py": "idle worker",
    "fork_server.py": "fork server",
}
_DRIVER = "driver"
_ENDED = "ended processes"


def _stat(pid: str) -> tuple[int, float, float]:
    """Return a process's parent, its CPU seconds, and those of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = int(fields[11]) + int(fields[12])
    ended = int(fields[13]) + int(fields[14])
    return int(fields[1]), own / _TICKS, ended / _TICKS


def _name(pid: str) -> str:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    for part, name in _NAMES.items():
        if part in command:
            return name
    return command[:40].strip() or "?"


def process_times(root: int) -> dict[int, tuple[str, float]]:
    """Return name and CPU seconds of a process and its descendants, by their ids.

    What children that have ended took is that of their parent, under `_ENDED` and a negative id.
    """
    stats: dict[int, tuple[int, float, float]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stats[int(entry.name)] = _stat(entry.name)
            except OSError:  # it has ended
                continue
    family = {root}
    while True:
        more = {pid for pid, (parent, *_) in stats.items() if parent in family} - family
        if not more:
            break
        family |= more
    times: dict[int, tuple[str, float]] = {}
    for pid in family & stats.keys():
        _, own, ended = stats[pid]
        times[-pid] = (_ENDED, ended)
        try:
            name = _DRIVER if pid == root else _name(str(pid))
        except OSError:
            continue
        times[pid] = (name, own)
    return times


def cpu_seconds(root: int) -> dict[str, float]:
    """Return the CPU seconds of a process and its descendants, by their names, numbered where several have one."""
    seconds: dict[str, float] = defaultdict(float)
    counts = Counter[str]()
    times = process_times(root).values()
    for name, own in sorted(times, key=lambda time_of: -time_of[1]):
        counts[name] += 1
        if counts[name] > 1 and name != _ENDED:
            name = f"{name} {counts[name]}"
        seconds[name] += own
    return dict(seconds)


def _run(options: argparse.Namespace) -> None:
    """Take one micro-batch, and print what it cost."""
    import raypipe
    from raypipe.streaming import ray_stream  # noqa: F401  as users' loops have it

    imported = time.perf_counter()
    spec = raypipe.open_stream(
        options.store,
        plan=raypipe.PlanConfig(epochs=10_000, micro_batch_size=options.batch),
        transform=raypipe.TransformConfig(train=options.transform, size=options.size),
        pool=raypipe.PoolConfig(**json.loads(options.pool[0])),
    )
    with raypipe.loader(spec) as loader:
        batches = itertools.chain.from_iterable(
            epoch.train for epoch in loader.epochs()
        )
        next(batches)
        wall_s = time.perf_counter() - imported
        first = cpu_seconds(os.getpid())
        figures = {"first_s": wall_s}
        if options.seconds:
            figures |= _consumed(loader, batches, imported, options)
        time.sleep(options.after)
        later = cpu_seconds(os.getpid())
    print(json.dumps({"figures": figures, "first": first, "later": later}))


def _consumed(
    loader: Any, batches: Any, started: float, options: argparse.Namespace
) -> dict[str, float]:
    """Take micro-batches until so many seconds after the start: images, when the pool took over, longest wait."""
    num = 1
    took_over_s = 0.0
    longest_s = 0.0
    last = time.perf_counter()
    while last - started < options.seconds:
        next(batches)
        now = time.perf_counter()
        longest_s = max(longest_s, now - last)
        last = now
        num += 1
        if not took_over_s and loader.pool_has_begun:
            took_over_s = now - started
    return {
        "images": num * options.batch,
        "pool_begins_s": took_over_s,
        "longest_wait_s": longest_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store")
    parser.add_argument("--transform", default="light")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument(
        "--pool", nargs="+", default=["{}"], help="settings of the pool, as JSON"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--after", type=float, default=0.0, help="seconds")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="to take micro-batches for"
    )
    parser.add_argument("--burners", type=int, default=0, metavar="PROCESSES")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        _run(options)
        return
    burners = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(options.burners)
    ]
    try:
        _measure(options)
    finally:
        for burner in burners:
            burner.kill()


def _measure(options: argparse.Namespace) -> None:
    """Run all settings in turn, and print their medians."""
    environment = os.environ | dict(pair.split("=", 1) for pair in options.env)
    runs: dict[str, list[Any]] = {pool: [] for pool in options.pool}
    for _ in range(options.repeats):
        for pool, runs_of_pool in runs.items():
            run = subprocess.run(
                [sys.executable, *sys.argv, "--one", "--pool", pool],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            if run.returncode:
                sys.exit(run.stderr)
            runs_of_pool.append(json.loads(run.stdout.splitlines()[-1]))
            print(pool, runs_of_pool[-1]["figures"], flush=True)
    print(json.dumps({pool: _show(pool, of_pool) for pool, of_pool in runs.items()}))


def _show(pool: str, runs: list[Any]) -> dict[str, Any]:
    """Print the medians of the runs of one setting, and return them."""
    medians = {}
    for name in dict.fromkeys(name for run in runs for name in run["later"]):
        medians[name] = [
            statistics.median(run[moment].get(name, 0.0) for run in runs)
            for moment in ("first", "later")
        ]
    medians["all"] = [
        statistics.median(sum(run[moment].values()) for run in runs)
        for moment in ("first", "later")
    ]
    figures = {
        name: statistics.median(run["figures"][name] for run in runs)
        for name in runs[0]["figures"]
    }
    print(f"pool {pool}, {len(runs)} runs, after the imports: {figures}")
    print("| process | CPU s until the first micro-batch | later |")
    print("| --- | ---: | ---: |")
    for name, (first, later) in medians.items():
        if first or later:
            print(f"| {name} | {first:.2f} | {later:.2f} |")
    return {**figures, "cpu_s": medians}


if __name__ == "__main__":
    main()
