from __future__ import annotations

import os
import sys
import threading

import pytest

from raypipe.rayext import cluster_state
from raypipe.rayext.cluster import _LOCAL_ENV
from raypipe.rayext.cluster_state import LOCAL_CLUSTER


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has no nice value")
@pytest.mark.parametrize(
    ("is_worker", "is_local", "yields"),
    [(True, True, True), (False, True, False), (True, False, False)],
)
def test_only_a_worker_of_a_local_cluster_yields_its_cpus(
    is_worker: bool, is_local: bool, yields: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    nice: list[int] = []

    def run() -> None:  # a thread's nice value is its own
        cluster_state.yield_cpus()
        nice.append(os.getpriority(os.PRIO_PROCESS, 0))

    monkeypatch.setattr(cluster_state, "is_ray_worker", lambda: is_worker)
    if is_local:
        monkeypatch.setenv(LOCAL_CLUSTER, "1")
    else:
        monkeypatch.delenv(LOCAL_CLUSTER, raising=False)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert nice == [own or cluster_state._NICE if yields else own]


def test_other_workers_of_a_local_cluster_have_any_processs_priority() -> None:
    assert _LOCAL_ENV["RAY_worker_niceness"] == "0"
