"""State of the connected cluster: nodes, free resources, spilled bytes, and the limits of its autoscaler."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import ray
import yaml
from ray._private import state

from raypipe.environment import variable
from raypipe.rayext.processes import is_ray_worker
from raypipe.rayext.ray_private import find_private
from raypipe.storage.files import read_text

logger = logging.getLogger(__name__)

LOCAL_CLUSTER = "RAYPIPE_LOCAL_CLUSTER"
"""Variable in the environment of all processes of a cluster that `connect` started."""

_own_node = ""  # id of the node that this process started last

_OF_RAY_UP = "~/ray_bootstrap_config.yaml"
_MAX_BYTES = 1 << 20
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_NICE = 5
_ANSWER_S = 5.0  # longest wait for a node's statistics


def remember_own_node() -> None:
    """Remember that this process has started the node to which it is connected."""
    global _own_node
    _own_node = ray.get_runtime_context().get_node_id()


def started_here() -> bool:
    """Return whether this process started the connected cluster, which ends with the process."""
    return ray.is_initialized() and ray.get_runtime_context().get_node_id() == _own_node


def is_local() -> bool:
    """Return whether `connect` started the connected cluster on this machine, here or in a worker's driver."""
    return started_here() or LOCAL_CLUSTER in os.environ


def nodes() -> list[dict[str, Any]]:
    """Return the living nodes, as dicts from `ray.nodes`."""
    return [node for node in ray.nodes() if node["Alive"]]


def resource_state() -> Any:
    """Return the free resources of each node, and pending requests: Ray's ClusterResourceState."""
    from ray.autoscaler.v2.sdk import get_cluster_resource_state

    worker: Any = ray.get_runtime_context().worker
    return get_cluster_resource_state(worker.gcs_client)


def free_cpus() -> dict[str, float]:
    """Return the free CPUs of each node, by node id."""
    # `resource_state` is a few tenths of a second old.
    free = state.available_resources_per_node()
    return {node: resources.get("CPU", 0.0) for node, resources in free.items()}


def object_store_of(node: str) -> float:
    """Return the bytes of a node's object store; 0 = unknown."""
    for of_node in nodes():
        if of_node["NodeID"] == node:
            return float(of_node["Resources"].get("object_store_memory", 0.0))
    return 0.0


def draining() -> dict[str, int]:
    """Return the end of each node that is about to go, by node id: ms since 1970, 0 = unknown."""
    ends: dict[str, int] = state.state.get_draining_nodes()
    return ends


def spilled_bytes() -> int:
    """Return the bytes that all nodes have written to disk for lack of memory since the cluster began.

    It is 0 if Ray does not tell.
    """
    if not ray.is_initialized():
        return 0
    loss = "a diagnosis does not name a full object store"
    connect = find_private("ray._private.internal_api.get_state_from_address", loss)
    ask = find_private("ray._private.internal_api.get_memory_info_reply", loss)
    if not (connect and ask):
        return 0
    with contextlib.suppress(Exception):  # a node that does not answer
        head = connect(ray.get_runtime_context().gcs_address)
        reply = ask(head, timeout_seconds=_ANSWER_S)
        return int(reply.store_stats.spilled_bytes_total)
    return 0


def limits_of(config: dict[str, Any]) -> dict[str, float]:
    """Return the most of each resource that a cluster may have. Pure.

    Args:
        config: a parsed cluster YAML with available_node_types, head_node_type, max_workers.
    """
    head = config["head_node_type"]
    groups = config["available_node_types"]
    limits: dict[str, float] = {}
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
        limits[name] = total
    return limits


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
    kuberay = "ray.autoscaler._private.kuberay"
    loss = "a run does not know how far its RayCluster can grow"
    connect = find_private(f"{kuberay}.node_provider.KubernetesHttpApiClient", loss)
    derive = find_private(
        f"{kuberay}.autoscaling_config._derive_autoscaling_config_from_ray_cr", loss
    )
    if not (connect and derive):
        return {}
    try:
        client = connect(namespace=_NAMESPACE_FILE.read_text().strip())
        cluster = client.get(f"rayclusters/{name}")
        if not cluster["spec"].get("enableInTreeAutoscaling"):
            return {}
        config: dict[str, Any] = derive(cluster)
        limits_of(config)  # raises if the configuration lacks a field
        return config
    # an answer that is late, refused, or of another form: a run works without the limits
    except (OSError, LookupError, TypeError, ValueError) as error:
        logger.warning("cannot read the size limits of RayCluster %s: %s", name, error)
        return {}


def yield_cpus() -> None:
    """Let the calling worker have a third of a rank's share while CPUs are short, on a local cluster.

    A process cannot take its priority back without privileges, so it keeps this.
    """
    is_local_worker = is_ray_worker() and LOCAL_CLUSTER in os.environ
    if is_local_worker and os.getpriority(os.PRIO_PROCESS, 0) == 0:
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
