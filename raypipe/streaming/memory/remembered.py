"""The memory of a cluster: finished micro-batches by their content, for all streams that make the same.

    Ledger           who has made, or makes, which content, and the order of forgetting. Pure
    ClusterLedger    the ledger as an actor, one in a cluster, on its head
    Keeper           owns what was made on a node, so that it outlives the actor that made it; one on a node

A transform actor asks for the keys of its block. It gets the places of finished micro-batches, and a claim to the
next few that nobody makes. It asks again for the remaining ones when it has made those, so that several actors
share the work on a block, and one waits only where others make all that is missing. A claim ends when the
micro-batch is made, or when its holder dies or takes too long: the keeper of the node watches its processes.
To a rank the actor gives only the keys of large ones, remembered or new, and the rank collects them here without
a copy.
All of it only saves time: if an object, a keeper or the memory itself is lost, the micro-batch is made again.

The actors belong to the streams that use them: the memory ends itself, and the keepers, with the last of these.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe import __version__
from raypipe.rayext.processes import Process, started_at
from raypipe.rayext.ray_thread import RayThread
from raypipe.streaming.memory.stored import Stored

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
# A run that was killed gets its memory back if the same command starts within this time.
_RESUMED_S = 60.0
# A part of the room is for streams that are behind: there, micro-batches that one of those alike has not yet taken
# stay for so long. The rest is for those that are at about the same place.
_HELD_SHARE = 0.5
_HELD_S = 120.0
# A rank collects what was handed over to it within this time, since a notebook's loop may pause. Later it may have
# to make it again.
_COLLECT_S = 3600.0
_DEATHS_S = 0.2  # between two looks at the processes of a node
_DEATHS_WAIT_S = 10.0


class User(NamedTuple):
    """A process that uses the memory: a transform actor.

    Attributes:
        name: name of the process, which a restarted one does not share.
        actor: id of the actor, which it does share.
        stream: name of its stream.
        node: id of its node.
        training: hash of what its stream's training makes; streams of one hash are alike. "" = like no other.
        hands_over: whether it gives only the keys to its ranks, which collect the micro-batches themselves.
    """

    name: str
    actor: str
    stream: str
    node: str
    training: str = ""
    hands_over: bool = False


class Found(NamedTuple):
    """Where a micro-batch is.

    Attributes:
        ref: reference to an object that is a list; None = only the rank needs it.
        number: its number in the list.
        outline: the parts for the transform actor, if its rank collects the micro-batch.
    """

    ref: Any
    number: int
    outline: Stored | None = None


class Parcel(NamedTuple):
    """Micro-batches that were made together, as their actor gives them to the memory.

    Attributes:
        keys: their keys, in the order of the object's list.
        num_bytes: bytes of all.
        comes_back: whether they are needed again for sure.
        outlines: by key, of those that ranks may collect.
        handed_over: keys of those that the actor's own rank is to collect.
    """

    keys: Sequence[bytes]
    num_bytes: int
    comes_back: bool = False
    outlines: Mapping[bytes, Stored] = MappingProxyType({})
    handed_over: Sequence[bytes] = ()


class Reply(NamedTuple):
    """Reply to a transform actor that asks for micro-batches; others make those that are in neither list.

    Attributes:
        finished: places of finished ones, by key.
        to_make: keys that the actor is to make now.
        is_kept: whether there is room for them; if not, they are not claimed.
    """

    finished: dict[bytes, Found]
    to_make: list[bytes]
    is_kept: bool


class _Claim(NamedTuple):
    """Right to make a micro-batch, with room for it."""

    user: User
    since: float
    num_bytes: int


@dataclass
class _Group:
    """Micro-batches that were made together, in one object."""

    ref: Any
    parcel: Parcel
    user: User
    used_at: float
    is_held: bool
    taken: set[str] = field(default_factory=set)  # names of streams
    # streams and keys that an actor has handed over, and no rank has collected yet
    on_the_way: set[tuple[str, bytes]] = field(default_factory=set)


# Order of forgetting: objects that all streams alike have taken, the others, those held for a stream that is
# behind, those that come back for sure, and those that a rank is about to collect.
_SPENT = 0
_RECENT = 1
_HELD = 2
_COMES_BACK = 3
_ON_THE_WAY = 4


class Ledger:
    """Ledger of the finished micro-batches, and of those in the making.

    Args:
        clock: seconds, from any start.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._groups: OrderedDict[int, _Group] = OrderedDict()  # last used last
        self._places: dict[bytes, tuple[int, int]] = {}  # key → group, number in it
        self._claims: dict[bytes, _Claim] = {}
        self._users: dict[str, tuple[User, float]] = {}  # name → last sign of life
        self._left: set[str] = set()  # streams
        # Stream → when its last user was gone, or when it began and had none yet.
        self._broken_off: dict[str, float] = {}
        self._rooms: dict[str, int] = {}  # node → its limit in bytes
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
        self._broken_off.pop(user.stream, None)
        self._seen[user.node] = now
        self._rooms[user.node] = room
        if is_full:
            self._shrink(user.node, self._num_bytes(user.node) // 2, _COMES_BACK)

    def expect(self, stream: str, node: str) -> None:
        """Note that a stream's actors will soon be users, and that its node may have a keeper."""
        if stream not in self._left:
            self._broken_off[stream] = self._clock()
            self._seen.setdefault(node, self._clock())

    def ask(
        self,
        user: User,
        keys: Sequence[bytes],
        limit: int,
        num_bytes: int,
        comes_back: bool,
    ) -> Reply:
        """Return places of finished micro-batches, and claim some that nobody makes, for the user.

        Args:
            limit: most claims that the user wants.
            num_bytes: bytes of a micro-batch, about.
            comes_back: they are needed again for sure; others do not push them out.
        """
        finished = dict[bytes, Found]()
        free = list[bytes]()
        for key in keys:
            if key in self._places:
                finished[key] = self._taken(user, key)
            elif not self._is_made_by_another(user, key):
                free.append(key)
        to_make = free[:limit]
        if not self._has_room(user, num_bytes * len(to_make), comes_back):
            # others cannot get them from this user, so they need not wait
            return Reply(finished, free, is_kept=False)
        now = self._clock()
        for key in to_make:
            self._claims[key] = _Claim(user, now, num_bytes)
        return Reply(finished, to_make, is_kept=True)

    def _taken(self, user: User, key: bytes) -> Found:
        number, row = self._places[key]
        group = self._groups[number]
        group.taken.add(user.stream)
        group.used_at = self._clock()
        self._groups.move_to_end(number)
        outline = group.parcel.outlines.get(key)
        if outline is None or not user.hands_over:
            return Found(group.ref, row)
        group.on_the_way.add((user.stream, key))
        return Found(None, row, outline)

    def collect(self, stream: str, keys: Sequence[bytes]) -> dict[bytes, Found]:
        """Return the places of what was handed over to a rank of a stream; some may have been forgotten."""
        locations = dict[bytes, Found]()
        on_nodes = set[str]()
        for key in keys:
            if key in self._places:
                number, row = self._places[key]
                group = self._groups[number]
                group.on_the_way.discard((stream, key))
                on_nodes.add(group.user.node)
                locations[key] = Found(group.ref, row)
        for node in on_nodes:
            self._shrink(node, self._rooms.get(node, 0), _COMES_BACK)
        return locations

    def is_in_the_making(self, key: bytes) -> bool:
        """Return whether somebody makes a micro-batch at this time."""
        claim = self._claims.get(key)
        if claim is None:
            return False
        now = self._clock()
        _, seen = self._users.get(claim.user.name, (claim.user, claim.since))
        return now - claim.since < _CLAIM_S and now - seen < _LOST_S

    def _is_made_by_another(self, user: User, key: bytes) -> bool:
        claim = self._claims.get(key)
        if claim is None or claim.user.name == user.name:
            return False
        return self.is_in_the_making(key)

    def _has_room(self, user: User, num_bytes: int, comes_back: bool) -> bool:
        """Return whether micro-batches fit with those in the making, after making room on the user's node."""
        claimed = sum(
            claim.num_bytes
            for claim in self._claims.values()
            if claim.user.node == user.node
        )
        limit = self._rooms.get(user.node, 0) - claimed - num_bytes
        if limit >= 0:
            self._shrink(user.node, limit, _COMES_BACK if comes_back else _RECENT)
        return self._num_bytes(user.node) <= limit

    def put(self, user: User, parcel: Parcel, ref: Any) -> None:
        """Remember finished micro-batches, which are in one object."""
        keys = parcel.keys
        self.give_up(user, keys)
        if user.stream in self._left:
            return
        new = [key for key in keys if key not in self._places]
        for key in set(parcel.handed_over).difference(new):
            self._taken(user, key)
        num_bytes = parcel.num_bytes
        awaited = set(new).intersection(parcel.handed_over)
        has_room = new and self._has_room(user, num_bytes, parcel.comes_back)
        if not has_room and not awaited:
            return
        self._num_groups += 1
        number = self._num_groups
        held = sum(
            group.parcel.num_bytes
            for group in self._groups.values()
            if group.is_held and group.user.node == user.node
        )
        is_held = held + num_bytes <= _HELD_SHARE * self._rooms.get(user.node, 0)
        group = _Group(ref, parcel, user, self._clock(), is_held)
        group.taken.add(user.stream)
        group.on_the_way.update((user.stream, key) for key in awaited)
        self._groups[number] = group
        for row, key in enumerate(keys):
            self._places.setdefault(key, (number, row))

    def give_up(self, user: User, keys: Sequence[bytes]) -> None:
        """End the user's claims on keys."""
        for key in keys:
            claim = self._claims.get(key)
            if claim and claim.user.name == user.name:
                del self._claims[key]

    def lost(self, keys: Sequence[bytes]) -> None:
        """Forget objects that cannot be read, and all on their nodes: the keeper there is dead, or the node."""
        for key in keys:
            if key in self._places:
                group, _ = self._places[key]
                self.lose_node(self._groups[group].user.node)

    def lose_node(self, node: str) -> None:
        """Forget all objects of a node, and free the claims of its users, which may be dead."""
        self._shrink(node, -1, _ON_THE_WAY)
        for key, claim in list(self._claims.items()):
            if claim.user.node == node:
                del self._claims[key]

    def die(self, names: Sequence[str]) -> None:
        """Remove users whose processes are dead."""
        for name in names:
            if name in self._users:
                user, _ = self._users[name]
                self._remove(user)

    def leave(self, stream: str) -> bool:
        """Remove the users of a stream that has ended; return whether others need the memory."""
        self._left.add(stream)
        for user, _ in list(self._users.values()):
            if user.stream == stream:
                self._remove(user)
        self._broken_off.pop(stream, None)
        return self.is_needed

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
            self.lose_node(node)
            for by_node in (self._seen, self._rooms):
                by_node.pop(node, None)
        return empty

    @property
    def is_needed(self) -> bool:
        """True while streams use it, and while one that was broken off may be resumed."""
        last = max(self._broken_off.values(), default=-_RESUMED_S)
        return bool(self._users) or self._clock() - last < _RESUMED_S

    @property
    def nodes(self) -> list[str]:
        """Nodes on which something may be kept."""
        return list(self._seen)

    @property
    def used(self) -> dict[str, int]:
        """Bytes that are remembered, by node, without those on their way to a rank."""
        by_node = {node: self._num_bytes(node) for node in self._rooms}
        return {node: num_bytes for node, num_bytes in by_node.items() if num_bytes}

    def _num_bytes(self, node: str) -> int:
        """Return the bytes that count for a node's limit: not those in flight, on their way to a rank."""
        return sum(
            group.parcel.num_bytes
            for group in self._groups.values()
            if group.user.node == node and not self._is_on_the_way(group)
        )

    def _is_on_the_way(self, group: _Group) -> bool:
        if not group.on_the_way or self._clock() - group.used_at >= _COLLECT_S:
            return False
        return any(stream not in self._left for stream, _ in group.on_the_way)

    def _remove(self, user: User) -> None:
        self._users.pop(user.name, None)
        if not any(other.stream == user.stream for other, _ in self._users.values()):
            self._broken_off[user.stream] = self._clock()
        held = [
            key for key, claim in self._claims.items() if claim.user.name == user.name
        ]
        self.give_up(user, held)

    def _shrink(self, node: str, num_bytes: int, most_valued: int) -> None:
        """Forget what was used least recently on a node, until so few bytes are left.

        Args:
            num_bytes: limit of those that are not on their way; -1 = forget all.
            most_valued: _SPENT to _ON_THE_WAY; micro-batches of a higher value stay.
        """
        left = self._num_bytes(node)
        if left <= num_bytes:
            return
        alike: dict[str, set[str]] = {}
        for user, _ in self._users.values():
            alike.setdefault(user.training, set()).add(user.stream)
        groups = [
            (self._value(group, alike), number)
            for number, group in self._groups.items()
            if group.user.node == node
        ]
        groups.sort(key=lambda group: group[0])
        for value, number in groups:
            if value > most_valued or left <= num_bytes:
                return
            if value < _ON_THE_WAY:
                left -= self._groups[number].parcel.num_bytes
            self._forget(number)

    def _value(self, group: _Group, alike: dict[str, set[str]]) -> int:
        if self._is_on_the_way(group):
            return _ON_THE_WAY
        if group.parcel.comes_back and group.taken - self._left:
            return _COMES_BACK
        training = group.user.training
        if not training or alike.get(training, set()) <= group.taken:
            return _SPENT
        age_s = self._clock() - group.used_at
        return _HELD if group.is_held and age_s < _HELD_S else _RECENT

    def _forget(self, number: int) -> None:
        group = self._groups.pop(number)
        for row, key in enumerate(group.parcel.keys):
            if self._places.get(key) == (number, row):
                del self._places[key]


class ClusterLedger:
    """The ledger of a cluster, as an actor; `memory` returns its handle."""

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._changed = asyncio.Event()
        self._tending: asyncio.Task[None] | None = None
        self._watching: dict[str, asyncio.Task[None]] = {}  # The keys are nodes.

    async def check_in(
        self, user: User, room: int, is_full: bool = False, keeper: Any = None
    ) -> None:
        """See `Ledger.check_in`.

        Args:
            keeper: handle of the keeper of the user's node; None = it is known.
        """
        self._begin_tending()
        self._ledger.check_in(user, room, is_full)
        watching = self._watching.get(user.node)
        if keeper is not None and (watching is None or watching.done()):
            self._watching[user.node] = asyncio.create_task(
                self._watch(user.node, keeper)
            )

    async def expect(self, stream: str, node: str) -> None:
        """See `Ledger.expect`."""
        self._begin_tending()
        self._ledger.expect(stream, node)

    async def ask(
        self,
        user: User,
        keys: Sequence[bytes],
        limit: int,
        num_bytes: int,
        comes_back: bool,
        wait_s: float,
    ) -> Reply:
        """See `Ledger.ask`; wait for what others make while nothing else is left to make, within a limit."""
        end = time.monotonic() + wait_s
        while True:
            reply = self._ledger.ask(user, keys, limit, num_bytes, comes_back)
            left_s = end - time.monotonic()
            if reply.to_make or len(reply.finished) == len(keys) or left_s <= 0:
                return reply
            await self._change(left_s)

    async def _change(self, limit_s: float) -> None:
        """Wait until the ledger has changed."""
        self._changed.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), limit_s)

    async def put(self, user: User, parcel: Parcel, refs: list[Any]) -> None:
        """See `Ledger.put`; the one reference is in a list, since Ray would replace it by its object."""
        self._ledger.put(user, parcel, refs[0])
        self._changed.set()

    async def collect(
        self, stream: str, keys: Sequence[bytes], wait_s: float
    ) -> dict[bytes, Found]:
        """See `Ledger.collect`; wait for those that are on their way from an actor, within a limit."""
        end = time.monotonic() + wait_s
        while True:
            locations = self._ledger.collect(stream, keys)
            is_coming = any(
                self._ledger.is_in_the_making(key)
                for key in keys
                if key not in locations
            )
            left_s = end - time.monotonic()
            if not is_coming or left_s <= 0:
                return locations
            await self._change(left_s)

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

    async def _watch(self, node: str, keeper: Any) -> None:
        """Free the claims of processes that die on a node, and forget its objects when its keeper dies."""
        try:
            while True:
                self._ledger.die(await keeper.deaths.remote())
                self._changed.set()
        except ray.exceptions.RayError:
            self._ledger.lose_node(node)
            self._changed.set()

    def _begin_tending(self) -> None:
        if self._tending is None:
            self._tending = asyncio.create_task(self._tend())

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(CHECK_IN_S)
            for node in self._ledger.expire():
                _kill(_keeper_name(node))
            if not self._ledger.is_needed:
                self._end()

    def _end(self) -> None:
        for node in self._ledger.nodes:
            _kill(_keeper_name(node))
        ray.kill(ray.get_runtime_context().current_actor)


class Keeper:
    """Owner of the remembered objects of a node, as an actor, which ends itself where the memory is gone."""

    def __init__(self) -> None:
        self._processes: dict[str, Process] = {}  # The keys are names of users.
        self._num_missing = 0
        RayThread(self._end_with_memory, CHECK_IN_S, "raypipe-keeper").start()

    def _end_with_memory(self) -> None:
        is_missing = not any(_named(MEMORY))
        self._num_missing = self._num_missing + 1 if is_missing else 0
        if self._num_missing > _KEPT_FOR:  # one that has died is soon there again
            ray.kill(ray.get_runtime_context().current_actor)

    def keep(self, user: User, parcel: Parcel, batches: list[Stored]) -> None:
        """Put finished micro-batches into the object store, and give their place to the memory."""
        for actor in _named(MEMORY):
            actor.put.remote(user, parcel, [ray.put(batches)])

    def watch(self, name: str, process: Process) -> None:
        """Watch the process of a user."""
        self._processes[name] = process

    def deaths(self) -> list[str]:
        """Wait for deaths of processes, within a limit, and return the names of their users."""
        end = time.monotonic() + _DEATHS_WAIT_S
        dead = list[str]()
        while not dead and time.monotonic() < end:
            time.sleep(_DEATHS_S)
            dead = [
                name
                for name, process in list(self._processes.items())
                if process.started and started_at(process.pid) != process.started
            ]
        for name in dead:
            del self._processes[name]
        return dead


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
        scheduling_strategy="DEFAULT",  # not in a trial's placement group
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
        max_concurrency=4,  # one waits for deaths
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    return actor.remote()


def start_memory(stream: str) -> None:
    """Start the cluster's memory, if it is not there, for a stream whose actors are about to start."""
    node = ray.get_runtime_context().get_node_id()
    memory().expect.remote(stream, node)
    keeper()


def running_memory() -> Any:
    """Return the handle of the cluster's memory; None = there is none."""
    return next(_named(MEMORY), None)


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
