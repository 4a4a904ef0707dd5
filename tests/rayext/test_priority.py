from __future__ import annotations

import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from raypipe.rayext import early_imports, priority


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has no nice value")
def test_only_what_loads_code_of_ray_data_yields() -> None:
    nice = {}

    def load(self: Any, job: Any, descriptor: Any) -> str:
        nice[descriptor.module_name] = os.getpriority(os.PRIO_PROCESS, 0)
        return "loaded"

    def run(module: str) -> None:
        descriptor = SimpleNamespace(module_name=module)
        assert priority._yielding(load)(None, None, descriptor) == "loaded"

    own = os.getpriority(os.PRIO_PROCESS, 0)
    data = "ray.data._internal.execution.operators.actor_pool_map_operator"
    for module in ("ray.train.v2._internal.execution", "a_users_module", data):
        # a thread's nice value is its own
        thread = threading.Thread(target=run, args=(module,))
        thread.start()
        thread.join()
    assert nice == {
        "ray.train.v2._internal.execution": own,
        "a_users_module": own,
        data: own or priority._NICE,
    }


def test_workers_of_a_local_cluster_have_the_priority_of_other_processes() -> None:
    variables = priority.environment()
    assert variables["RAY_worker_niceness"] == "0"
    modules = variables["RAY_preload_python_modules"].split(",")
    assert modules == [priority.__name__, early_imports.__name__]
