"""Recall of finished micro-batches by a transform actor: it makes only those that nobody has made.

Recall          chooses the micro-batches to look for, and puts blocks together
_BlockParts     the micro-batches of a block, as they come, in any order
ClusterMemory   the memory of the cluster, see `raypipe.streaming.remembered`; each call has a limit, and after
                a failure the actor works without it for a while
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import ray

from raypipe.plan.places import MicroBatchId, Split
from raypipe.rayext.cluster_state import object_store_of
from raypipe.rayext.processes import this_process
from raypipe.storage.retries import report_progress
from raypipe.streaming.alike import Alike
from raypipe.streaming.bad_samples import BadSample
from raypipe.streaming.content import Contents, Recipes
from raypipe.streaming.remembered import CHECK_IN_S, Found, Turn, User, keeper, memory
from raypipe.streaming.remembered_files import RememberedFiles
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.stored import Stored
from raypipe.transform.block_memory import reused_arrays
from raypipe.transform.fields import MicroBatch
from raypipe.transform.samples import Samples

logger = logging.getLogger(__name__)

Made = tuple[list[MicroBatch], list[BadSample], dict[str, np.ndarray]]
"""Micro-batches of a block, their bad samples, and arrays by field, as of `MicroBatchMaker.block`."""
Make = Callable[..., Made]

# "auto" takes this share of the object store; the memory gives back room when less than that is free.
_SHARE = 0.1
_LEAST_FREE = 0.3
_START_S = 60.0
_ANSWER_S = 5.0
_FETCH_S = 10.0
_WITHOUT_S = 10.0  # after a failure
# Streams that make the same share the work on a block in pieces of so many seconds.
_TURN_S = 0.05
# An actor waits at most this long, and this many of its turns, where others make all that is missing.
_WAIT_S = 1.0
_WAIT_TURNS = 4
_ASK_S = 0.5  # a question is answered after so long, even if nothing has changed
# A time limit of a micro-batch that is shorter leaves no time to look for it.
_LEAST_LIMIT_S = 15.0
_LOOK_S = 1.0  # between two looks for streams alike
_LOOK_EVERY = 6  # check-ins: the object store of the node is looked at
# Objects that its keeper has not taken yet.
_MOST_PUTS = 4


class BatchCache(Protocol):
    """Where finished micro-batches are kept, by their keys."""

    def find(
        self, keys: Sequence[bytes], most: int, comes_back: bool
    ) -> tuple[dict[bytes, Stored], list[bytes]]:
        """Return those that are there, and the keys of up to `most` others that the caller is to make now.

        Where both are empty, others make all of them at this time.
        """
        ...

    def keep(
        self, finished: dict[bytes, Stored], dropped: list[bytes], comes_back: bool
    ) -> None:
        """Keep finished micro-batches; `dropped` are keys that are not to be kept."""
        ...


class Recall:
    """Puts blocks together, of remembered micro-batches and new ones.

    Args:
        make: makes the micro-batches of a block, see `MicroBatchMaker.block`.
        contents: their keys.
        cache: where micro-batches are kept.
        splits: splits whose micro-batches come back for sure.
        num_repeats: micro-batches of a step of the training that have one content, see `plan.aug_repeats`.
    """

    def __init__(
        self,
        make: Make,
        contents: Contents,
        cache: BatchCache,
        splits: frozenset[Split],
        num_repeats: int = 1,
    ) -> None:
        self._make = make
        self._contents = contents
        self._cache = cache
        self.splits = splits
        self.num_repeats = num_repeats
        self.is_shared = False
        # the latest micro-batches took this long
        self._seconds_each = _TURN_S

    def wants(self, block: Sequence[MicroBatchId]) -> bool:
        """Return whether a block's micro-batches may be remembered."""
        is_repeated = self.num_repeats > 1 and block[0].split == "train"
        return is_repeated or self._needs_memory(block)

    def _needs_memory(self, block: Sequence[MicroBatchId]) -> bool:
        return self.is_shared or block[0].split in self.splits

    def block(
        self,
        block: Sequence[MicroBatchId],
        reads: Sequence[Samples] | None = None,
        read_s: float = 0.0,
        outage_s: float = 0.0,
    ) -> Made:
        """Make the micro-batches of a block, see `MicroBatchMaker.block`, as far as they are not remembered."""
        keys = self._contents.keys(block)
        numbers = {key: number for number, key in reversed(list(enumerate(keys)))}
        if len(numbers) == len(block):
            return self._block(block, keys, reads, read_s, outage_s)
        first = sorted(numbers.values())
        share = len(first) / len(block)
        unique_block = [block[number] for number in first]
        unique_reads = [reads[number] for number in first] if reads else None
        times = read_s * share, outage_s * share
        if self._needs_memory(block) or len(keys) < len(first) * self.num_repeats:
            unique_keys = [keys[number] for number in first]
            unique = self._block(unique_block, unique_keys, unique_reads, *times)
        else:
            unique = self._make(unique_block, unique_reads, *times)
        return self._with_repeats(block, keys, reads, unique)

    def _with_repeats(
        self,
        block: Sequence[MicroBatchId],
        keys: Sequence[bytes],
        reads: Sequence[Samples] | None,
        unique: Made,
    ) -> Made:
        """Repeat micro-batches of one key at their places in a block; each place has its own substitutes."""
        batches, bad, _ = unique
        bad = list(bad)
        by_place = {batch.position: batch for batch in batches}
        by_key = {
            key: by_place[position]
            for key, position in zip(keys, block, strict=True)
            if position in by_place
        }
        for number, (key, position) in enumerate(zip(keys, block, strict=True)):
            if position in by_place:
                continue
            first = by_key[key]
            # `_keep` passes over the same ones
            if first.num_bad or not first.weight.any():
                reads_here = [reads[number]] if reads else None
                (by_place[position],), bad_here, _ = self._make([position], reads_here)
            else:
                by_place[position], bad_here = Stored.of(first, []).at(
                    position, 0.0, 0.0
                )
            bad += bad_here
        return [by_place[position] for position in block], bad, {}

    def _block(
        self,
        block: Sequence[MicroBatchId],
        keys: Sequence[bytes],
        reads: Sequence[Samples] | None,
        read_s: float,
        outage_s: float,
    ) -> Made:
        """Make the micro-batches of a block, whose keys differ, as far as they are not remembered."""
        comes_back = block[0].split in self.splits
        parts = _BlockParts(block, keys, read_s / len(block) if reads else 0.0)
        missing = list(range(len(block)))
        bad = list[BadSample]()
        asked_at = started = time.monotonic()
        while missing:
            most = self._most_at_once() if self.is_shared else len(block)
            waited = [keys[number] for number in missing]
            stored, to_make = self._cache.find(waited, most, comes_back)
            if len(stored) == len(block):
                of_block = [stored[key] for key in keys]
                work_s = time.monotonic() - started
                return _as_stored(block, of_block, read_s if reads else 0.0, work_s)
            bad += parts.add_stored(stored)
            if not stored and not to_make:
                report_progress()  # a time limit is not one of others' work
                if time.monotonic() - asked_at < self._longest_wait_s():
                    continue
                to_make = waited
            own = set(to_make)
            numbers = [number for number in missing if keys[number] in own]
            if numbers:
                made = self._make_some(numbers, keys, block, reads, read_s, outage_s)
                if len(numbers) == len(block):
                    return made
                batches, bad_of_some, _ = made
                bad += bad_of_some
                parts.add_made(dict(zip(numbers, batches, strict=True)))
            missing = [number for number in missing if number not in parts.batches]
            asked_at = time.monotonic()
        batches, arrays = parts.in_order()
        return batches, bad, arrays

    def _most_at_once(self) -> int:
        """Micro-batches that an actor makes before it asks again."""
        return max(1, int(_TURN_S / max(self._seconds_each, 1e-6)))

    def _longest_wait_s(self) -> float:
        return _WAIT_S + _WAIT_TURNS * self._seconds_each * self._most_at_once()

    def _make_some(
        self,
        numbers: Sequence[int],
        keys: Sequence[bytes],
        block: Sequence[MicroBatchId],
        reads: Sequence[Samples] | None,
        read_s: float,
        outage_s: float,
    ) -> Made:
        """Make some micro-batches of a block, and keep them."""
        share = len(numbers) / len(block)
        started = time.monotonic()
        finished = self._make(
            [block[number] for number in numbers],
            [reads[number] for number in numbers] if reads else None,
            read_s * share,
            outage_s * share,
        )
        self._seconds_each = (time.monotonic() - started) / len(numbers)
        self._keep([keys[number] for number in numbers], finished)
        return finished

    def _keep(self, keys: Sequence[bytes], of_block: Made) -> None:
        batches, bad, _ = of_block
        finished = dict[bytes, Stored]()
        dropped = list[bytes]()
        split = batches[0].position.split
        for key, batch in zip(keys, batches, strict=True):
            # Substitutes of a training, and the shape of images where none is good, depend on the plan.
            if (batch.num_bad and split == "train") or not batch.weight.any():
                dropped.append(key)
            else:
                finished[key] = Stored.of(batch, bad)
        self._cache.keep(finished, dropped, split in self.splits)


def _as_stored(
    block: Sequence[MicroBatchId],
    all_stored: Sequence[Stored],
    read_s: float,
    work_s: float,
) -> Made:
    """Return the micro-batches of a block, all of them remembered, without a copy."""
    batches = list[MicroBatch]()
    bad = list[BadSample]()
    for position, stored in zip(block, all_stored, strict=True):
        num = len(block)
        batch, bad_here = stored.at(position, read_s / num, work_s / num)
        batches.append(batch)
        bad += bad_here
    return batches, bad, {}


class _BlockParts:
    """The micro-batches of a block, in any order; each is copied into the block's memory when it comes.

    So it keeps no object of the memory, and micro-batches that a turn has made in its own memory leave that to the
    next turn.

    Args:
        block: places of the micro-batches.
        keys: their keys, which differ.
        read_s: seconds that a reader spent on each.
    """

    def __init__(
        self, block: Sequence[MicroBatchId], keys: Sequence[bytes], read_s: float
    ) -> None:
        self.batches: dict[int, MicroBatch] = {}
        self._block = block
        self._keys = keys
        self._read_s = read_s
        self._arrays: dict[str, np.ndarray] = {}

    def add_made(self, batches: dict[int, MicroBatch]) -> None:
        """Add new micro-batches, by their numbers in the block."""
        for number, batch in batches.items():
            self.batches[number] = self._copied(number, batch)

    def add_stored(self, batches: Mapping[bytes, Stored]) -> list[BadSample]:
        """Add remembered micro-batches, by their keys; return their bad samples."""
        bad = list[BadSample]()
        for number, key in enumerate(self._keys):
            if number in self.batches or key not in batches:
                continue
            started = time.perf_counter()
            place = self._block[number]
            batch, bad_here = batches[key].at(place, self._read_s, 0.0)
            copied = self._copied(number, batch)
            self.batches[number] = replace(copied, work_s=time.perf_counter() - started)
            bad += bad_here
        return bad

    def in_order(self) -> tuple[list[MicroBatch], dict[str, np.ndarray]]:
        """Return the micro-batches of the whole block, and arrays by field, (k, B, …)."""
        return [
            self.batches[number] for number in range(len(self._block))
        ], self._arrays

    def _copied(self, number: int, batch: MicroBatch) -> MicroBatch:
        arrays = batch.arrays()
        if not self.batches:
            self._arrays = reused_arrays(
                {
                    name: ((len(self._block), *array.shape), array.dtype)
                    for name, array in arrays.items()
                }
            )
        for name in list(self._arrays):
            # Where micro-batches have other shapes, the row joins them.
            if name not in arrays or self._arrays[name].shape[1:] != arrays[name].shape:
                del self._arrays[name]
        fields = dict(batch.fields)
        for name, whole in self._arrays.items():
            whole[number] = arrays[name]
            fields[name] = whole[number]
        return replace(batch, fields=fields)


class ClusterMemory:
    """The memory of the cluster, as one transform actor uses it; another thread calls `check_in`.

    Args:
        stream: name of the stream.
        num_bytes: limit of the node; None = a tenth of its object store.
        training: see `User`.
    """

    def __init__(self, stream: str, num_bytes: int | None, training: str) -> None:
        context = ray.get_runtime_context()
        self._user = User(
            f"{os.getpid()}-{secrets.token_hex(4)}",
            context.get_actor_id() or "",
            stream,
            context.get_node_id(),
            training,
        )
        self._process = this_process("transform actor")
        self._num_bytes = num_bytes
        self._room = num_bytes or 0
        self._num_check_ins = 0
        self._memory: Any = None
        self._keeper: Any = None
        self._failed_at = -_WITHOUT_S
        self._puts: dict[Any, list[bytes]] = {}
        self._bytes_each = 0  # The latest micro-batches had so many.
        self._is_kept = False  # those that were to be made last

    def check_in(self) -> None:
        """Give a sign of life; connect, if need be."""
        if self._memory is None and time.monotonic() - self._failed_at < _WITHOUT_S:
            return
        try:
            is_full = self._is_full()
            handle = self._memory or memory()
            connected = None
            if self._memory is None:
                connected = self._keeper = keeper()
                watched = connected.watch.remote(self._user.name, self._process)
                ray.get(watched, timeout=_START_S)
            ray.get(
                handle.check_in.remote(self._user, self._room, is_full, connected),
                timeout=_START_S,
            )
            self._memory = handle
        except ray.exceptions.RayError as error:
            self._fail(error)

    def _is_full(self) -> bool:
        """Return whether the node's object store is short of room, at a look now and then; set the limit."""
        self._num_check_ins += 1
        if self._num_check_ins % _LOOK_EVERY != 1:
            return False
        total, free = object_store_of(self._user.node)
        if self._num_bytes is None:
            self._room = int(_SHARE * total)
        return free < _LEAST_FREE * total

    def find(
        self, keys: Sequence[bytes], most: int, comes_back: bool
    ) -> tuple[dict[bytes, Stored], list[bytes]]:
        """See `BatchCache`."""
        turn: Turn | None = self._ask(
            "ask", self._user, list(keys), most, self._bytes_each, comes_back, _ASK_S
        )
        if turn is None:
            self._is_kept = False
            return {}, list(keys)
        self._is_kept = turn.is_kept
        stored = self._fetched(turn.found)
        if lost := [key for key in turn.found if key not in stored]:
            if self._memory is not None:
                self._memory.lost.remote(lost)
            return stored, [*turn.to_make, *lost]
        return stored, turn.to_make

    def keep(
        self, finished: dict[bytes, Stored], dropped: list[bytes], comes_back: bool
    ) -> None:
        """See `BatchCache`."""
        if self._memory is None or not self._is_kept:
            return
        keys = list(finished)
        self._look_at_puts()
        if keys and len(self._puts) < _MOST_PUTS:
            num_bytes = sum(stored.num_bytes for stored in finished.values())
            self._bytes_each = num_bytes // len(keys)
            put = self._keeper.keep.remote(
                self._user, keys, list(finished.values()), num_bytes, comes_back
            )
            self._puts[put] = keys
        else:
            dropped = [*dropped, *keys]
        if dropped and self._memory is not None:
            self._memory.give_up.remote(self._user, dropped)

    def _look_at_puts(self) -> None:
        """Look for puts that have ended; if one has failed, the keeper is dead, and others wait for its keys."""
        if not self._puts:
            return
        ended, _ = ray.wait(list(self._puts), num_returns=len(self._puts), timeout=0)
        for put in ended:
            keys = self._puts.pop(put)
            try:
                ray.get(put)
            except ray.exceptions.RayError as error:
                if self._memory is not None:
                    self._memory.give_up.remote(self._user, keys)
                    self._fail(error)

    def _fetched(self, found: dict[bytes, Found]) -> dict[bytes, Stored]:
        """Return the micro-batches at places, read-only; those that are missing are lost, and are made again."""
        refs = list({place.ref for place in found.values()})
        try:
            objects = dict(zip(refs, ray.get(refs, timeout=_FETCH_S), strict=True))
        except ray.exceptions.RayError:
            objects = {}
            for ref in refs:
                # a dead keeper's objects fail after a second each
                with contextlib.suppress(ray.exceptions.RayError):
                    objects[ref] = ray.get(ref, timeout=_ASK_S)
        return {
            key: objects[place.ref][place.number]
            for key, place in found.items()
            if place.ref in objects
        }

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call the memory; None = it does not answer."""
        handle = self._memory
        if handle is None:
            return None
        try:
            return ray.get(
                getattr(handle, method).remote(*arguments), timeout=_ANSWER_S
            )
        except ray.exceptions.RayError as error:
            self._fail(error)
            return None

    def _fail(self, error: Exception) -> None:
        logger.warning(
            "the memory of finished micro-batches does not answer (%s): they are made again for a while",
            type(error).__name__,
        )
        self._memory = None
        self._failed_at = time.monotonic()


def recall_of(
    spec: StreamSpec, make: Make, recipes: Recipes, stream: str
) -> Recall | None:
    """Return the recall of a transform actor, whose thread keeps it up to date; None = nothing is remembered.

    Args:
        make, recipes: `block` of the stream's `MicroBatchMaker`, and `recipes` of its sample makers.
        stream: name that no other stream has.
    """
    pool = spec.pool
    is_hasty = 0 < spec.transform.time_limit_s < _LEAST_LIMIT_S
    if pool.remember_bytes == 0 or is_hasty:
        return None
    contents = Contents(spec, recipes, stream)
    num_bytes = None if pool.remember_bytes == "auto" else pool.remember_bytes
    if pool.remember == "disk":
        return _on_disk(spec, make, contents, num_bytes)
    splits = _coming_back(spec, contents, least=2)
    alike = None
    content = ""
    training = contents.of_split("train")
    if training.is_public:
        order = f"{spec.plan.config.seed}-{spec.plan.config.micro_batch_size}"
        content = f"{training.digest.hex()}-{order}"
        alike = Alike(content, stream)
    cluster = ClusterMemory(stream, num_bytes, content)
    num_repeats = _num_repeats(spec, contents)
    recall = Recall(make, contents, cluster, splits, num_repeats)
    needs_memory = bool(splits) or num_repeats > 1
    if needs_memory or alike:
        threading.Thread(
            target=_keep_up,
            args=(recall, cluster, alike, needs_memory),
            name="raypipe-memory",
            daemon=True,
        ).start()
    return recall


def _on_disk(
    spec: StreamSpec, make: Make, contents: Contents, num_bytes: int | None
) -> Recall | None:
    """Return the recall of files, for content without the user's code: later runs find it, too."""
    splits = frozenset(
        split
        for split in _coming_back(spec, contents, least=1)
        if contents.of_split(split).is_public
    )
    num_repeats = _num_repeats(spec, contents)
    if not splits and num_repeats == 1:
        return None
    try:
        files = RememberedFiles(num_bytes)
    except OSError as error:
        logger.warning("nothing is remembered on disk: %s", error)
        return None
    return Recall(make, contents, files, splits, num_repeats)


def _num_repeats(spec: StreamSpec, contents: Contents) -> int:
    """Return how many micro-batches of a training step have one content: repeats without a random step."""
    num_repeats = spec.plan.config.aug_repeats
    is_repeated = num_repeats > 1 and contents.of_split("train").is_fixed
    return num_repeats if is_repeated else 1


def _keep_up(
    recall: Recall, cluster: ClusterMemory, alike: Alike | None, needs_memory: bool
) -> None:
    checked_in_at = -CHECK_IN_S
    while True:
        try:
            is_shared = alike is not None and alike.look()
            is_due = time.monotonic() - checked_in_at >= CHECK_IN_S
            if (is_shared and not recall.is_shared) or (
                is_due and (is_shared or needs_memory)
            ):
                cluster.check_in()
                checked_in_at = time.monotonic()
            recall.is_shared = is_shared
        except Exception:
            logger.debug("the memory cannot be looked at", exc_info=True)
        time.sleep(_LOOK_S)


def _coming_back(spec: StreamSpec, contents: Contents, least: int) -> frozenset[Split]:
    """Return the splits whose micro-batches are needed again: a validation, and the same of each epoch.

    Args:
        least: passes over them that the run has at least.
    """
    plan = spec.plan
    splits = set[Split]()
    num_validations = sum(plan.has_val(epoch) for epoch in range(plan.config.epochs))
    if "val" in spec.stores and num_validations >= least:
        splits.add("val")
    is_ordered = plan.config.shuffle == "off" and plan.config.is_plain
    if (
        is_ordered
        and plan.config.epochs >= least
        and spec.transform.strength_at(0.0) == spec.transform.strength_at(1.0)
        and contents.of_split("train").is_fixed
    ):
        splits.add("train")
    return frozenset(splits)
