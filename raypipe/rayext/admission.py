"""What the connected cluster may grow to, and what of it other runs have claimed and do not hold yet.

A run takes its trainers first, and its transform actors seconds later. Of two runs that start at one time, where
there is room for one, each could take what the other waits for. So a run claims all that it needs before it takes
any of it: no other run starts on that, and no pool grows into it. Claims are entries in the cluster's key-value
store. A claim counts as long as its job lives, and only for what the job does not hold already.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
import yaml
from ray._private.state import state
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray.core.generated import gcs_pb2
from ray.experimental import internal_kv

from raypipe.storage.whole_file import read_text

logger = logging.getLogger(__name__)

_tables: Any = gcs_pb2  # generated: it has no types
_NAMESPACE = "raypipe"
_PREFIX = "claim:"
_KINDS = ("CPU", "GPU")
_OF_RAY_UP = "~/ray_bootstrap_config.yaml"
_MAX_BYTES = 1 << 20
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

Amounts = Counter[str]
"""Of CPU and GPU."""


@contextlib.contextmanager
def claimed(cpus: float, gpus: float) -> Iterator[None]:
    """Within, this job has a claim to so many CPUs and GPUs."""
    key = f"{_PREFIX}{_this_job()}:{uuid.uuid4().hex}"
    text = json.dumps({"CPU": cpus, "GPU": gpus})
    internal_kv._internal_kv_put(key, text, namespace=_NAMESPACE)
    try:
        yield
    finally:
        if ray.is_initialized():
            internal_kv._internal_kv_del(key, namespace=_NAMESPACE)


def claimed_by_others() -> Amounts:
    """What runs of other jobs have claimed and do not hold yet."""
    claims, missing = _claims(), Amounts()
    if claims:
        held = _held()
        for job, amounts in claims.items():
            missing += amounts - held[job]  # nothing where a job holds more
    return missing


def free_cpus() -> float:
    """CPUs of the nodes that run, which nobody holds, and no run of another job has claimed."""
    return ray.available_resources().get("CPU", 0.0) - claimed_by_others()["CPU"]


def waited_for() -> set[float]:
    """Of how many CPUs each there are actors that no node has room for."""
    worker: Any = ray._private.worker.global_worker
    waiting = get_cluster_resource_state(worker.gcs_client).pending_resource_requests
    return {each.request.resources_bundle.get("CPU", 0.0) for each in waiting}


def _this_job() -> str:
    return ray.get_runtime_context().get_job_id()


def _claims() -> dict[str, Amounts]:
    """What other jobs that live have claimed."""
    found: dict[str, Amounts] = defaultdict(Amounts)
    keys = [key.decode() for key in internal_kv._internal_kv_list(_PREFIX, namespace=_NAMESPACE)]
    if not keys:
        return found
    table = state._connect_and_get_accessor().get_job_table(
        skip_submission_job_info_field=True, skip_is_running_tasks_field=True
    )
    jobs = (_tables.JobTableData.FromString(entry) for entry in table)
    living = {job.job_id.hex() for job in jobs if not job.is_dead}
    for key in keys:
        job = key.split(":")[1]
        if job not in living:  # it was killed
            internal_kv._internal_kv_del(key, namespace=_NAMESPACE)
        elif job != _this_job() and (text := internal_kv._internal_kv_get(key, namespace=_NAMESPACE)):
            found[job].update(json.loads(text))
    return found


def _held() -> dict[str, Amounts]:
    """What the actors and the placement groups of each job hold. Tasks, which come and go, are left out."""
    held: dict[str, Amounts] = defaultdict(Amounts)
    accessor = state._connect_and_get_accessor()
    for entry in accessor.get_placement_group_table():
        group = _tables.PlacementGroupTableData.FromString(entry)
        if group.state == _tables.PlacementGroupTableData.CREATED:
            for bundle in group.bundles:
                held[group.creator_job_id.hex()].update(_amounts(bundle.unit_resources))
    table, starting = _tables.ActorTableData, []
    for entry in accessor.get_actor_table(None, None):
        actor = table.FromString(entry)
        if actor.state == table.ALIVE:
            held[actor.job_id.hex()].update(_amounts(actor.required_resources))
        elif actor.state in (table.PENDING_CREATION, table.RESTARTING):
            starting.append(actor)
    queued = waited_for() if starting else set()
    for actor in starting:  # one that has its CPUs is no longer queued for them
        amounts = _amounts(actor.required_resources)
        if amounts and amounts["CPU"] not in queued:
            held[actor.job_id.hex()].update(amounts)
    return held


def _amounts(resources: Mapping[str, float]) -> Amounts:
    return Amounts({kind: resources[kind] for kind in _KINDS if resources.get(kind)})


# What it may grow to


def limits_of(config: dict[str, Any]) -> dict[str, float]:
    """The most of each resource that a cluster may have. Pure.

    Args:
        config: a cluster YAML as dicts and lists: available_node_types, head_node_type, max_workers.
    """
    head = config["head_node_type"]
    groups = config["available_node_types"]
    most: dict[str, float] = {}
    for name in {name for group in groups.values() for name in group.get("resources", {})}:
        left = int(config.get("max_workers", 0))
        total = float(groups[head].get("resources", {}).get(name, 0))
        # The richest nodes first, as many as the cluster may have in all.
        for group in sorted(groups.values(), key=lambda group: -group.get("resources", {}).get(name, 0)):
            if group is not groups[head] or group.get("max_workers"):
                num = min(left, int(group.get("max_workers", left)))
                total += num * group.get("resources", {}).get(name, 0)
                left -= num
        most[name] = total
    return most


def autoscaler_limits() -> dict[str, float]:
    """The most of each resource that the connected cluster may grow to; empty where nothing says so.

    Ray can tell, but its open-source autoscalers never tell it. A driver on the head, where `ray job submit` puts
    it, finds the configuration that the cluster was started with in one of these places:

        RAYPIPE_AUTOSCALING_CONFIG       a cluster YAML, by its path
        ~/ray_bootstrap_config.yaml      the one that `ray up` leaves on the head
        the RayCluster of this pod       on Kubernetes, from its API server
    """
    told = ray._private.state.state.get_max_resources_from_cluster_config()
    if told:
        return {name: float(amount) for name, amount in told.items()}
    path = os.environ.get("RAYPIPE_AUTOSCALING_CONFIG", "")
    if not path:
        here = ray.get_runtime_context().get_node_id()
        head = [node["NodeID"] for node in ray.nodes() if "node:__internal_head__" in node["Resources"]]
        if here not in head:
            return {}
        path = str(Path(_OF_RAY_UP).expanduser())
        if not Path(path).is_file():
            return _of_kubernetes()
    return limits_of(yaml.safe_load(read_text(path, _MAX_BYTES)))


def _of_kubernetes() -> dict[str, float]:
    name = os.environ.get("RAY_CLUSTER_NAME", "")
    if not name or not _NAMESPACE_FILE.is_file():
        return {}
    from ray.autoscaler._private.kuberay import autoscaling_config, node_provider

    try:
        client = node_provider.KubernetesHttpApiClient(namespace=_NAMESPACE_FILE.read_text().strip())
        cluster = client.get(f"rayclusters/{name}")
        if not cluster["spec"].get("enableInTreeAutoscaling"):
            return {}
        return limits_of(autoscaling_config._derive_autoscaling_config_from_ray_cr(cluster))
    except Exception as error:  # whatever a client of another system raises; the run can do without its answer
        logger.warning("the API server does not tell what RayCluster %s may grow to: %s", name, error)
        return {}
