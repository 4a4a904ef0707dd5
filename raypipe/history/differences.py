"""Differences between a record and micro-batches that were made again, and the meaning of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raypipe.history.epoch_checks import EpochSummary
from raypipe.history.findings import NUM_NAMED, Finding
from raypipe.plan.places import PADDING, MicroBatchId, Split
from raypipe.stores.base import Store, name_of
from raypipe.streaming.record import merkle
from raypipe.streaming.record.digest_log import EpochRecord, leaf_of


@dataclass
class Difference:
    """A micro-batch whose hash is not the recorded one when it is made again.

    Attributes:
        position: its place.
        recorded, remade: both hashes.
        indices: its samples.
    """

    position: MicroBatchId
    recorded: str
    remade: str
    indices: np.ndarray


@dataclass
class RemadeBatches:
    """Micro-batches of a record that were made again.

    Attributes:
        store_of: returns the store that a micro-batch was read from.
        epochs: all epochs of the record.
        records: the record of each epoch that was compared.
        different: those with another hash.
        equal: the samples of the others.
    """

    store_of: Callable[[MicroBatchId], Store]
    epochs: Mapping[int, EpochSummary]
    records: Mapping[int, EpochRecord]
    different: list[Difference]
    equal: list[tuple[MicroBatchId, np.ndarray]]

    def explained(
        self, recorded_at: Mapping[str, Sequence[MicroBatchId]]
    ) -> Iterator[Finding]:
        """Yield a finding for each difference: an exchange, a forged hash, or other data.

        Args:
            recorded_at: the places at which each of the hashes is recorded, see `hashes`.
        """
        restored = {epoch for epoch in self.records if self._is_restored(epoch)}
        unexplained = list[Difference]()
        for difference in self.different:
            position = difference.position
            both = (difference.remade, difference.recorded)
            exchanged_with = [
                recorded
                for hash_hex in both
                for recorded in recorded_at.get(hash_hex, ())
                if recorded != position
            ]
            if exchanged_with:
                text = (
                    f"{position} has another hash when it is made again, and was exchanged with "
                    f"{exchanged_with[0]}"
                )
                yield Finding.of("exchanged", text, [position])
            elif position.epoch in restored:
                text = (
                    f"{position}: its hash was changed after the run. With the hash that it has when it is made "
                    "again, the epoch's root is right"
                )
                yield Finding.of("hash", text, [position])
            else:
                unexplained.append(difference)
        yield from self._of_data(unexplained)

    @property
    def hashes(self) -> Collection[str]:
        """Both hashes of each difference."""
        hashes = {difference.remade for difference in self.different}
        return hashes | {difference.recorded for difference in self.different}

    def changed_roots(self) -> Iterator[Finding]:
        """Yield a finding for each epoch that was compared as a whole, whose hashes are right and its root not."""
        for epoch, record in self.records.items():
            summary = self.epochs[epoch]
            num_equal = sum(position.epoch == epoch for position, _ in self.equal)
            is_changed = any(
                root.num_micro_batches == num_equal and root.root != summary.root
                for root in record.roots
            )
            if is_changed and num_equal == summary.micro_batches:
                text = (
                    f"epoch {epoch}: all its hashes are right, so its root was changed"
                )
                yield Finding("root", text, epoch)

    def _is_restored(self, epoch: int) -> bool:
        """Return whether the recorded root fits the hashes that micro-batches have when they are made again."""
        if self.epochs[epoch].fits is not False:
            return False
        record = self.records[epoch]
        remade = {
            difference.position: difference.remade for difference in self.different
        }
        leaves = [
            leaf_of(position, remade[position]) if position in remade else leaf
            for position, leaf in record.leaves()
        ]
        root = merkle.root(leaves).hex()
        return any(recorded.root == root for recorded in record.roots)

    def _of_data(self, different: Sequence[Difference]) -> Iterator[Finding]:
        """Yield findings for micro-batches of other data, and the samples that could be the cause."""
        for difference in different:
            position = difference.position
            if self.epochs[position.epoch].fits:
                why = "the root fits the record, so the model got other data, or a sample of the store has changed"
            else:
                why = "the record was changed, the model got other data, or a sample of the store has changed"
            text = f"{position} has another hash when it is made again: {why}"
            yield Finding.of("batch", text, [position])
        splits: tuple[Split, Split] = ("train", "val")
        for split in splits:
            of_split = [
                difference
                for difference in different
                if difference.position.split == split
            ]
            good = [
                indices for position, indices in self.equal if position.split == split
            ]
            if of_split and (suspects := _suspects(of_split, good)):
                text = self._about_samples(of_split, suspects, len(good))
                yield Finding("store", text)

    def _about_samples(
        self, different: Sequence[Difference], suspects: list[int], num_equal: int
    ) -> str:
        """The sentence about samples that are in all micro-batches that differ."""
        position = different[0].position
        store = self.store_of(position)
        names = [f"{index} ({name_of(store, index)})" for index in suspects[:NUM_NAMED]]
        more = len(suspects) - len(names)
        if len(suspects) == 1:
            subject = f"sample {names[0]} is"
        else:
            subject = (
                f"samples {', '.join(names)}{f' and {more} more' if more else ''} are"
            )
        return (
            f"{subject} in all {len(different)} micro-batches of {position.split} that differ, and in none of the "
            f"{num_equal} that are equal: look at {store.address} there"
        )


def recorded_with(
    hashes: Collection[str], records: Iterator[EpochRecord]
) -> dict[str, list[MicroBatchId]]:
    """Return the places that are recorded with these hashes."""
    positions = defaultdict[str, list[MicroBatchId]](list)
    for record in records:
        for position, recorded in record.hashes.items():
            if recorded.stream in hashes:
                positions[recorded.stream].append(position)
    return positions


def _suspects(different: Sequence[Difference], good: Sequence[np.ndarray]) -> list[int]:
    """The samples that all differing micro-batches have, and no equal one."""
    common = set(different[0].indices.tolist()) - {PADDING}
    for difference in different[1:]:
        common &= set(difference.indices.tolist())
    for indices in good:
        common -= set(indices.tolist())
    return sorted(common)
