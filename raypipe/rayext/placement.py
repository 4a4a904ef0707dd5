"""On which nodes transform actors run: those with a label first, then others that are there.

Ray's autoscaler starts a node for any alternative that an actor has. With "any node" as one, it would start a GPU
node for transforms once the CPU group is full. So the alternative names nodes that are there, by identifiers: no
new node has one of these.
"""

from __future__ import annotations

from typing import Any

import ray

from raypipe.rayext.limits import has_labelled_type

_NODE_ID = "ray.io/node-id"  # a label that Ray gives to each node


def nodes() -> list[dict[str, Any]]:
    """The nodes that are alive, as `ray.nodes` has them."""
    return [node for node in ray.nodes() if node["Alive"]]


def is_labelled(node: dict[str, Any], label_selector: str) -> bool:
    """Whether a node has the label; where none is asked for, each has."""
    label, _, value = label_selector.partition("=")
    return not label or node.get("Labels", {}).get(label) == value


def placement(label_selector: str) -> dict[str, Any]:
    """Ray's options for an actor that prefers nodes with a label, else takes others that are there.

    By default, Ray Data spreads actors over all nodes, GPU hosts included. See `PoolConfig.label_selector`. In a
    cluster without GPUs where the label is unknown, a new node may come for an actor, whatever node that is.
    """
    label, _, value = label_selector.partition("=")
    if not label:
        return {}
    alive = nodes()
    knows = any(is_labelled(node, label_selector) or node["Resources"].get("GPU") for node in alive)
    others = [node["NodeID"] for node in alive if not is_labelled(node, label_selector)]
    fallback: list[dict[str, Any]] = [{"label_selector": {_NODE_ID: f"in({','.join(others)})"}}] if others else []
    if not (knows or has_labelled_type(label, value)):
        fallback = [{"label_selector": {}}]
    return {"label_selector": {label: value}, "fallback_strategy": fallback or None}
