from __future__ import annotations

import pytest
from ray.data._internal.stats import _StatsManager

from raypipe.rayext import lean
from raypipe.rayext.cluster import LOCAL_CLUSTER

METHODS = [name for name in vars(_StatsManager) if not name.startswith("_")]


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Ray's own methods, which are put back afterwards."""
    methods = {name: vars(_StatsManager)[name] for name in METHODS}
    for name, method in methods.items():
        monkeypatch.setattr(_StatsManager, name, method)
    return methods


def test_in_a_local_cluster_nothing_asks_for_the_actor(
    manager: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOCAL_CLUSTER, "1")
    monkeypatch.setattr("ray.data._internal.stats.get_or_create_stats_actor", lambda: 1 / 0)
    lean.configure()
    first, second = (_StatsManager.gen_dataset_id_from_stats_actor() for _ in range(2))
    assert first != second and len(first) == 32
    for name in set(METHODS) - {"gen_dataset_id_from_stats_actor"}:
        getattr(_StatsManager, name)(1, 2, 3)


def test_in_any_other_cluster_ray_keeps_its_statistics(
    manager: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(LOCAL_CLUSTER, raising=False)
    monkeypatch.setattr("raypipe.rayext.cluster.started_here", lambda: False)
    own = {name: vars(_StatsManager)[name] for name in METHODS}
    lean.configure()
    assert {name: vars(_StatsManager)[name] for name in METHODS} == own
