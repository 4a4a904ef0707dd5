from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from raypipe.rayext.cluster import cluster_resources
from raypipe.rayext.node_limits import limits_of

CLUSTER: dict[str, Any] = {
    "head_node_type": "head",
    "max_workers": 10,
    "available_node_types": {
        "head": {"resources": {"CPU": 0}, "max_workers": 0},
        "cpu": {"resources": {"CPU": 32}, "max_workers": 8},
        "gpu": {"resources": {"CPU": 28, "GPU": 4}, "max_workers": 2},
    },
}


def test_a_cluster_may_have_the_most_of_each_kind() -> None:
    assert limits_of(CLUSTER) == {"CPU": 8 * 32 + 2 * 28, "GPU": 2 * 4}


def test_the_total_number_of_nodes_bounds_them_and_the_richest_count_first() -> None:
    assert limits_of({**CLUSTER, "max_workers": 9}) == {"CPU": 8 * 32 + 28, "GPU": 8}
    assert limits_of({**CLUSTER, "max_workers": 1}) == {"CPU": 32, "GPU": 4}


def test_the_head_offers_what_it_has_once() -> None:
    types = {**CLUSTER["available_node_types"], "head": {"resources": {"CPU": 8}, "max_workers": 0}}
    assert limits_of({**CLUSTER, "available_node_types": types})["CPU"] == 8 + 8 * 32 + 2 * 28


@pytest.mark.cluster
def test_a_run_counts_on_the_nodes_that_the_autoscaler_may_add(
    all_cpus_held: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = cluster_resources()
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(CLUSTER))
    monkeypatch.setenv("RAYPIPE_AUTOSCALING_CONFIG", str(path))
    later = cluster_resources()
    assert (now.cpus, now.gpus) == (4, 0)
    assert (later.cpus, later.gpus) == (8 * 32 + 2 * 28, 8)
    assert later.free_cpus == later.cpus - (now.cpus - now.free_cpus)
