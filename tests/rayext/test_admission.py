"""Claims of real drivers, in processes of their own, on one cluster."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import ray

from raypipe.config import PoolConfig, TrainConfig
from raypipe.errors import ResourceError
from raypipe.rayext.admission import claimed_by_others, free_cpus
from raypipe.rayext.cluster import cluster_resources, preflight, reserved

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(120)]

# A run that needs 3 of the 4 CPUs, so many times, for so long. It says when it has them and when no longer.
DRIVER = """
import sys, time
import ray
from raypipe.rayext.cluster import connect, reserved
from raypipe.config import PoolConfig, TrainConfig

class Actor:
    def ping(self):
        return "taken"


connect(sys.argv[1])
for _ in range(int(sys.argv[2])):
    with reserved(PoolConfig(cpus_per_actor=2), TrainConfig(gpu="no"), 1, lambda: None):
        print(time.time(), flush=True)
        if sys.argv[3] == "take two":
            sys.stdin.readline()
            actor = ray.remote(num_cpus=2)(Actor).remote()
            print(ray.get(actor.ping.remote()), flush=True)
            time.sleep(100)
        time.sleep(float(sys.argv[3]))
        print(time.time(), flush=True)
"""
NEED = (PoolConfig(cpus_per_actor=2), TrainConfig(gpu="no"), 1)


@contextlib.contextmanager
def driver(times: int, then: str) -> Iterator[subprocess.Popen[str]]:
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", DRIVER, address, str(times), then]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_what_a_run_has_claimed_is_refused_to_others_until_its_process_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raypipe.rayext.cluster._SETTLE_S", 0.0)
    before = cluster_resources().free_cpus
    with driver(1, "take two") as rival:
        assert rival.stdin and rival.stdout and rival.stdout.readline()
        assert claimed_by_others() == {"CPU": 3} and free_cpus() == before - 3
        with pytest.raises(ResourceError, match=r"other jobs hold all but 1 of the cluster's 4 CPUs\. Wait"):
            preflight(*NEED)
        preflight(PoolConfig())  # a pool of one has room beside it
        rival.stdin.write("\n")
        rival.stdin.flush()
        assert rival.stdout.readline() == "taken\n"
        assert claimed_by_others() == {"CPU": 1} and free_cpus() == before - 3  # the rest it holds by now
        rival.kill()
        deadline = time.monotonic() + 30
        while cluster_resources().free_cpus != before:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    preflight(*NEED)


def test_two_runs_that_start_at_one_time_where_there_is_room_for_one_never_both_have_it() -> None:
    ours: list[tuple[float, float]] = []
    with driver(8, "0.2") as rival:
        assert rival.stdout
        first = float(rival.stdout.readline())
        while rival.poll() is None:
            with reserved(*NEED, lambda: None):
                since = time.time()
                time.sleep(0.2)
                ours.append((since, time.time()))
        told = [first, *map(float, rival.stdout)]
    theirs = list(zip(told[::2], told[1::2], strict=True))
    assert len(theirs) == 8 and len(ours) >= 2
    assert all(until < begin or end < since for since, until in ours for begin, end in theirs)
