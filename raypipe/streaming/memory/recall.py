"""Recall of finished micro-batches by a transform actor: it makes only those that nobody has made."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import ray

from raypipe.plan.places import MicroBatchId, Split
from raypipe.rayext.cluster_state import object_store_of
from raypipe.storage.retries import report_progress
from raypipe.stores.base import Columns
from raypipe.streaming.maker import Made
from raypipe.streaming.memory.content import Contents
from raypipe.streaming.memory.made_folder import Folder, memory_bytes, open_folder
from raypipe.streaming.memory.stored import Finished
from raypipe.streaming.memory.streams import Streams
from raypipe.streaming.sample_makers import SampleMakers
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.samples import read_by_reader

Make = Callable[..., Made]

_LOOK_S = 0.02


@dataclass(eq=False)
class Recall:
    """Puts blocks together, of remembered micro-batches and new ones.

    Attributes:
        make: makes the micro-batches of a block, see `MicroBatchMaker.block`.
        contents: their keys.
        folder: where they are.
        splits: splits whose micro-batches come back for sure.
        has_repeats: whether micro-batches of a step of the training have one content, see `plan.aug_repeats`.
        streams: those that make the same training; None = it is like no other.
    """

    make: Make
    contents: Contents
    folder: Folder
    splits: frozenset[Split]
    has_repeats: bool
    streams: Streams | None

    def wants(self, split: Split) -> bool:
        """Return whether a split's micro-batches may be remembered."""
        is_repeated = self.has_repeats and split == "train"
        return is_repeated or self.looks_for(split)

    def looks_for(self, split: Split) -> bool:
        """Return whether a split's micro-batches are needed again, by a later pass or by other streams."""
        if split in self.splits:
            return True
        return self.streams is not None and self.streams.are_others()

    def block(
        self,
        block: Sequence[MicroBatchId],
        given: Columns | None = None,
    ) -> Made:
        """Make the micro-batches of a block, see `MicroBatchMaker.block`, as far as they are not remembered."""
        keys = self.contents.keys(block)
        finished = dict[int, Finished]()
        while len(finished) < len(block):
            num_before = len(finished)
            for number, position in enumerate(block):
                if number in finished:
                    continue
                one = _repeated(finished.get(keys.index(keys[number])), position)
                if one is None:
                    samples = None
                    if given is not None:
                        size = len(given.labels) // len(block)
                        first = number * size
                        samples = given.rows(slice(first, first + size))
                    one = self._one(position, keys[number], samples)
                if one is not None:
                    finished[number] = one
            if len(finished) == num_before:
                report_progress()  # a time limit is not one of others' work
                time.sleep(_LOOK_S)
        batches = [finished[number][0] for number in range(len(block))]
        if given is not None:
            batches = read_by_reader(batches, given)
        bad = [sample for _, of_one in finished.values() for sample in of_one]
        return batches, bad, {}

    def _one(
        self,
        position: MicroBatchId,
        key: bytes,
        given: Columns | None,
    ) -> Finished | None:
        """Find or make a micro-batch; None = another process makes it."""
        started = time.perf_counter()
        found = self._get(position, key)
        if found is None:
            with self.folder.claim(key) as is_mine:
                if not is_mine:
                    return None
                found = self._get(position, key)
                if found is None:
                    return self._new(position, key, given)
        batch, bad = found
        return replace(batch, work_s=time.perf_counter() - started), bad

    def _get(self, position: MicroBatchId, key: bytes) -> Finished | None:
        return self.folder.get(key, position, position.split in self.splits)

    def _new(
        self, position: MicroBatchId, key: bytes, given: Columns | None
    ) -> Finished:
        """Make a micro-batch, and keep it."""
        (batch,), bad, _ = self.make([position], given)
        # Substitutes of a training, and the shape of images where none is good, depend on the plan.
        if not (batch.num_bad and position.split == "train") and batch.weight.any():
            lasts = position.split in self.splits
            self.folder.put(key, (batch, bad), lasts)
        return batch, bad


def recall_of(make: Make, makers: SampleMakers, stream: str) -> Recall | None:
    """Return the recall of a transform actor; None = nothing is remembered.

    Args:
        make, makers: `block` of the stream's `MicroBatchMaker`, and its sample makers.
        stream: name that no other stream has.
    """
    spec = makers.spec
    pool = spec.pool
    num_bytes = None
    ends_with_run = pool.remember_in == "memory"
    if ends_with_run and pool.remember_bytes is None:
        node = ray.get_runtime_context().get_node_id()
        num_bytes = memory_bytes(object_store_of(node))
    folder = open_folder(pool, num_bytes)
    if folder is None:
        return None
    contents = Contents(makers, stream)
    splits = _coming_back(spec, contents, least=2 if ends_with_run else 1)
    if not ends_with_run:
        splits = frozenset(split for split in splits if contents.first(split).is_public)
    # repeats without a random step
    has_repeats = spec.plan.config.aug_repeats > 1 and contents.first("train").is_fixed
    streams = streams_of(contents, folder, stream)
    if not (splits or has_repeats or streams):
        return None
    return Recall(make, contents, folder, splits, has_repeats, streams)


def _repeated(first: Finished | None, position: MicroBatchId) -> Finished | None:
    """Return a repeat of a micro-batch at its place; None = the place needs one of its own."""
    if first is None:
        return None
    batch, _ = first
    if batch.num_bad or not batch.weight.any():
        return None
    return replace(batch, position=position, num_remembered=1, work_s=0.0), []


def streams_of(contents: Contents, folder: Folder, stream: str) -> Streams | None:
    """Return the streams that make the same training, of which a stream is one; None = it is like no other."""
    content = contents.of_training()
    if not (content and folder.keeps_passing):
        return None
    streams = Streams(folder.path, content, stream)
    streams.are_others()
    return streams


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
        and contents.first("train").is_fixed
    ):
        splits.add("train")
    return frozenset(splits)
