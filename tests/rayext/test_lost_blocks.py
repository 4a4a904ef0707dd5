"""Blocks whose actor or node is gone: others make them, in their place of the order."""

from __future__ import annotations

import functools
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import without_ray
from signalled import own_processes

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.rayext import lost_blocks, pool
from raypipe.rayext.lost_blocks import LostBlocks
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.opening import open_stream
from raypipe.streaming.pipeline import splits
from raypipe.streaming.row import host_batches
from raypipe.streaming.supervisor import start_supervisor

LARGE = 1 << 20


@dataclass(frozen=True)
class Entry:
    ref: str
    metadata: Any


@dataclass(frozen=True)
class Bundle:
    """One of Ray Data's, of one block."""

    blocks: tuple[Entry, ...]
    output_split_idx: int | None = None


@dataclass(frozen=True)
class Made:
    """What an actor yields of one task."""

    name: str
    actor: str


class Actor:
    """An actor of the pool, which notes the inputs that it is given."""

    def __init__(self, name: str) -> None:
        self._actor_id = name
        self.given = list[Made]()
        self.submit = SimpleNamespace(
            options=lambda num_returns: SimpleNamespace(
                remote=functools.partial(self._remote, num_returns)
            )
        )

    def _remote(
        self, num_returns: Any, context: Any, task: Any, *blocks: str, **_: Any
    ) -> Any:
        made = Made(f"{blocks[0]} by {self._actor_id}", self._actor_id)
        self.given.append(made)
        return made if num_returns == "streaming" else (made.name, "metadata")


class Task:
    """A block in work, of one of Ray Data's operators."""

    def __init__(self, made: Made) -> None:
        self._streaming_gen = made
        self.ended = list[Any]()

    def get_task_id(self) -> Any:
        return SimpleNamespace(actor_id=lambda: self._streaming_gen.actor)

    def _task_done_callback(self, *about: Any) -> None:
        self.ended.append(about)


class Execution:
    """As much of an execution as its lost blocks are found in: actors by name, on nodes of the same letter."""

    def __init__(self, *names: str) -> None:
        self.actors = {name: Actor(name) for name in names}
        states = {
            actor: SimpleNamespace(
                is_restarting=False, num_tasks_in_flight=1, actor_location=name[0]
            )
            for name, actor in self.actors.items()
        }
        self.states = {actor._actor_id: state for actor, state in states.items()}
        self.pool = SimpleNamespace(
            _running_actors=states, refresh_actor_state=self.refresh
        )
        self.queue = list[Bundle]()
        self.output = SimpleNamespace(pop=lambda rank=None: self.queue.pop(0))
        self.op = SimpleNamespace(
            get_autoscaling_actor_pools=lambda: [self.pool],
            _output_queue=SimpleNamespace(
                add=lambda bundle, key: self.queue.append(bundle)
            ),
            _metrics=SimpleNamespace(_running_tasks={}),
            _data_tasks={},
            name="pool",
            target_max_block_size_override=None,
            _ray_actor_task_remote_args={},
            _data_context_ref=None,
            get_map_task_kwargs=dict,
        )
        self.refresh()
        self.lost = LostBlocks(self.op, self.output)

    def refresh(self) -> None:
        """Ray Data looks which actors run."""
        self.pool._alive_actors_to_in_flight_tasks_heap = {
            actor: state.num_tasks_in_flight
            for actor, state in self.pool._running_actors.items()
            if not state.is_restarting
        }

    def begin(self, number: int, actor: str, num_outputs: int = 0) -> Task:
        """Give an actor a task."""
        inputs = SimpleNamespace(block_refs=[f"in{number}"], slices=None)
        self.op._metrics._running_tasks[number] = SimpleNamespace(
            inputs=inputs, num_outputs=num_outputs
        )
        task = Task(Made(f"in{number} by {actor}", actor))
        self.op._data_tasks[number] = task
        return task

    def finish(self, number: int, size: int = LARGE) -> None:
        """The actor of a task has finished it."""
        made = self.op._data_tasks.pop(number)._streaming_gen
        node = SimpleNamespace(node_id=made.actor[0])
        metadata = SimpleNamespace(size_bytes=size, exec_stats=node)
        bundle = Bundle((Entry(made.name, metadata),))
        self.op._output_queue.add(bundle, key=number)

    def take(self) -> str:
        """A rank takes a block."""
        return self.output.pop().blocks[0].ref


@pytest.fixture(autouse=True)
def cancelled(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """The tasks of lost actors that Ray is told to repeat for nobody."""
    tasks = list[Any]()
    if request.node.get_closest_marker("cluster") is None:
        monkeypatch.setattr(lost_blocks.ray, "cancel", tasks.append)
    return tasks


def test_blocks_in_work_on_a_lost_node_go_to_others_with_their_numbers(
    cancelled: list[Any],
) -> None:
    execution = Execution("a1", "a2", "b1", "b2")
    tasks = [execution.begin(n, name) for n, name in enumerate(execution.actors)]
    assert execution.lost.make_again({"a", "b"}) == 0
    assert execution.lost.make_again({"b"}) == 2
    assert [task._streaming_gen.actor for task in tasks] == ["b1", "b2", "b1", "b2"]
    assert [task._streaming_gen.name[:3] for task in tasks] == [
        "in0",
        "in1",
        "in2",
        "in3",
    ]
    assert tasks[0]._pending_block_ref.is_nil() and tasks[0]._pending_meta_ref.is_nil()
    assert [made.name for made in cancelled] == ["in0 by a1", "in1 by a2"]
    assert execution.lost.make_again({"b"}) == 0, "each is given once"
    assert execution.lost.make_again({"a"}) == 4, "and again if that node is lost, too"


def test_nobody_gets_blocks_on_a_dead_node() -> None:
    execution = Execution("a1", "b1")
    execution.lost.make_again({"b"})
    execution.pool.refresh_actor_state()
    ready = execution.pool._alive_actors_to_in_flight_tasks_heap
    assert list(ready) == [execution.actors["b1"]]
    execution.lost.make_again({"a", "b"})
    execution.pool.refresh_actor_state()
    assert len(execution.pool._alive_actors_to_in_flight_tasks_heap) == 2


def test_without_another_actor_blocks_wait_for_their_own() -> None:
    execution = Execution("a1", "a2")
    task = execution.begin(0, "a1")
    assert execution.lost.make_again(set()) == 0 and task._streaming_gen.actor == "a1"


def test_a_block_that_came_without_its_end_is_not_made_twice() -> None:
    execution = Execution("a1", "b1")
    task = execution.begin(0, "a1", num_outputs=1)
    execution.lost.make_again({"b"})
    assert len(task.ended) == 1 and not execution.actors["b1"].given


def test_the_blocks_of_an_actor_that_finds_no_room_are_given_to_others() -> None:
    execution = Execution("a1", "a2")
    execution.states["a1"].is_restarting = True
    execution.refresh()
    task = execution.begin(0, "a1")
    stuck = {execution.actors["a1"]}
    assert execution.lost.make_again({"a"}, stuck) == 1
    assert task._streaming_gen.actor == "a2"
    assert execution.lost.make_again({"a"}, stuck) == 0


def test_a_rank_takes_the_copy_of_a_finished_block_that_was_lost() -> None:
    execution = Execution("a1", "b1")
    for number, (actor, size) in enumerate([("a1", LARGE), ("b1", LARGE), ("a1", 10)]):
        execution.begin(number, actor)
        execution.finish(number, size)
    assert execution.lost.make_again({"b"}) == 1, "a small block is in no node's memory"
    assert [execution.take() for _ in range(3)] == [
        "in0 by b1",
        "in1 by b1",
        "in2 by a1",
    ]
    execution.states["a1"].is_restarting = True
    assert execution.lost.make_again({"a"}) == 0, "nobody is left"


def test_a_rank_that_fetches_a_lost_block_is_told_of_its_copy() -> None:
    execution = Execution("a1", "b1")
    for number in range(6):
        execution.begin(number, "a1")
        execution.finish(number)
    taken = [execution.take() for _ in range(5)]
    assert execution.lost.make_again({"b"}) == 4, "the last three, and one that waits"
    copies = [execution.lost.copy_of(block) for block in taken]
    assert copies == [None, None, "in2 by b1", "in3 by b1", "in4 by b1"]
    execution.lost.drop()
    assert execution.lost.copy_of(taken[4]) is None


@pytest.mark.cluster
def test_blocks_of_a_killed_actor_without_a_cpu_come_from_the_other(
    two_cpus: None, stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Holder:
        def ping(self) -> None: ...

    monkeypatch.setattr(pool, "_PATIENCE_S", 0.0)
    spec = open_stream(
        stores["train"],
        plan=PlanConfig(micro_batch_size=8, global_batch_size=8, epochs=4),
        transform=TransformConfig(train="heavy", size=32),
        pool=PoolConfig(min_actors=2, max_actors=2, max_in_flight=(0, 1)),
    )
    supervisor = start_supervisor()
    (iterator,) = splits(spec, spec.plan.start(), max_actors=2, supervisor=supervisor)
    found = list[bytes]()
    holder: Any = None
    for batch in host_batches(iterator):
        found.append(batch_hash(batch))
        if len(found) == 4:
            holder = ray.remote(num_cpus=1)(Holder).remote()  # waits for a CPU
            actor = next(own_processes("MapWorker(MapBatches(Transform"))
            os.kill(actor, signal.SIGKILL)
    assert found == without_ray.digests(spec)
    ray.get(holder.ping.remote(), timeout=60)
    ray.kill(holder)
    events = [text for _, text in ray.get(supervisor.events.remote(0))]
    assert any("others make them again" in text for text in events), events
