"""Threads that call Ray end before their process does: at the end of an actor, and at exit."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import cloudpickle

from raypipe.rayext.ray_thread import RayThread

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Talking:
    """An actor whose thread calls Ray all the time, and tells of its end."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._thread = RayThread(lambda: ray.get(ray.put(1)), 0.0, "raypipe-test")
        self._thread.start()

    def is_there(self) -> bool:
        return self._thread.is_alive()

    def __ray_shutdown__(self) -> None:
        self._path.write_text(str(self._thread.is_alive()))


@pytest.mark.system
def test_a_thread_ends_before_ray_ends_its_actor(
    ray_cluster: None, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    actor: Any = ray.remote(num_cpus=0)(Talking).remote(str(told))
    assert ray.get(actor.is_there.remote())
    del actor
    while not told.exists() or not told.read_text():
        time.sleep(0.05)
    assert told.read_text() == "False"


PROGRAM = """
import ray
from raypipe.rayext.ray_thread import RayThread
ray.init(address={address!r}, log_to_driver=False)
for _ in range(4):
    RayThread(lambda: ray.get(ray.put(1)), 0.0, "raypipe-test").start()
"""


@pytest.mark.system
def test_threads_end_before_a_program_does(ray_cluster: None) -> None:
    program = PROGRAM.format(address=ray.get_runtime_context().gcs_address)
    subprocess.run([sys.executable, "-c", program], check=True)
