"""Priority of the ranks over Ray Data's processes, on a cluster that raypipe starts on this machine.

Ray gives all of its workers, trainers too, a nice value of 15: on two cores that two other processes keep
busy, a trainer has 3 % of a core. There raypipe leaves them at 0, as a DataLoader's workers are, and gives 5 to
the processes of Ray Data, the transform actors among them, before their first import: while cores are short, a
rank gets three times the share of an actor. A process cannot lower its nice value again without privileges, so an
actor keeps it.

Each worker imports this module at its start, by Ray's setting RAY_preload_python_modules.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
from typing import Any

from raypipe.rayext.ray_private import Function, replace

_NICE = 5
_YIELDS = "ray.data."  # modules of its actors' classes and of its tasks' functions
_PRELOADED = "RAY_preload_python_modules"
_MANAGER = "ray._private.function_manager.FunctionActorManager"


def environment() -> dict[str, str]:
    """Return variables for the processes of a local cluster."""
    from raypipe.packages import DISTRIBUTION  # not needed in each worker

    try:
        importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        # a worker does not find raypipe before it knows the driver's search path
        return {"RAY_worker_niceness": "0"}
    modules = (__name__, "raypipe.rayext.early_imports")
    return {"RAY_worker_niceness": "0", _PRELOADED: ",".join(modules)}


def _yielding(load: Function) -> Function:
    """Wrap a method that loads an actor's class or a task's function: that of Ray Data makes its process yield."""

    @functools.wraps(load)
    def loaded(self: Any, job: Any, descriptor: Any) -> Any:
        is_of_data = descriptor.module_name.startswith(_YIELDS)
        if is_of_data and os.getpriority(os.PRIO_PROCESS, 0) == 0:
            os.setpriority(os.PRIO_PROCESS, 0, _NICE)
        return load(self, job, descriptor)

    return loaded


def _prepare() -> None:
    for method in ("load_actor_class", "get_execution_info"):
        path = f"{_MANAGER}.{method}"
        replace(path, _yielding, loss="actors take CPU time from the ranks")


if __name__ in os.environ.get(_PRELOADED, "") and sys.platform == "linux":
    _prepare()
