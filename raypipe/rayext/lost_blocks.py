"""Blocks of actors that are gone: any other actor makes them again, and the copy takes their place.

Ray Data gives a block to one actor, for good. If its node dies, Ray repeats the actor's tasks in it once it
runs elsewhere, which takes seconds, and CPUs that may not be there. The same holds for a finished block whose data
were on the node. A block is a pure function of its input, so this gives the input to another actor:

    block in work     its task reads from the new actor, and keeps its number, and so its place in the order
    finished block    a rank that takes it gets the copy; one that fetches it already asks for the copy
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import ray

# A rank fetches the block that it waits for, and two ahead.
_TAKEN = 3
# bytes; Ray keeps smaller objects in the memory of the process that asked for them
_SMALL = 100 * 1024
# Seconds for the data of a block to come, after which a rank asks for a copy.
_FETCH_S = 1.0
_ANSWER_S = 5.0
# A task yields a block, and its metadata.
_NUM_RETURNS = 2


@dataclass
class _Finished:
    """A finished block that its rank may still need.

    Attributes:
        inputs: Ray Data's bundle that it was made of.
        node: id of the node of the actor that made it, or makes its copy.
        copy: reference to the copy; None = there is none.
    """

    inputs: Any
    node: str
    copy: Any = None


class LostBlocks:
    """The blocks of one execution, in work or finished, on their way to the ranks.

    Args:
        op: Ray Data's operator of the pool.
        output_queue: the execution's last queue, from which ranks take blocks; None = they take something else.
    """

    def __init__(self, op: Any, output_queue: Any) -> None:
        self._op = op
        (self._pool,) = op.get_autoscaling_actor_pools()
        # By id of the block, since a reference would keep it in memory. Ranks take blocks, and ask for copies, in
        # other threads.
        self._finished: dict[bytes, _Finished] = {}
        # rank → ids of the blocks that it took last
        self._taken = defaultdict[int, deque[bytes]](deque)
        self._alive: Collection[str] | None = None
        if output_queue is not None:
            self._add = op._output_queue.add
            op._output_queue.add = self._added
            self._pop = output_queue.pop
            output_queue.pop = self._popped
        self._refresh = self._pool.refresh_actor_state
        self._pool.refresh_actor_state = self._refreshed
        _executions.add(self)

    def drop(self) -> None:
        """Drop the blocks: the execution has ended."""
        self._finished.clear()
        self._taken.clear()

    def num_silent(self) -> int:
        """Return the number of actors that run as far as Ray knows, and whose nodes do not answer."""
        return sum(
            not (state.is_restarting or self._answers(state.actor_location))
            for state in self._pool._running_actors.values()
        )

    def copy_of(self, block: Any) -> Any:
        """Return a reference to what another actor makes in the place of a block; None = nothing."""
        finished = self._finished.get(block.binary())
        return finished and finished.copy

    def make_again(self, alive: Collection[str], stuck: Collection[Any] = ()) -> int:
        """Give the blocks of lost actors to others; return how many were given.

        Args:
            alive: ids of the nodes that are alive, and answer.
            stuck: actors that died, and find no CPUs to restart.
        """
        self._alive = alive
        self._refreshed()
        states = dict(self._pool._running_actors)
        healthy = sorted(
            self._pool._alive_actors_to_in_flight_tasks_heap,
            key=lambda actor: states[actor].num_tasks_in_flight,
        )
        if not healthy:
            return 0
        others = itertools.cycle(healthy)
        num = 0
        for finished in list(self._finished.values()):
            if not self._answers(finished.node):
                other = next(others)
                finished.copy, _ = self._given(
                    finished.inputs, other, 0, num_returns=_NUM_RETURNS
                )
                finished.node = states[other].actor_location
                num += 1
        actors = {actor._actor_id: actor for actor in states}
        for index, task in list(self._op._data_tasks.items()):
            actor = actors.get(task.get_task_id().actor_id())
            if actor is None or getattr(task, "_pending_emit_count", False):
                continue
            if actor in stuck or not self._answers(states[actor].actor_location):
                self._give(index, task, next(others))
                num += 1
        return num

    def _answers(self, node: str) -> bool:
        return self._alive is None or node in self._alive

    def _give(self, index: int, task: Any, actor: Any) -> None:
        """Let a task of Ray Data's read from another actor."""
        # already imported by callers; a stream without Ray must not import it
        from ray.data._internal.execution.interfaces import physical_operator

        running = self._op._metrics._running_tasks[index]
        if (
            running.num_outputs
        ):  # its block is here, and only the news of its end was lost
            stats = physical_operator.TaskExecDriverStats(0.0)
            task._task_done_callback(None, None, stats)
            return
        # it would be repeated for nobody
        with contextlib.suppress(ray.exceptions.RayError, TypeError, ValueError):
            ray.cancel(task._streaming_gen)
        options = self._op._ray_actor_task_remote_args
        task._streaming_gen = self._given(
            running.inputs, actor, index, num_returns="streaming", **options
        )
        task._pending_block_ref = task._pending_meta_ref = ray.ObjectRef.nil()

    def _given(self, inputs: Any, actor: Any, index: int, **options: Any) -> Any:
        """Let an actor make a block, as Ray Data's operator does; return what Ray returns."""
        from ray.data._internal.execution.interfaces import TaskContext

        op = self._op
        context = TaskContext(
            task_idx=index,
            op_name=op.name,
            target_max_block_size_override=op.target_max_block_size_override,
        )
        return actor.submit.options(**options).remote(
            op._data_context_ref,
            context,
            *inputs.block_refs,
            slices=inputs.slices,
            **op.get_map_task_kwargs(),
        )

    def _added(self, bundle: Any, key: int) -> None:
        """An actor has finished a block."""
        self._add(bundle, key=key)
        inputs = self._op._metrics._running_tasks[key].inputs
        for entry in bundle.blocks:
            if entry.metadata.size_bytes >= _SMALL:
                node = entry.metadata.exec_stats.node_id
                self._finished[entry.ref.binary()] = _Finished(inputs, node)

    def _popped(self, *args: Any, **options: Any) -> Any:
        """A rank takes a block, or its copy."""
        bundle = self._pop(*args, **options)
        if bundle is None:
            return None
        taken = self._taken[bundle.output_split_idx or 0]
        blocks = [self._or_copy(entry) for entry in bundle.blocks]
        taken.extend(entry.ref.binary() for entry in blocks)
        while len(taken) > _TAKEN:
            self._finished.pop(taken.popleft(), None)
        return replace(bundle, blocks=blocks)

    def _or_copy(self, entry: Any) -> Any:
        """Return a block of a bundle, or its copy."""
        finished = self._finished.get(entry.ref.binary())
        if finished is None or finished.copy is None:
            return entry
        del self._finished[entry.ref.binary()]
        copy = finished.copy.binary()
        self._finished[copy] = _Finished(finished.inputs, finished.node)
        return replace(entry, ref=finished.copy)

    def _refreshed(self) -> None:
        """Let Ray Data look which actors can take blocks; those whose nodes do not answer cannot."""
        self._refresh()
        ready = self._pool._alive_actors_to_in_flight_tasks_heap
        for actor, state in self._pool._running_actors.items():
            if actor in ready and not self._answers(state.actor_location):
                del ready[actor]


_executions = weakref.WeakSet[LostBlocks]()


def _copies_here(_: Any, blocks: list[Any]) -> list[Any]:
    """Return the copy of a block of one of this process's executions, if there is one."""
    copies = [lost.copy_of(block) for lost in list(_executions) for block in blocks]
    return [copy for copy in copies if copy is not None]


def at_hand(coordinator: Any, block: Any) -> Any:
    """Wait until the data of a block, or of its copy, are on this node; return the reference to these.

    Args:
        coordinator: handle of the actor that runs the execution; None = this process does.
    """
    blocks = [block]
    while not (ready := ray.wait(blocks, timeout=_FETCH_S)[0]):
        if coordinator is None:
            blocks = [block, *_copies_here(None, [block])]
            continue
        with contextlib.suppress(ray.exceptions.RayError):
            asked = coordinator.__ray_call__.remote(_copies_here, [block])
            blocks = [block, *ray.get(asked, timeout=_ANSWER_S)]
    return ready[0]


def with_copies(
    resolve: Callable[[Iterator[Any]], Iterator[Any]], coordinator: Any
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Wrap Ray Data's function that gets the data of blocks: get those of copies where they come first."""
    return lambda blocks: resolve(map(functools.partial(at_hand, coordinator), blocks))
