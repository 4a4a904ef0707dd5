"""Free resources of the connected cluster, and its size limits, from its autoscaler or its configuration."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import ray
import yaml
from ray._private import state, worker
from ray.autoscaler.v2.sdk import get_cluster_resource_state

from raypipe.environment import variable
from raypipe.storage.files import read_text

logger = logging.getLogger(__name__)

_OF_RAY_UP = "~/ray_bootstrap_config.yaml"
_MAX_BYTES = 1 << 20
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def resource_state() -> Any:
    """Return the free resources of each node, and pending requests: Ray's ClusterResourceState."""
    driver: Any = worker.global_worker
    return get_cluster_resource_state(driver.gcs_client)


def free_cpus() -> dict[str, float]:
    """Return the free CPUs of each node, by node id."""
    # The state above is a few tenths of a second old.
    free = state.available_resources_per_node()
    return {node: resources.get("CPU", 0.0) for node, resources in free.items()}


def draining() -> dict[str, int]:
    """Return the end of each node that is about to go, by node id: ms since 1970, 0 = unknown."""
    ends: dict[str, int] = state.state.get_draining_nodes()
    return ends


def limits_of(config: dict[str, Any]) -> dict[str, float]:
    """Return the most of each resource that a cluster may have. Pure.

    Args:
        config: a parsed cluster YAML with available_node_types, head_node_type, max_workers.
    """
    head = config["head_node_type"]
    groups = config["available_node_types"]
    most: dict[str, float] = {}
    for name in {
        name for group in groups.values() for name in group.get("resources", {})
    }:
        left = int(config.get("max_workers", 0))
        total = float(groups[head].get("resources", {}).get(name, 0))
        # The nodes with the most of the resource come first, up to the cluster's max_workers.
        for group in sorted(
            groups.values(), key=lambda group: -group.get("resources", {}).get(name, 0)
        ):
            if group is not groups[head] or group.get("max_workers"):
                num = min(left, int(group.get("max_workers", left)))
                total += num * group.get("resources", {}).get(name, 0)
                left -= num
        most[name] = total
    return most


def autoscaler_limits() -> dict[str, float]:
    """Return the most of each resource that the connected cluster may grow to; empty if unknown.

    A driver on the head, where `ray job submit` starts it, finds the cluster's configuration in one of these
    places:

        RAYPIPE_AUTOSCALING_CONFIG       path of a cluster YAML
        ~/ray_bootstrap_config.yaml      cluster YAML that `ray up` leaves on the head
        the RayCluster of this pod       on Kubernetes, from its API server
    """
    config = _configuration()
    return limits_of(config) if config else {}


def has_labelled_type(label: str, value: str) -> bool:
    """Return whether nodes that the autoscaler may add have a label; False if unknown."""
    groups = _configuration().get("available_node_types", {}).values()
    return any((group.get("labels") or {}).get(label) == value for group in groups)


def _configuration() -> dict[str, Any]:
    """Return the cluster YAML, see `autoscaler_limits`; empty if there is none."""
    path = variable("RAYPIPE_AUTOSCALING_CONFIG")
    if not path:
        node_id = ray.get_runtime_context().get_node_id()
        heads = [
            node["NodeID"]
            for node in ray.nodes()
            if "node:__internal_head__" in node["Resources"]
        ]
        if node_id not in heads:
            return {}
        path = str(Path(_OF_RAY_UP).expanduser())
        if not Path(path).is_file():
            return _of_kubernetes()
    config: dict[str, Any] = yaml.safe_load(read_text(path, _MAX_BYTES))
    return config


def _of_kubernetes() -> dict[str, Any]:
    name = os.environ.get("RAY_CLUSTER_NAME", "")
    if not name or not _NAMESPACE_FILE.is_file():
        return {}
    from ray.autoscaler._private.kuberay import autoscaling_config, node_provider

    try:
        client = node_provider.KubernetesHttpApiClient(
            namespace=_NAMESPACE_FILE.read_text().strip()
        )
        cluster = client.get(f"rayclusters/{name}")
        if not cluster["spec"].get("enableInTreeAutoscaling"):
            return {}
        config: dict[str, Any] = (
            autoscaling_config._derive_autoscaling_config_from_ray_cr(cluster)
        )
        limits_of(config)  # raises if the configuration lacks a field
        return config
    except Exception as error:  # the Kubernetes client raises many types, and a run works without the limits
        logger.warning("cannot read the size limits of RayCluster %s: %s", name, error)
        return {}
