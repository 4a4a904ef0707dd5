"""The memory of a cluster: finished micro-batches by their content, for all streams that make the same.

    Ledger           who has made, or makes, which content, and the order of forgetting. Pure
    ClusterLedger    the ledger as an actor, one in a cluster, on its head
    Keeper           owns what was made on a node, so that it outlives the actor that made it; one on a node

A transform actor asks for the keys of its block. The answer to each is where it is, or that another actor makes
it, or that the asker is to make it: it then has a claim, which ends when it has made it, dies, or takes too long.
All of it only saves time: if an object, a keeper or the memory itself is lost, the micro-batch is made again.

The actors belong to the streams that use them: the memory ends itself, and the keepers, with the last of these.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe import __version__

NAMESPACE = "raypipe"
# Others cannot read what this release writes.
MEMORY = f"memory-{__version__}"
CHECK_IN_S = 5.0
"""Seconds between two signs of life of an actor that uses the memory."""
_LOST_S = 4 * CHECK_IN_S  # an actor is gone that was silent for so long
_CLAIM_S = 30.0
_KEPT_FOR = 6  # looks for a memory that is missing
# A node whose actors have been gone for so long gets its memory back, and can be taken away.
_NODE_LEFT_S = 60.0


class User(NamedTuple):
    """A process that uses the memory: a transform actor.

    Attributes:
        name: name of the process, which a restarted one does not share.
        actor: id of the actor, which it does share.
        stream: name of its stream.
        node: id of its node.
    """

    name: str
    actor: str
    stream: str
    node: str


class Found(NamedTuple):
    """Where a micro-batch is: its number in the list of an object."""

    ref: Any
    number: int


Reply = Found | Literal["make", "wait"]


@dataclass
class _Group:
    """Micro-batches that were made together, in one object."""

    ref: Any
    keys: Sequence[bytes]
    num_bytes: int
    node: str
    comes_back: bool


class Ledger:
    """Ledger of the finished micro-batches, and of those in the making.

    Args:
        clock: seconds, from any start.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._groups: OrderedDict[int, _Group] = OrderedDict()  # last used last
        self._places: dict[bytes, tuple[int, int]] = {}  # key → group, number in it
        self._claims: dict[bytes, tuple[User, float]] = {}
        self._users: dict[str, tuple[User, float]] = {}  # name → last sign of life
        self._left: set[str] = set()  # streams
        self._rooms: dict[str, int] = {}  # node → its limit in bytes
        self._used: dict[str, int] = {}
        self._seen: dict[str, float] = {}  # node → last sign of life of a user there
        self._num_groups = 0

    def check_in(self, user: User, room: int, is_full: bool = False) -> None:
        """Note a sign of life of a user.

        Args:
            room: bytes that the memory may take on the user's node.
            is_full: the object store of the node is needed for other data.
        """
        if user.stream in self._left:
            return
        now = self._clock()
        if user.name not in self._users:
            # a restarted actor holds no claims
            for old, _ in list(self._users.values()):
                if old.actor == user.actor:
                    self._remove(old)
        self._users[user.name] = user, now
        self._seen[user.node] = now
        self._rooms[user.node] = room
        if is_full:
            self._shrink(user.node, self._used.get(user.node, 0) // 2)

    def ask(self, user: User, keys: Sequence[bytes]) -> list[Reply]:
        """Reply for each key; each that nobody has or makes is claimed for the user."""
        return [self._answer(user, key) for key in keys]

    def _answer(self, user: User, key: bytes) -> Reply:
        if key in self._places:
            group, number = self._places[key]
            self._groups.move_to_end(group)
            return Found(self._groups[group].ref, number)
        claim = self._claims.get(key)
        if claim and claim[0].name != user.name and self._is_held(*claim):
            return "wait"
        self._claims[key] = user, self._clock()
        return "make"

    def _is_held(self, user: User, since: float) -> bool:
        now = self._clock()
        _, seen = self._users.get(user.name, (user, since))
        return now - since < _CLAIM_S and now - seen < _LOST_S

    def admit(
        self, user: User, keys: Sequence[bytes], num_bytes: int, comes_back: bool
    ) -> bool:
        """Return whether finished micro-batches may be put, after making room on the user's node.

        Args:
            comes_back: they are needed again for sure; others do not push them out.
        """
        room = self._rooms.get(user.node, 0)
        if num_bytes <= room and not any(key in self._places for key in keys):
            self._shrink(user.node, room - num_bytes, of_all=comes_back)
            if self._used.get(user.node, 0) + num_bytes <= room:
                return True
        self.give_up(user, keys)
        return False

    def put(
        self,
        user: User,
        keys: Sequence[bytes],
        ref: Any,
        num_bytes: int,
        comes_back: bool,
    ) -> None:
        """Remember finished micro-batches, which are in one object, in the order of their keys."""
        self.give_up(user, keys)
        if any(key in self._places for key in keys) or user.stream in self._left:
            return
        self._num_groups += 1
        number = self._num_groups
        self._groups[number] = _Group(ref, keys, num_bytes, user.node, comes_back)
        self._used[user.node] = self._used.get(user.node, 0) + num_bytes
        self._places |= {key: (number, row) for row, key in enumerate(keys)}

    def give_up(self, user: User, keys: Sequence[bytes]) -> None:
        """End the user's claims on keys."""
        for key in keys:
            claim = self._claims.get(key)
            if claim and claim[0].name == user.name:
                del self._claims[key]

    def lost(self, keys: Sequence[bytes]) -> None:
        """Forget objects that cannot be read, and all on their nodes: the keeper there is dead, or the node."""
        for key in keys:
            if key in self._places:
                group, _ = self._places[key]
                self._shrink(self._groups[group].node, 0)

    def leave(self, stream: str) -> bool:
        """Remove the users of a stream that has ended; return whether others are there."""
        self._left.add(stream)
        for user, _ in list(self._users.values()):
            if user.stream == stream:
                self._remove(user)
        return bool(self._users)

    def expire(self) -> list[str]:
        """Remove users without a sign of life, and return the nodes that have none any more."""
        now = self._clock()
        for user, seen in list(self._users.values()):
            if now - seen >= _LOST_S:
                self._remove(user)
        empty = [
            node for node, seen in self._seen.items() if now - seen >= _NODE_LEFT_S
        ]
        for node in empty:
            self._shrink(node, 0)
            for by_node in (self._seen, self._rooms, self._used):
                by_node.pop(node, None)
        return empty

    @property
    def num_users(self) -> int:
        """Processes that use it."""
        return len(self._users)

    @property
    def nodes(self) -> list[str]:
        """Nodes on which something may be kept."""
        return list(self._seen)

    @property
    def used(self) -> dict[str, int]:
        """Bytes that are remembered, by node."""
        return {node: num_bytes for node, num_bytes in self._used.items() if num_bytes}

    def _remove(self, user: User) -> None:
        self._users.pop(user.name, None)
        held = [key for key, (by, _) in self._claims.items() if by.name == user.name]
        self.give_up(user, held)

    def _shrink(self, node: str, num_bytes: int, of_all: bool = True) -> None:
        """Forget what was used least recently on a node, until so few bytes are left.

        Micro-batches that come back for sure go last, and only if `of_all`.
        """
        for comes_back in (False, True) if of_all else (False,):
            for number, group in list(self._groups.items()):
                if self._used.get(node, 0) <= num_bytes:
                    return
                if group.node == node and group.comes_back == comes_back:
                    self._forget(number)

    def _forget(self, number: int) -> None:
        group = self._groups.pop(number)
        self._used[group.node] -= group.num_bytes
        for key in group.keys:
            self._places.pop(key, None)


class ClusterLedger:
    """The ledger of a cluster, as an actor; `memory` returns its handle."""

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._changed = asyncio.Event()
        self._tending: asyncio.Task[None] | None = None
        self._begun = time.monotonic()

    async def check_in(self, user: User, room: int, is_full: bool = False) -> None:
        """See `Ledger.check_in`."""
        if self._tending is None:
            self._tending = asyncio.create_task(self._tend())
        self._ledger.check_in(user, room, is_full)

    async def ask(self, user: User, keys: Sequence[bytes]) -> list[Reply]:
        """See `Ledger.ask`."""
        return self._ledger.ask(user, keys)

    async def wait(
        self, user: User, keys: Sequence[bytes], limit_s: float
    ) -> list[Reply]:
        """Ask for keys that others make, and wait until one of them is no longer in the making."""
        end = time.monotonic() + limit_s
        answers = self._ledger.ask(user, keys)
        while all(answer == "wait" for answer in answers):
            left_s = end - time.monotonic()
            if left_s <= 0:
                break
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left_s)
            answers = self._ledger.ask(user, keys)
        return answers

    async def admit(
        self, user: User, keys: Sequence[bytes], num_bytes: int, comes_back: bool
    ) -> bool:
        """See `Ledger.admit`."""
        is_admitted = self._ledger.admit(user, keys, num_bytes, comes_back)
        if not is_admitted:
            self._changed.set()
        return is_admitted

    async def put(
        self,
        user: User,
        keys: Sequence[bytes],
        refs: list[Any],
        num_bytes: int,
        comes_back: bool,
    ) -> None:
        """See `Ledger.put`; the one reference is in a list, since Ray would replace it by its object."""
        self._ledger.put(user, keys, refs[0], num_bytes, comes_back)
        self._changed.set()

    async def give_up(self, user: User, keys: Sequence[bytes]) -> None:
        """See `Ledger.give_up`."""
        self._ledger.give_up(user, keys)
        self._changed.set()

    async def lost(self, keys: Sequence[bytes]) -> None:
        """See `Ledger.lost`."""
        self._ledger.lost(keys)

    async def leave(self, stream: str) -> None:
        """A stream has ended; the last one takes the memory with it."""
        if not self._ledger.leave(stream):
            self._end()

    async def used(self) -> dict[str, int]:
        """See `Ledger.used`."""
        return self._ledger.used

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(CHECK_IN_S)
            for node in self._ledger.expire():
                _kill(_keeper_name(node))
            if not self._ledger.num_users:
                self._end()

    def _end(self) -> None:
        for node in self._ledger.nodes:
            _kill(_keeper_name(node))
        ray.kill(ray.get_runtime_context().current_actor)


class Keeper:
    """Owner of the remembered objects of a node, as an actor, which ends itself where the memory is gone."""

    def __init__(self) -> None:
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        num_missing = 0
        while num_missing < _KEPT_FOR:  # one that has died is soon there again
            time.sleep(CHECK_IN_S)
            is_missing = not any(_named(MEMORY))
            num_missing = num_missing + 1 if is_missing else 0
        ray.kill(ray.get_runtime_context().current_actor)

    def keep(
        self,
        user: User,
        keys: Sequence[bytes],
        batches: list[Any],
        num_bytes: int,
        comes_back: bool,
    ) -> None:
        """Put finished micro-batches into the object store, and give their place to the memory."""
        for actor in _named(MEMORY):
            actor.put.remote(user, keys, [ray.put(batches)], num_bytes, comes_back)

    def node(self) -> str:
        """Return the node's id; it shows that the actor is there."""
        return ray.get_runtime_context().get_node_id()


def memory() -> Any:
    """Return the handle of the cluster's memory, which starts if there is none."""
    actor = ray.remote(ClusterLedger).options(
        name=MEMORY,
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",  # the job that was first may end before others
        num_cpus=0,
        # On a worker node it would keep the autoscaler from ending the node.
        resources={"node:__internal_head__": 0.001},
        max_concurrency=1000,  # most of them wait
    )
    return actor.remote()


def keeper() -> Any:
    """Return the handle of this node's keeper, which starts if there is none."""
    node = ray.get_runtime_context().get_node_id()
    actor = ray.remote(Keeper).options(
        name=_keeper_name(node),
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    return actor.remote()


def leave_memory(stream: str) -> None:
    """Leave the cluster's memory, if there is one, with a stream that has ended."""
    for actor in _named(MEMORY):
        actor.leave.remote(stream)


def _keeper_name(node: str) -> str:
    return f"{MEMORY}-{node}"


def _named(name: str) -> Iterator[Any]:
    with contextlib.suppress(ValueError):  # there is none
        yield ray.get_actor(name, NAMESPACE)


def _kill(name: str) -> None:
    for actor in _named(name):
        ray.kill(actor)
