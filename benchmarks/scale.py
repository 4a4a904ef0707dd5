"""How many micro-batches a second one execution sustains: the control path alone.

    python benchmarks/scale.py actors ranks bytes gpus [--seconds 8 --repeats 3 --profile FOLDER]
    python benchmarks/scale.py --show a.json b.json --picture benchmarks/results/scale.png

The real pipeline (source, back-pressure, actor pool, split, hand-over), with a transform that sleeps and
micro-batches of one tiny image. The sleep is such that the actors could finish OFFERED micro-batches/s, far
more than the execution passes on; in the group `gpus` they finish as many as eight GPUs take, 24,000 images/s
of 224 px in micro-batches of 128, in blocks of as many as 64 and 256 MiB hold, and in micro-batches of 256, one
to a block, as actors of one CPU make in half a second. Each transform actor is a process with 0.01 CPUs; the
ranks are threads of a few consumers, which read as fast as they can. Next to the rate: the CPU time per
micro-batch of each kind of process. On a few cores they share what a cluster has apart, so the rate is a lower
bound; `one core` is what the executing process would do with its own core. Prints a table; the last line is
JSON, which --show reads again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import raypipe  # noqa: F401  # isort: skip
import cv2
import numpy as np
import psutil
import ray

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.rayext.cluster import connect
from raypipe.stores.base import Columns, Store
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.opening import open_stream
from raypipe.streaming.pipeline import splits
from raypipe.streaming.row import host_batches
from raypipe.streaming.spec import StreamSpec

from scale_report import draw, median_of, show  # isort: skip

OFFERED = 1000.0
PER_STEP = 16
_MAX_CONSUMERS = 2  # processes that share the ranks
_GROWN_S = 6.0  # until blocks are as large as they get
# What a process is, by how its name begins; the first that fits.
_PARTS = {
    "ray::SplitCoordinator": "execution",
    "ray::Consumer": "consumer",
    "ray::MapWorker": "actors",
    "ray::Supervisor": "supervisor",
    "ray::ReadPlan": "reader",
    "raylet": "ray",
    "gcs_server": "ray",
    "ray::": "ray",
}


class RepeatedStore:
    """A store that is as long as one wants: another one's samples again and again, at random access."""

    def __init__(self, store: Store, size: int) -> None:
        self._store = store
        self._size = size
        self.address = f"{store.address} x {size / len(store):.0f}"
        self.schema = store.schema
        self.classes = store.classes
        self.groups = None
        self.fingerprint = f"{store.fingerprint} x {size}"

    def __len__(self) -> int:
        return self._size

    def read(
        self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")
    ) -> Columns:
        return self._store.read(indices % len(self._store), columns)

    def close(self) -> None:
        self._store.close()


@dataclass(frozen=True)
class Case:
    """What is simulated.

    Attributes:
        actors: transform actors.
        ranks: W.
        samples: B.
        side: of the images, pixels.
        block: micro-batches in a block; 0 = as the stream chooses.
        offered: micro-batches/s that the actors can finish.
    """

    actors: int = 4
    ranks: int = 4
    samples: int = 1
    side: int = 4
    block: int = 0
    offered: float = OFFERED


CASES = {
    "actors": [Case(actors=a) for a in (2, 4, 8, 16, 32, 64)],
    "ranks": [Case(ranks=w) for w in (1, 2, 4, 8, 16)],
    "bytes": [
        Case(ranks=1, samples=b, side=s) for b, s in ((1, 4), (128, 4), (128, 224))
    ],
    "gpus": [
        *(Case(actors=8, ranks=8, block=k, offered=24_000 / 128) for k in (3, 13)),
        Case(actors=8, ranks=8, block=1, offered=24_000 / 256),
    ],
}


class Consumer:
    """Some ranks, a thread for each, that take what comes."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._stop = False

    def read(self, rank: int, iterator: Any) -> None:
        self._counts[rank] = 0
        batches = host_batches(iterator)
        for _ in batches:
            self._counts[rank] += 1
            if self._stop:
                break
        batches.close()  # type: ignore[attr-defined]

    def count(self, stop: bool = False) -> int:
        """Micro-batches that all threads have read so far."""
        self._stop = stop
        return sum(self._counts.values())


def spec_of(case: Case) -> StreamSpec:
    image = cv2.imencode(".png", np.zeros((4, 4, 3), np.uint8))[1].tobytes()
    result = np.zeros((case.side, case.side, 3), np.uint8)
    seconds = case.actors / case.offered / case.samples

    def transform(image: np.ndarray) -> np.ndarray:
        time.sleep(seconds)
        return result

    return open_stream(
        RepeatedStore(MemoryStore([image], [0]), 4_000_000),
        plan=PlanConfig(
            epochs=1,
            micro_batch_size=case.samples,
            global_batch_size=case.samples * PER_STEP,
        ),
        transform=TransformConfig(),
        train_transform=transform,
        pool=PoolConfig(
            min_actors=case.actors,
            max_actors=case.actors,
            cpus_per_actor=0.01,
            max_in_flight=(0, case.block),
        ),
    )


def ray_processes() -> dict[psutil.Process, str]:
    """Ray's processes below this one, and what each is."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(
                [Path((process.cmdline() or [""])[0]).name, *process.cmdline()[1:2]]
            )
            found[process] = next(
                (part for start, part in _PARTS.items() if title.startswith(start)),
                "ray",
            )
        except psutil.Error:
            continue
    return found


def cpu_seconds() -> Counter[str]:
    """CPU time so far of Ray's processes, by what they are, s."""
    used: Counter[str] = Counter()
    for process, part in ray_processes().items():
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        used[part] += times.user + times.system
    return used


def measure(case: Case, seconds: float, profile: str) -> dict[str, Any]:
    """One stream of a case, in its steady state for so many seconds.

    Returns:
        The case; `per_s`, micro-batches/s of all ranks; `cpu_ms`, CPU time per micro-batch by part.
    """
    spec = spec_of(case)
    iterators = splits(
        spec,
        spec.plan.start(),
        max_actors=case.actors,
        world_size=case.ranks,
        apart=True,
    )
    num = min(_MAX_CONSUMERS, case.ranks)
    actor: Any = ray.remote(Consumer).options(
        num_cpus=0, max_concurrency=case.ranks + 2
    )
    consumers = [actor.remote() for _ in range(num)]
    reads = [
        consumers[rank % num].read.remote(rank, iterator)
        for rank, iterator in enumerate(iterators)
    ]

    def counted(stop: bool = False) -> int:
        if failed := ray.wait(reads, timeout=0)[0]:
            ray.get(failed)
        return sum(ray.get([consumer.count.remote(stop) for consumer in consumers]))

    while (
        counted() < 60
        or sum(part == "actors" for part in ray_processes().values()) < case.actors
    ):
        time.sleep(0.5)
    time.sleep(_GROWN_S)
    if profile:
        profiler = _start_profiler(case, seconds, profile)
    else:
        profiler = None
    before = counted()
    cpu_before = cpu_seconds()
    began = time.perf_counter()
    time.sleep(seconds)
    passed = counted() - before
    cpu_after = cpu_seconds()
    elapsed = time.perf_counter() - began
    if profiler:
        profiler.wait()
    counted(stop=True)
    ray.get(reads)
    for consumer in consumers:
        ray.kill(consumer)
    cpu_ms = {
        part: 1000 * (cpu_after[part] - cpu_before[part]) / passed
        for part in sorted(cpu_after)
    }
    return {**vars(case), "per_s": passed / elapsed, "cpu_ms": cpu_ms}


def _start_profiler(case: Case, seconds: float, folder: str) -> subprocess.Popen[bytes]:
    """py-spy on the execution's process; it takes CPU time itself, so such a run's rates count for little."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    pid = next(
        process.pid for process, part in ray_processes().items() if part == "execution"
    )
    output = f"{folder}/actors{case.actors}-ranks{case.ranks}.raw"
    command = [
        "py-spy",
        "record",
        "-p",
        str(pid),
        "-f",
        "raw",
        "-d",
        str(int(seconds)),
        "-r",
        "100",
        "--gil",
    ]
    return subprocess.Popen(
        [*command, "-o", output], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "groups", nargs="*", choices=[*CASES, []], help="of cases to measure"
    )
    parser.add_argument(
        "--max", type=int, default=64, help="leave out cases with more actors or ranks"
    )
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", default="", help="folder for py-spy's stacks")
    parser.add_argument(
        "--show",
        nargs="*",
        default=[],
        help="files whose last lines are results of earlier runs",
    )
    parser.add_argument("--picture", default="")
    args = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}
    for earlier in args.show:
        results |= json.loads(Path(earlier).read_text().splitlines()[-1])
    if args.groups:
        os.environ["RAY_LOG_TO_DRIVER"] = "0"
        connect(num_cpus=1000, object_store_bytes=9 << 30)
    for name in args.groups:
        cases = [
            case for case in CASES[name] if max(case.actors, case.ranks) <= args.max
        ]
        runs: dict[Case, list[dict[str, Any]]] = {case: [] for case in cases}
        for _ in range(args.repeats):
            for case, found in runs.items():
                found.append(measure(case, args.seconds, args.profile))
                print(json.dumps(found[-1]), flush=True)
        results[name] = [median_of(found) for found in runs.values()]
    show(results)
    if args.picture:
        draw(results, args.picture)
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
