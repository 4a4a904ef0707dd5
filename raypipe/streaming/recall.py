"""Recall of finished micro-batches by a transform actor: it makes only those that nobody has made.

Recall          chooses the micro-batches to look for, and puts blocks together
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
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import ray

from raypipe.plan.places import MicroBatchId, Split
from raypipe.rayext.cluster_state import object_store_of
from raypipe.storage.retries import report_progress
from raypipe.streaming.alike import Alike
from raypipe.streaming.bad_samples import BadSample
from raypipe.streaming.content import Contents, Recipes
from raypipe.streaming.remembered import CHECK_IN_S, Reply, User, keeper, memory
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
# An actor waits so long for what another one makes, and asks so often in between.
_WAIT_S = 10.0
_TURN_S = 0.5
# A time limit of a micro-batch that is shorter leaves no time to look for it.
_LEAST_LIMIT_S = 15.0
_LOOK_EVERY = 6  # check-ins: the object store of the node is looked at
# Objects that its keeper has not taken yet.
_MOST_PUTS = 4


class BatchCache(Protocol):
    """Where finished micro-batches are kept, by their keys."""

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Stored | None]:
        """Return those that are there; and, as None, those that others make now."""
        ...

    def wait(self, keys: Sequence[bytes]) -> dict[bytes, Stored]:
        """Wait for those that others make, within a limit, and return those that came."""
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
    """

    def __init__(
        self,
        make: Make,
        contents: Contents,
        cache: BatchCache,
        splits: frozenset[Split],
    ) -> None:
        self._make = make
        self._contents = contents
        self._cache = cache
        self.splits = splits
        self.is_shared = False

    def wants(self, block: Sequence[MicroBatchId]) -> bool:
        """Return whether a block's micro-batches may be remembered."""
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
        started = time.perf_counter()
        stored = self._cache.find(keys)
        if not stored:
            finished = self._make(block, reads, read_s, outage_s)
            self._keep(keys, finished)
            return finished
        first = [number for number, key in enumerate(keys) if key not in stored]
        new, bad = self._make_some(first, keys, block, reads, read_s, outage_s)
        if awaited := [key for key, batch in stored.items() if batch is None]:
            stored |= self._cache.wait(awaited)
        late = [number for number, key in enumerate(keys) if not stored.get(key, True)]
        more, more_bad = self._make_some(late, keys, block, reads, read_s, outage_s)
        batches = {batch.position: batch for batch in (*new, *more)}
        bad = [*bad, *more_bad]
        made_s = sum(batch.work_s for batch in batches.values())
        copied_s = max(0.0, time.perf_counter() - started - made_s)
        work_s = copied_s / max(1, len(block) - len(batches))
        batch_read_s = read_s / len(block) if reads else 0.0
        for key, position in zip(keys, block, strict=True):
            if position not in batches:
                remembered = stored[key]
                assert remembered is not None, "it was made"
                batches[position], bad_here = remembered.at(
                    position, batch_read_s, work_s
                )
                bad += bad_here
        in_order = [batches[position] for position in block]
        if len(stored) == len(block):
            return in_order, bad, {}
        return in_order, bad, _joined(in_order)

    def _make_some(
        self,
        numbers: Sequence[int],
        keys: Sequence[bytes],
        block: Sequence[MicroBatchId],
        reads: Sequence[Samples] | None,
        read_s: float,
        outage_s: float,
    ) -> tuple[list[MicroBatch], list[BadSample]]:
        """Make some micro-batches of a block, and keep them."""
        if not numbers:
            return [], []
        share = len(numbers) / len(block)
        finished = self._make(
            [block[number] for number in numbers],
            [reads[number] for number in numbers] if reads else None,
            read_s * share,
            outage_s * share,
        )
        self._keep([keys[number] for number in numbers], finished)
        batches, bad, _ = finished
        return batches, bad

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


def _joined(batches: Sequence[MicroBatch]) -> dict[str, np.ndarray]:
    """Copy arrays of one shape into one array each, (k, B, …), in memory that blocks use again."""
    kinds = {}
    for name, values in batches[0].arrays().items():
        if all(batch[name].shape == values.shape for batch in batches):
            kinds[name] = ((len(batches), *values.shape), values.dtype)
    arrays = reused_arrays(kinds)
    for name, array in arrays.items():
        for number, batch in enumerate(batches):
            array[number] = batch[name]
    return arrays


class ClusterMemory:
    """The memory of the cluster, as one transform actor uses it; another thread calls `check_in`.

    Args:
        stream: name of the stream.
        num_bytes: limit of the node; None = a tenth of its object store.
    """

    def __init__(self, stream: str, num_bytes: int | None) -> None:
        context = ray.get_runtime_context()
        self._user = User(
            f"{os.getpid()}-{secrets.token_hex(4)}",
            context.get_actor_id() or "",
            stream,
            context.get_node_id(),
        )
        self._num_bytes = num_bytes
        self._room = num_bytes or 0
        self._num_check_ins = 0
        self._memory: Any = None
        self._keeper: Any = None
        self._failed_at = -_WITHOUT_S
        self._puts: dict[Any, list[bytes]] = {}

    def check_in(self) -> None:
        """Give a sign of life; connect, if need be."""
        if self._memory is None and time.monotonic() - self._failed_at < _WITHOUT_S:
            return
        try:
            is_full = self._is_full()
            handle = self._memory or memory()
            ray.get(
                handle.check_in.remote(self._user, self._room, is_full),
                timeout=_START_S,
            )
            if self._memory is None:
                self._keeper = keeper()
                ray.get(self._keeper.node.remote(), timeout=_START_S)
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

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Stored | None]:
        """See `BatchCache`."""
        return self._results(keys, self._ask("ask", self._user, list(keys)))

    def wait(self, keys: Sequence[bytes]) -> dict[bytes, Stored]:
        """See `BatchCache`."""
        arrived = dict[bytes, Stored]()
        pending = list(keys)
        end = time.monotonic() + _WAIT_S
        while pending and time.monotonic() < end:
            report_progress()  # a time limit is not one of others' work
            answers = self._ask("wait", self._user, pending, _TURN_S)
            if answers is None:
                break
            results = self._results(pending, answers)
            arrived |= {key: stored for key, stored in results.items() if stored}
            if len(results) < len(pending):  # the rest is for this actor to make
                break
            pending = [key for key in pending if results[key] is None]
        return arrived

    def keep(
        self, finished: dict[bytes, Stored], dropped: list[bytes], comes_back: bool
    ) -> None:
        """See `BatchCache`."""
        if self._memory is None:
            return
        keys = list(finished)
        num_bytes = sum(stored.num_bytes for stored in finished.values())
        self._look_at_puts()
        is_admitted = (
            keys
            and len(self._puts) < _MOST_PUTS
            and self._ask("admit", self._user, keys, num_bytes, comes_back)
        )
        if is_admitted:
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

    def _results(
        self, keys: Sequence[bytes], answers: Sequence[Reply] | None
    ) -> dict[bytes, Stored | None]:
        """Fetch what is there; None stands for what others make."""
        results = dict[bytes, Stored | None]()
        if not answers:
            return results
        objects = dict[Any, Any]()
        lost = list[bytes]()
        for key, answer in zip(keys, answers, strict=True):
            if answer == "wait":
                results[key] = None
            elif answer != "make":
                ref, number = answer
                if ref not in objects:
                    # a dead keeper's objects fail after a second each
                    objects[ref] = None if lost else self._fetched(ref)
                if objects[ref] is None:
                    lost.append(key)
                else:
                    results[key] = objects[ref][number]
        if lost and self._memory is not None:
            self._memory.lost.remote(lost)
        return results

    def _fetched(self, ref: Any) -> list[Stored] | None:
        """Return an object's micro-batches, read-only; None = it is lost, and they are made again."""
        with contextlib.suppress(ray.exceptions.RayError):
            return ray.get(ref, timeout=_FETCH_S)
        return None

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
    cluster = ClusterMemory(stream, num_bytes)
    recall = Recall(make, contents, cluster, splits)
    alike = None
    training = contents.of_split("train")
    if training.is_public:
        order = f"{spec.plan.config.seed}-{spec.plan.config.micro_batch_size}"
        alike = Alike(f"{training.digest.hex()}-{order}", stream)
    if splits or alike:
        threading.Thread(
            target=_keep_up,
            args=(recall, cluster, alike, bool(splits)),
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
    if not splits:
        return None
    try:
        files = RememberedFiles(num_bytes)
    except OSError as error:
        logger.warning("nothing is remembered on disk: %s", error)
        return None
    return Recall(make, contents, files, splits)


def _keep_up(
    recall: Recall, cluster: ClusterMemory, alike: Alike | None, comes_back: bool
) -> None:
    while True:
        try:
            is_shared = alike is not None and alike.look()
            if is_shared or comes_back:
                cluster.check_in()
            recall.is_shared = is_shared
        except Exception:
            logger.debug("the memory cannot be looked at", exc_info=True)
        time.sleep(CHECK_IN_S)


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
