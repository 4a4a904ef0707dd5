"""Recall of finished micro-batches by a transform actor: it makes only those that nobody has made.

Recall        chooses the micro-batches to look for, and puts blocks together
_BlockParts   the micro-batches of a block, as they come, in any order
recall_of     the recall of an actor, with the memory of the cluster or the files of its node
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from raypipe.plan.places import MicroBatchId, Split
from raypipe.rayext.ray_thread import RayThread
from raypipe.storage.retries import report_progress
from raypipe.streaming.bad_samples import BadSample
from raypipe.streaming.memory.alike import Alike
from raypipe.streaming.memory.cluster_memory import ClusterMemory
from raypipe.streaming.memory.content import Contents, Recipes
from raypipe.streaming.memory.remembered import CHECK_IN_S
from raypipe.streaming.memory.remembered_files import RememberedFiles
from raypipe.streaming.memory.stored import Stored
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.block_memory import reused_arrays
from raypipe.transform.fields import MicroBatch
from raypipe.transform.samples import Samples

logger = logging.getLogger(__name__)

Made = tuple[list[MicroBatch], list[BadSample], dict[str, np.ndarray]]
"""Micro-batches of a block, their bad samples, and arrays by field, as of `MicroBatchMaker.block`."""
Make = Callable[..., Made]

# Streams that make the same share the work on a block in pieces of so many seconds.
_TURN_S = 0.1
# An actor waits at most this long, and this many of its turns, where others make all that is missing.
_WAIT_S = 1.0
_WAIT_TURNS = 4
# A time limit of a micro-batch that is shorter leaves no time to look for it.
_LEAST_LIMIT_S = 15.0
# Between two looks of an actor for streams alike, at the head's key-value store, which answers every actor of the
# cluster. The time doubles while they find the same; a stream that begins later looks at its own start.
_LOOK_S = 1.0


class BatchCache(Protocol):
    """Where finished micro-batches are kept, by their keys."""

    def find(
        self, keys: Sequence[bytes], limit: int, comes_back: bool
    ) -> tuple[dict[bytes, Stored], list[bytes]]:
        """Return those that are there, and the keys of up to `limit` others that the caller is to make now.

        Where both are empty, others make all of them at this time. Those that the rank collects come as outlines.
        """
        ...

    def keep(
        self, finished: dict[bytes, Stored], dropped: list[bytes], comes_back: bool
    ) -> dict[bytes, Stored]:
        """Keep finished micro-batches, and return outlines of those that the rank collects.

        Args:
            dropped: keys that are not to be kept.
        """
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
        split = block[0].split
        is_repeated = self.num_repeats > 1 and split == "train"
        return is_repeated or self.looks_for(split)

    def looks_for(self, split: Split) -> bool:
        """Return whether a split's micro-batches are looked for in the memory."""
        return self.is_shared or split in self.splits

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
        if self.looks_for(block[0].split) or len(keys) < len(first) * self.num_repeats:
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
                by_place[position] = replace(
                    first,
                    position=position,
                    num_remembered=1,
                    read_s=0.0,
                    work_s=0.0,
                    outage_s=0.0,
                )
                bad_here = []
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
        read_s_each = read_s / len(block) if reads else 0.0
        parts = _BlockParts(block, keys, read_s_each)
        missing = list(range(len(block)))
        bad = list[BadSample]()
        asked_at = started = time.monotonic()
        while missing:
            limit = self._most_at_once() if self.is_shared else len(block)
            waited = [keys[number] for number in missing]
            stored, to_make = self._cache.find(waited, limit, comes_back)
            if len(stored) == len(block):
                work_s = (time.monotonic() - started) / len(block)
                return parts.all_stored(stored, work_s)
            bad += parts.add_stored(stored)
            if not stored and not to_make:
                report_progress()  # a time limit is not one of others' work
                if time.monotonic() - asked_at < self._longest_wait_s():
                    continue
                to_make = waited
            claimed = set(to_make)
            numbers = [number for number in missing if keys[number] in claimed]
            if numbers:
                of_turn = self._make_some(numbers, keys, block, reads, read_s, outage_s)
                if len(numbers) == len(block):
                    return of_turn
                batches, bad_of_some, _ = of_turn
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
        """Make some micro-batches of a block, and keep them; those that the rank collects are only keys then."""
        share = len(numbers) / len(block)
        started = time.monotonic()
        finished = self._make(
            [block[number] for number in numbers],
            [reads[number] for number in numbers] if reads else None,
            read_s * share,
            outage_s * share,
        )
        self._seconds_each = (time.monotonic() - started) / len(numbers)
        return self._kept([keys[number] for number in numbers], finished)

    def _kept(self, keys: Sequence[bytes], of_block: Made) -> Made:
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
        outlines = self._cache.keep(finished, dropped, split in self.splits)
        if not outlines:
            return of_block
        collected = [
            _collected(batch, key, outlines[key]) if key in outlines else batch
            for key, batch in zip(keys, batches, strict=True)
        ]
        return collected, bad, {}


def _collected(batch: MicroBatch, key: bytes, outline: Stored) -> MicroBatch:
    """Return a new micro-batch without the fields that its rank collects."""
    return replace(
        batch, fields={}, memory_key=key, memory_bytes=outline.collected_bytes
    )


class _BlockParts:
    """The micro-batches of a block, in any order; each is copied into the block's memory when it comes.

    So micro-batches that a turn has made in its own memory leave that to the next turn, and it keeps no object of
    the memory. The block's memory has only those whose fields the rank does not collect, one behind the other.

    Args:
        block: places of the micro-batches.
        keys: their keys, which differ.
        read_s: seconds that a reader spent on each.
    """

    def __init__(
        self,
        block: Sequence[MicroBatchId],
        keys: Sequence[bytes],
        read_s: float,
    ) -> None:
        self.batches: dict[int, MicroBatch] = {}
        self._copied_numbers: list[int] = []
        self._block = block
        self._keys = keys
        self._read_s = read_s
        self._arrays: dict[str, np.ndarray] = {}

    def add_made(self, batches: dict[int, MicroBatch]) -> None:
        """Add new micro-batches, by their numbers in the block."""
        for number, batch in batches.items():
            if not batch.memory_key:
                batch = self._copied(number, batch)
            self.batches[number] = batch

    def add_stored(self, batches: Mapping[bytes, Stored]) -> list[BadSample]:
        """Add remembered micro-batches, by their keys; return their bad samples."""
        bad = list[BadSample]()
        for number, key in enumerate(self._keys):
            if number in self.batches or key not in batches:
                continue
            started = time.perf_counter()
            batch, bad_here = self._at(number, batches[key], 0.0)
            if not batch.memory_key:
                batch = self._copied(number, batch)
            self.batches[number] = replace(batch, work_s=time.perf_counter() - started)
            bad += bad_here
        return bad

    def all_stored(self, batches: Mapping[bytes, Stored], work_s: float) -> Made:
        """Return the micro-batches of the block, all of them remembered, without a copy."""
        in_order = list[MicroBatch]()
        bad = list[BadSample]()
        for number, key in enumerate(self._keys):
            batch, bad_here = self._at(number, batches[key], work_s)
            in_order.append(batch)
            bad += bad_here
        return in_order, bad, {}

    def in_order(self) -> tuple[list[MicroBatch], dict[str, np.ndarray]]:
        """Return the micro-batches of the whole block, and arrays by field of those that are copied, (n, B, …)."""
        batches = [self.batches[number] for number in range(len(self._block))]
        numbers = self._copied_numbers
        if numbers == sorted(numbers):
            rows: slice | np.ndarray = slice(len(numbers))
        else:
            rows = np.argsort(numbers)
        return batches, {name: whole[rows] for name, whole in self._arrays.items()}

    def _at(
        self, number: int, stored: Stored, work_s: float
    ) -> tuple[MicroBatch, list[BadSample]]:
        """Return a remembered micro-batch, and its bad samples, at its place."""
        return stored.at(self._block[number], self._read_s, work_s, self._keys[number])

    def _copied(self, number: int, batch: MicroBatch) -> MicroBatch:
        arrays = batch.arrays()
        row = len(self._copied_numbers)
        self._copied_numbers.append(number)
        if len(self._copied_numbers) == 1:
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
            whole[row] = arrays[name]
            fields[name] = whole[row]
        return replace(batch, fields=fields)


def recall_of(
    spec: StreamSpec,
    make: Make,
    recipes: Recipes,
    stream: str,
    hands_over: bool = False,
    ranks_folder: str = "",
) -> Recall | None:
    """Return the recall of a transform actor, whose thread keeps it up to date; None = nothing is remembered.

    Args:
        make, recipes: `block` of the stream's `MicroBatchMaker`, and `recipes` of its sample makers.
        stream: name that no other stream has.
        hands_over: see `ClusterMemory`.
        ranks_folder: see `RememberedFiles`.
    """
    pool = spec.pool
    is_hasty = 0 < spec.transform.time_limit_s < _LEAST_LIMIT_S
    if pool.remember_bytes == 0 or is_hasty:
        return None
    contents = Contents(spec, recipes, stream)
    num_bytes = None if pool.remember_bytes == "auto" else pool.remember_bytes
    if pool.remember == "disk":
        return _on_disk(spec, make, contents, num_bytes, ranks_folder)
    splits = _coming_back(spec, contents, least=2)
    content = contents.of_training()
    alike = Alike(content, stream) if content else None
    cluster = ClusterMemory(stream, num_bytes, content, hands_over)
    num_repeats = _num_repeats(spec, contents)
    recall = Recall(make, contents, cluster, splits, num_repeats)
    needs_memory = bool(splits) or num_repeats > 1
    if needs_memory or alike:
        turn = functools.partial(_keep_up, recall, cluster, alike, needs_memory)
        RayThread(turn, _LOOK_S, "raypipe-memory").start()
    return recall


def _on_disk(
    spec: StreamSpec,
    make: Make,
    contents: Contents,
    num_bytes: int | None,
    ranks_folder: str,
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
        files = RememberedFiles(num_bytes, ranks_folder=ranks_folder)
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
    is_shared = alike is not None and alike.look()
    is_due = time.monotonic() - cluster.checked_in_at >= CHECK_IN_S
    if (is_shared and not recall.is_shared) or (is_due and (is_shared or needs_memory)):
        cluster.check_in()
        cluster.checked_in_at = time.monotonic()
    recall.is_shared = is_shared


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
