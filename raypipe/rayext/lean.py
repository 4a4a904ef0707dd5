"""Does without an actor of Ray Data's that a cluster of one machine, which ends with its driver, has no use for.

It collects statistics for the dashboard, and there is none. Every execution waits for its start, for an identifier
of a dataset, and sends it all figures of all operators once a second.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from ray.data._internal.stats import _StatsManager

from raypipe.rayext.cluster import is_local


def configure() -> None:
    """Let no execution of this process start it, where the cluster is a local one."""
    if not is_local():
        return
    for name, instead in _INSTEAD.items():
        if not hasattr(_StatsManager, name):
            raise AttributeError(f"ray.data has no {name}: raypipe.rayext.lean does not fit this version of Ray")
        setattr(_StatsManager, name, staticmethod(instead))


def _nothing(*_: Any, **__: Any) -> None:
    pass


_INSTEAD: dict[str, Callable[..., Any]] = {
    "gen_dataset_id_from_stats_actor": lambda: uuid.uuid4().hex,
    "register_dataset_to_stats_actor": _nothing,
    "update_execution_metrics": _nothing,
    "update_iteration_metrics": _nothing,
}
