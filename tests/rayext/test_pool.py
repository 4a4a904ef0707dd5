"""The pool and the cluster of a real stream, on nodes that Ray's own autoscaler adds and removes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import is_soak

from raypipe.config import PoolConfig
from raypipe.errors import RaypipeError, ResourceError
from raypipe.rayext import pool
from raypipe.rayext.pool import Decision, PoolKeeper, PoolSizer

RULES = PoolConfig(min_actors=1, max_actors=16, grow_after_s=5)
BENCH = Path(__file__).parents[1] / "autoscale_bench.py"


@pytest.mark.cluster
def test_nodes_come_and_go_for_a_starved_stream_not_a_slow_trainer(
    request: pytest.FixtureRequest,
) -> None:
    soak = is_soak(request.config)
    command = [sys.executable, str(BENCH), "3" if soak else "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # of nodes that were not there yet, and one more
    assert found["max_actors"] == (7 if soak else 5)
    # the GPU group never grows for actors
    assert not any(seen["gpus"] for seen in found["timeline"])
    # no nodes before, between and after the streams
    assert all(found["reached"].values()), found["reached"]

    def most(what: str, phase: str) -> int:
        return max(seen[what] for seen in found["timeline"] if seen["phase"] == phase)

    assert (
        most("nodes", "the trainer takes all") >= 2
        and most("actors", "the trainer takes all") >= 3
    )
    assert most("actors", "the trainer is slow") >= 3  # at first; and at last:
    at_last = [
        seen for seen in found["timeline"] if seen["phase"] == "the trainer is slow"
    ][-1]
    assert at_last["actors"] == 1
    told = "\n".join(found["events"])
    assert "of the actors were busy" in told
    assert re.search(r"→ 1 transform actors: the ranks waited for \d%", told)


# The rule


def watch(
    seconds: float,
    *,
    waiting: float,
    active: int,
    running: int,
    pending: int = 0,
    rules: PoolConfig = RULES,
    sizer: PoolSizer | None = None,
    start: float = 0.0,
) -> list[tuple[float, Decision]]:
    """What is decided when things stay as they are, looked at ten times a second."""
    sizer = sizer or PoolSizer(rules, start)
    found = []
    for tick in range(1, round(seconds * 10) + 1):
        now = start + tick / 10
        decision = sizer.observe(
            now, waiting=waiting, active=active, running=running, pending=pending
        )
        if decision:
            found.append((now, decision))
    return found


def test_a_busy_pool_that_is_awaited_grows_by_the_factor() -> None:
    ((when, decision), *_) = watch(6, waiting=1, active=4, running=4)
    assert when == pytest.approx(5, abs=0.11) and decision.size == 8
    assert (
        decision.reason
        == "the ranks waited for 100% of the last 5 s, and 100% of the actors were busy"
    )


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param(
            {"waiting": 0, "active": 8, "running": 8},
            id="a busy pool that nobody waits for",
        ),
        pytest.param(
            {"waiting": 1, "active": 3, "running": 8},
            id="idle actors: the reader or a straggler is slow",
        ),
        pytest.param(
            {"waiting": 1, "active": 4, "running": 4, "pending": 4},
            id="more are coming already",
        ),
        pytest.param(
            {"waiting": 0.1, "active": 8, "running": 8}, id="waiting within the limit"
        ),
    ],
)
def test_a_pool_that_more_actors_would_not_help_does_not_grow(
    seen: dict[str, float],
) -> None:
    assert [d for _, d in watch(50, **seen) if d.size > 8] == []  # type: ignore[arg-type]


def test_after_the_cool_down_the_pool_shrinks_to_busy_actors_and_a_few() -> None:
    ((when, decision),) = watch(61, waiting=0, active=4, running=16)
    assert when == pytest.approx(60, abs=0.11) and decision.size == 5
    assert (
        decision.reason
        == "the ranks waited for 0% of the last 60 s, in which 4.0 actors were busy"
    )


def test_a_paused_trainer_leaves_the_least_actors() -> None:
    assert [d.size for _, d in watch(61, waiting=0, active=0, running=16)] == [1]
    rules = PoolConfig(min_actors=3, max_actors=16)
    assert [
        d.size for _, d in watch(61, waiting=0, active=0, running=16, rules=rules)
    ] == [3]


@given(
    st.lists(
        st.tuples(
            st.floats(0, 1),
            st.integers(0, 20),
            st.integers(1, 20),
            st.integers(0, 20),
            st.floats(0.01, 30),
        ),
        max_size=50,
    ),
    st.integers(1, 5),
    st.integers(0, 20),
)
def test_no_history_leads_out_of_the_bounds(
    history: list[tuple], fewest: int, more: int
) -> None:
    rules = PoolConfig(min_actors=fewest, max_actors=fewest + more)
    sizer, now = PoolSizer(rules, 0), 0.0
    for waiting, active, running, pending, seconds in history:
        now += seconds
        decision = sizer.observe(
            now,
            waiting=waiting,
            active=min(active, running),
            running=running,
            pending=pending,
        )
        if decision:
            grows = decision.size > running + pending
            assert decision.size != running + pending
            assert (
                decision.size <= rules.max_actors
                if grows
                else decision.size >= rules.min_actors
            )


# The keeper. That others make the blocks of lost actors, test_lost_blocks shows, and tests/faults for lost nodes.


class Pool:
    """As much of Ray Data's pool of actors as the keeper looks at.

    Args:
        states: of each actor, by its name: whether it is being restarted, how many tasks it has, and its node.
    """

    def __init__(self, **states: tuple[bool, int] | tuple[bool, int, str]) -> None:
        self._running_actors = {
            name: SimpleNamespace(
                is_restarting=restarting,
                num_tasks_in_flight=tasks,
                actor_location="".join(node) or "cpu",
            )
            for name, (restarting, tasks, *node) in states.items()
        }

    def min_size(self) -> int:
        return 1

    def current_size(self) -> int:
        return len(self._running_actors)

    def _try_remove_pending_actor(self) -> bool:
        return False

    def num_restarting_actors(self) -> int:
        return sum(state.is_restarting for state in self._running_actors.values())

    def per_actor_resource_usage(self) -> Any:
        return SimpleNamespace(cpu=1.0)

    def _release_running_actor(self, actor: str) -> None:
        del self._running_actors[actor]


class Keeper(PoolKeeper):
    """The keeper of one pool, with what it tells the supervisor."""

    def __init__(self, pool: Pool) -> None:
        self.notes: list[str] = []
        self.scaled: list[str] = []
        supervisor = SimpleNamespace(
            note=SimpleNamespace(remote=lambda text, kind: self.notes.append(text)),
            pool_scaled=SimpleNamespace(remote=self.scaled.append),
            pool_waits=SimpleNamespace(remote=self.scaled.append),
            pool_lacks_room=SimpleNamespace(remote=bool),
        )
        self.op = SimpleNamespace(get_autoscaling_actor_pools=lambda: [pool])
        lost: Any = None
        rules = PoolConfig(stall_timeout_s=60.0)
        super().__init__(self.op, lost, rules, supervisor, 0.0)
        self.pool = pool
        self.grown: list[int] = []

    def _grow(self, num: int, reason: str) -> None:
        self.grown.append(num)


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster of a CPU node, which has the label, and a GPU node; no CPU is free."""
    monkeypatch.setattr(pool, "_free_cpus", lambda: 0.0)
    there = [
        {
            "NodeID": "cpu",
            "Labels": {"raypipe": "transform"},
            "Resources": {"CPU": 8.0},
        },
        {"NodeID": "gpu", "Labels": {}, "Resources": {"CPU": 8.0, "GPU": 1.0}},
    ]
    monkeypatch.setattr(pool, "nodes", lambda: there)
    monkeypatch.setattr(pool, "_pending_cpus", lambda: {1.0})
    monkeypatch.setattr(pool, "another_starts", lambda run: False)


def told(
    keeper: Keeper,
    monkeypatch: pytest.MonkeyPatch,
    *looks: tuple[float, int, int, bool],
) -> list[str]:
    """What is said after looks at a pool.

    Args:
        looks: seconds, actors that run, actors that do not yet, and whether one is queued for CPUs.
    """
    for seconds, running, restarting, queued in looks:
        monkeypatch.setattr(
            pool, "_pending_cpus", lambda queued=queued: {1.0} if queued else set()
        )
        info = SimpleNamespace(running=running, restarting=restarting, pending=0)
        keeper.op.get_actor_info = lambda info=info: info
        keeper._report_no_actors(seconds)
    return keeper.notes


def test_the_loss_of_all_actors_without_room_is_told_at_once_and_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = [(second, 0, 2, True) for second in range(10, 30)]
    text = (
        "no transform actor runs: 2 wait for 1 CPUs each; the run ends in 48 s (pool.stall_timeout_s). "
        "Add CPU nodes, or stop other jobs (`ray job list`)"
    )
    looks = [(9, 2, 0, False), *looks, (30, 1, 1, True)]
    starting, running = Keeper(Pool()), Keeper(Pool())
    running._finished = 1
    assert told(running, monkeypatch, *looks) == [text]
    assert told(starting, monkeypatch, *looks) == [], "a wait for nodes is no fault"
    assert starting.scaled == [text]


def test_a_stream_stalls_while_a_rank_waits_and_not_while_trainers_pause() -> None:
    keeper, active = Keeper(Pool()), [0]
    keeper.op.num_active_tasks = lambda: active[0]
    keeper.op.get_actor_info = lambda: SimpleNamespace(
        running=2, restarting=0, pending=0
    )
    for now in (0, 50, 1000):  # both ranks pause, and the buffer is full
        keeper._end_stall(now, finished=8, waiting=8, ranks_waiting=0.0)
    keeper._end_stall(1060, finished=8, waiting=4, ranks_waiting=0.5)
    with pytest.raises(
        RaypipeError, match=r"for 60 s .*, while 4 finished blocks wait for other"
    ):
        keeper._end_stall(1061, finished=8, waiting=4, ranks_waiting=0.5)
    for active[0], waiting in ((1, 4), (0, 0)):  # an actor hangs, or the reader
        keeper._end_stall(1060, finished=7, waiting=waiting, ranks_waiting=0.5)
        keeper._end_stall(1061, finished=8, waiting=waiting, ranks_waiting=0.5)
        with pytest.raises(
            ResourceError, match=r"for 60 s .* Transform actors: 2 run, 0 died"
        ):
            keeper._end_stall(1122, finished=8, waiting=waiting, ranks_waiting=0.5)


@pytest.mark.parametrize(
    ("restarts", "starts"), [(True, False), (False, True), (False, False)]
)
def test_no_pool_grows_while_its_dead_actors_or_another_run_need_cpus(
    restarts: bool, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "another_starts", lambda run: starts)
    states = Pool(busy=(False, 2), dead=(restarts, 1))
    sizes = {
        "min_size": 1,
        "current_size": 2,
        "num_running_actors": 2,
        "num_pending_actors": 0,
    }
    for name, number in (sizes | {"num_active_actors": 2}).items():
        setattr(states, name, lambda number=number: number)
    keeper = Keeper(states)
    keeper._rules = PoolConfig(max_actors=8, grow_after_s=5.0)
    for now in range(12):
        keeper._size(float(now), finished=9, ranks_waiting=1.0)
    assert bool(keeper.grown) == bool(keeper.scaled) == (not (restarts or starts))
    keeper.grown.clear()
    keeper._actors = 8
    keeper._start_others()
    assert bool(keeper.grown) == (not starts)


def test_no_pool_shrinks_while_no_rank_takes_a_block() -> None:
    sizer, still = PoolSizer(RULES, 0), [float(now) for now in range(1, 1000)]
    looks = [
        sizer.observe(now, waiting=0, active=1, running=8, pending=0, moved=False)
        for now in still
    ]
    assert not any(looks), (
        "trainers that wait for a checkpoint do not say how many actors they need"
    )
    assert (
        sizer.observe(1000.0, waiting=0, active=1, running=8, pending=0, moved=True)
        is None
    )
    slow = [
        sizer.observe(1000.0 + 20 * n, waiting=0, active=1, running=8, pending=0)
        for n in range(1, 40)
    ]
    assert any(slow), "slow trainers that take blocks do"


# Who goes first, and where actors run


def test_a_pool_shrinks_on_nodes_without_the_label_first() -> None:
    keeper = Keeper(
        Pool(
            a=(False, 0, "cpu"),
            b=(False, 0, "cpu"),
            c=(False, 0, "gpu"),
            d=(False, 0, "gpu"),
        )
    )
    keeper._shrink(2)
    assert list(keeper.pool._running_actors) == ["a", "b"]


def test_the_last_actor_that_runs_stays_while_others_only_restart() -> None:
    keeper = Keeper(
        Pool(lost=(True, 1), idle=(False, 0), spare=(False, 0), more=(True, 0))
    )
    keeper._shrink(3)  # to one: not the one that does not run
    assert list(keeper.pool._running_actors) == ["lost", "spare"]


# Other streams of the job
