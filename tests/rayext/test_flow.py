from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.data
from ray import cloudpickle
from ray.data._internal.execution.metadata_fetcher import InlineMetadataFetcher
from ray.data._internal.stats import _StatsManager

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import ResourceError
from raypipe.rayext import flow
from raypipe.rayext.cluster import LOCAL_CLUSTER
from raypipe.rayext.flow import InFlight, PoolWatch
from raypipe.streaming.pipeline import splits
from raypipe.streaming.row import host_batches
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.supervisor import start_supervisor


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_a_store_of_ten_times_the_object_store_streams_without_spilling_whoever_is_slow(
    request: pytest.FixtureRequest,
) -> None:
    # A process and a cluster of its own, with an object store of 80 MiB. The short form has a slow trainer only.
    num_cases = 4 if request.config.getoption("--soak") else 2
    script = Path(__file__).parents[2] / "benchmarks" / "flow.py"
    command = [sys.executable, str(script), f"--cases={num_cases}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(*found, sep="\n")
    assert len(found) == num_cases and found[0]["streamed_mib"] >= 10 * found[0]["store_mib"]
    for case in found:
        assert case["micro_batches"] == case["expected"]
        assert case["spilled_mib"] == 0
        # What lies above the micro-batches in flight was let go, and waits for Ray to free it, once a second.
        assert case["peak_mib"] <= case["store_mib"]
        assert case["grown_mib"] < 150


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_executions_under_the_context_and_no_others_read_their_metadata_themselves() -> None:
    context = ray.data.DataContext.get_current().copy()
    flow.configure(context, PoolConfig(), InFlight(2), 1, reads=False, supervisor=None)
    for chosen, is_inline in ((context, True), (ray.data.DataContext.get_current(), False)):
        with ray.data.DataContext.current(chosen):
            dataset: Any = ray.data.range(1)
            rows = iter(dataset.iter_batches(batch_size=None))
            assert next(rows)["id"].tolist() == [0]
            assert isinstance(dataset._current_executor._metadata_fetcher, InlineMetadataFetcher) == is_inline
            assert next(rows, None) is None


def test_a_process_that_gets_the_context_gets_our_autoscalers_with_it(tmp_path: Path) -> None:
    context = ray.data.DataContext.get_current().copy()
    flow.configure(context, PoolConfig(), InFlight(2), 1, reads=False, supervisor=None)
    (tmp_path / "context").write_bytes(cloudpickle.dumps(context))
    code = (
        "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'));"
        "print(sys.modules['ray.data._internal.execution.streaming_executor'].create_actor_autoscaler.__module__)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "context")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["raypipe.rayext.autoscaler"]


@pytest.mark.cluster
def test_a_pool_whose_actors_cannot_start_ends_with_one_error(
    all_cpus_held: None, stores: dict[str, Path]
) -> None:
    spec = StreamSpec.of(
        stores["train"],
        plan=PlanConfig(micro_batch=10),
        transform=TransformConfig(train="small", size=8),
        pool=PoolConfig(stall_timeout_s=5),
    )
    supervisor = start_supervisor(1)
    with pytest.raises(ResourceError) as caught:
        next(host_batches(splits(spec, spec.plan.start(), max_actors=1, supervisor=supervisor)[0]))
    for part in ("the stream stands still", "for 5 s", "1 have not started", "0 CPUs free", "Add CPU nodes"):
        assert part in str(caught.value)
    ((kind, text),) = ray.get(supervisor.events.remote(0))
    assert kind == "fault"
    assert re.match(r"no transform actor runs: 1 wait for 1 CPUs each; the run ends in [0-4] s", text), text


# Room for actors that wait for CPUs. That it mends a real stream, after a real node has gone, tests/faults shows.


class Pool:
    """As much of Ray Data's pool of actors as the watch looks at.

    Args:
        states: of each actor, by its name: whether it is being restarted, and how many tasks it has.
    """

    def __init__(self, **states: tuple[bool, int]) -> None:
        self._running_actors = {
            name: SimpleNamespace(is_restarting=restarting, num_tasks_in_flight=tasks)
            for name, (restarting, tasks) in states.items()
        }

    def per_actor_resource_usage(self) -> Any:
        return SimpleNamespace(cpu=1.0)

    def _release_running_actor(self, actor: str) -> None:
        del self._running_actors[actor]


class Watch(PoolWatch):
    """The watch of one pool, with what it tells the supervisor."""

    def __init__(self, pool: Pool) -> None:
        self.notes: list[str] = []
        settings = {
            "raypipe.supervisor": SimpleNamespace(
                note=SimpleNamespace(remote=lambda text, kind: self.notes.append(text))
            ),
            "raypipe.pool": PoolConfig(stall_timeout_s=60.0),
        }
        super().__init__(SimpleNamespace(get_config=settings.__getitem__), {}, None)
        self.pool = pool

    def left_after(self, seconds: float) -> list[str]:
        """The actors that are left when the watch has looked, so long after it began."""
        self._make_room(SimpleNamespace(_actor_pool=self.pool), self._progress[1] + seconds)
        return list(self.pool._running_actors)


@pytest.fixture
def free_cpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What the cluster has free."""
    free = {"CPU": 0.0}
    monkeypatch.setattr(flow, "ray", SimpleNamespace(available_resources=lambda: free))
    return free


def told(watch: Watch, monkeypatch: pytest.MonkeyPatch, *looks: tuple[float, int, int, bool]) -> list[str]:
    """What is said after looks at a pool.

    Args:
        looks: seconds, actors that run, actors that do not yet, and whether one is queued for CPUs.
    """
    pool = SimpleNamespace(per_actor_resource_usage=lambda: SimpleNamespace(cpu=1.0))
    for seconds, running, restarting, queued in looks:
        monkeypatch.setattr(flow, "_waited_for", lambda queued=queued: {1.0} if queued else set())
        info = SimpleNamespace(running=running, restarting=restarting, pending=0)
        op = SimpleNamespace(_actor_pool=pool, get_actor_info=lambda info=info: info)
        watch._tell_of_none(op, watch._progress[1] + seconds)
    return watch.notes


def test_actors_that_are_all_lost_and_have_no_room_are_told_of_at_once_and_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = [(second, 0, 2, True) for second in range(10, 30)]
    assert told(Watch(Pool()), monkeypatch, (9, 2, 0, False), *looks, (30, 1, 1, True)) == [
        "no transform actor runs: 2 wait for 1 CPUs each; the run ends in 48 s (pool.stall_timeout_s). "
        "Add CPU nodes, or stop other jobs (`ray job list`)",
    ]


def test_actors_that_only_start_are_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    starting = [(second, 0, 2, False) for second in range(20)]
    assert told(Watch(Pool()), monkeypatch, *starting, (20, 0, 2, True), (21, 2, 0, False)) == []
    assert told(Watch(Pool()), monkeypatch, *[(second, 1, 3, True) for second in range(20)]) == []


def test_idle_actors_make_room_for_as_many_as_are_waited_for(free_cpus: dict[str, float]) -> None:
    watch = Watch(Pool(lost=(True, 2), busy=(False, 1), idle=(False, 0), spare=(False, 0)))
    assert watch.left_after(6) == ["lost", "busy", "spare"]
    assert len(watch.notes) == 1 and "1 transform actors that died with work in hand" in watch.notes[0]
    assert watch.left_after(7) == ["lost", "busy", "spare"]  # the CPUs are given time to reach it
    assert watch.left_after(12) == ["lost", "busy"]


def test_none_is_let_go_before_a_restart_has_had_its_time(free_cpus: dict[str, float]) -> None:
    watch = Watch(Pool(lost=(True, 1), idle=(False, 0)))
    assert watch.left_after(4) == ["lost", "idle"]
    assert watch.left_after(6) == ["lost"]


def test_none_is_let_go_where_there_are_cpus(free_cpus: dict[str, float]) -> None:
    free_cpus["CPU"] = 1.0
    watch = Watch(Pool(lost=(True, 1), idle=(False, 0)))
    assert watch.left_after(6) == ["lost", "idle"] and not watch.notes


@pytest.mark.parametrize(
    "states",
    [
        {"lost": (True, 0), "idle": (False, 0)},  # nobody waits for what had no work
        {"lost": (True, 1), "busy": (False, 1)},  # work is not thrown away
        {"busy": (False, 1), "idle": (False, 0)},
    ],
)
def test_none_is_let_go_without_need(states: dict[str, tuple[bool, int]], free_cpus: dict[str, float]) -> None:
    watch = Watch(Pool(**states))
    assert watch.left_after(6) == list(states) and not watch.notes


# A local cluster has no statistics

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
    flow._quiet()
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
    flow._quiet()
    assert {name: vars(_StatsManager)[name] for name in METHODS} == own
