"""Imports of a run's modules in the first worker processes of a local cluster, before Ray gives them any work.

Ray starts a worker for each CPU in advance. Ray Train's controller gets one, and the trainers get others once the
controller has imported Ray Train; then each imports torch. If these workers import the modules at their start, all
do so at the same time, while the driver imports Ray Train itself.

Each worker imports this module at its start, by Ray's setting RAY_preload_python_modules.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Sequence
from pathlib import Path

from raypipe.environment import variable
from raypipe.rayext.ray_private import find_private

_ASKED = "RAYPIPE_EARLY_IMPORTS"


def environment(num: int, modules: Sequence[str]) -> dict[str, str]:
    """Return variables for the processes of a local cluster whose first `num` workers import these modules."""
    return {_ASKED: f"{num}:{','.join(modules)}"}


def import_early(asked: str, folder: Path) -> list[str]:
    """Import the modules if this process is one of the first.

    Args:
        asked: value of the variable.
        folder: folder of the cluster, where each of the first processes makes a file.

    Returns:
        The modules that were imported.
    """
    num, _, modules = asked.partition(":")
    for place in range(int(num)):
        with contextlib.suppress(FileExistsError):
            (folder / f"raypipe-early-{place}").touch(exist_ok=False)
            return [module for module in modules.split(",") if _imported(module)]
    return []


def _imported(module: str) -> bool:
    # the process that needs the module says what is wrong with it
    with contextlib.suppress(Exception):
        importlib.import_module(module)
        return True
    return False


def _prepare(asked: str) -> None:
    node = find_private(
        "ray._private.worker._global_node", "a run's start takes seconds more"
    )
    if node:
        # libraries read their number of threads as they are loaded; the train function sets it as Ray has it then
        is_set = "OMP_NUM_THREADS" in os.environ
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        try:
            import_early(asked, Path(node.get_session_dir_path()))
        finally:
            if not is_set:
                del os.environ["OMP_NUM_THREADS"]


if __name__ in os.environ.get("RAY_preload_python_modules", "") and variable(_ASKED):  # noqa: SIM112  Ray's name
    _prepare(variable(_ASKED))
