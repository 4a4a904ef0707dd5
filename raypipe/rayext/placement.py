"""Placement of transform actors: nodes with a label first, then other existing nodes.

Ray's autoscaler starts a node for any alternative of an actor. With "any node" as an alternative, it would start a
GPU node for transforms once the CPU group is full. So the alternative lists existing nodes by id, which no new
node has.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypipe.rayext.cluster_state import has_labelled_type, nodes

_NODE_ID = "ray.io/node-id"  # a label that Ray gives to each node
LABEL_KEY = "raypipe"
LABEL_VALUE = "transform"
"""The label of nodes for transforms, which the YAML of a cluster sets; see docs/clusters.md."""


def is_labelled(node: dict[str, Any]) -> bool:
    """Return whether a node has the label."""
    return node.get("Labels", {}).get(LABEL_KEY) == LABEL_VALUE


# The placement group that holds CPUs for what this process starts, as a trial of Ray Tune has one.
_group: PlacementGroup | None = None


def remember_group() -> None:
    """Remember the placement group of the calling thread's task or actor: other threads do not know it."""
    global _group
    _group = None
    if not ray.is_initialized():
        return
    context = ray.get_runtime_context()
    group = get_current_placement_group()
    if group and context.should_capture_child_tasks_in_placement_group:
        held = sum(bundle.get("CPU", 0.0) for bundle in group.bundle_specs)
        if held - context.get_assigned_resources().get("CPU", 0.0) >= 1:
            _group = group


def cpus_name() -> str:
    """Return Ray's name of the CPUs that actors of this process get: the cluster's, or those of its group."""
    return f"CPU_group_{_group.id.hex()}" if _group else "CPU"


def placement() -> dict[str, Any]:
    """Return Ray's options for an actor that prefers nodes with the label, and falls back to other existing nodes.

    By default, Ray Data spreads actors over all nodes, including GPU hosts. In a cluster without GPUs where the
    label is unknown, the autoscaler may add any node for an actor. In a placement group with CPUs for them, actors
    are in the group.
    """
    if _group:
        strategy = PlacementGroupSchedulingStrategy(_group)
        return {"ray_remote_args_fn": lambda: {"scheduling_strategy": strategy}}
    alive = nodes()
    is_label_used = any(
        is_labelled(node) or node["Resources"].get("GPU") for node in alive
    )
    unlabelled = [node["NodeID"] for node in alive if not is_labelled(node)]
    fallback: list[dict[str, Any]] = []
    if unlabelled:
        fallback = [{"label_selector": {_NODE_ID: f"in({','.join(unlabelled)})"}}]
    if not (is_label_used or has_labelled_type(LABEL_KEY, LABEL_VALUE)):
        fallback = [{"label_selector": {}}]
    return {
        "label_selector": {LABEL_KEY: LABEL_VALUE},
        "fallback_strategy": fallback or None,
    }
