"""Whether the connected cluster is one that raypipe has started on this machine, which ends with its run."""

from __future__ import annotations

import os

import ray

LOCAL_CLUSTER = "RAYPIPE_LOCAL_CLUSTER"
"""Set in the environment of all processes of a cluster that `raypipe.rayext.cluster.connect` has started."""

# Of the node that this process has started last.
_own_node = ""


def note_start() -> None:
    """Note that this process has just started the cluster that it is connected to."""
    global _own_node
    _own_node = ray.get_runtime_context().get_node_id()


def started_here() -> bool:
    """Whether this process has started the connected cluster, which ends with it."""
    return ray.is_initialized() and ray.get_runtime_context().get_node_id() == _own_node


def is_local() -> bool:
    """Whether raypipe has started the connected cluster, in this process or in its driver."""
    return started_here() or LOCAL_CLUSTER in os.environ
