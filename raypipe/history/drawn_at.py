"""Where a run draws samples, and how much of that has happened."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from raypipe.errors import ConfigError
from raypipe.history.quarantined import (
    BadRecord,
    names_of_records,
    read_bad_samples,
)
from raypipe.history.record_checks import damage_told, whole_number
from raypipe.history.recorded import RecordedRun, place_of
from raypipe.metrics.records import STATUS, read_records
from raypipe.plan.places import MicroBatchId, SamplePlace, Split
from raypipe.storage.files import read_json
from raypipe.storage.filesystem import exists, join_address
from raypipe.stores.base import Store, name_of
from raypipe.stores.scan import names_in

_NUM_NAMED = 3  # samples that an error about a name lists
_MAX_EPOCHS = 1_000_000  # a longer run is refused


@dataclass(frozen=True)
class SampleDraw:
    """A draw of a sample.

    Attributes:
        split, epoch: the training or the validation of which epoch, from 0.
        step: its number as in metrics.jsonl, from 1; a validation has that of the step before it.
        rank: the rank that got it, or will get it with as many ranks as now.
        micro: the micro-batch's number in the step.
        row: the row in the micro-batch.
        has_come: whether the run has reached it.
        was_bad: whether the run could not use it, by its quarantine/.
        replaced_by: the sample that the model saw instead of a bad one; None = none, so the row had weight 0.
        instead_of: the bad sample in whose place it was; None = the plan draws it.
    """

    split: Split
    epoch: int
    step: int
    rank: int
    micro: int
    row: int
    has_come: bool
    was_bad: bool = False
    replaced_by: int | None = None
    instead_of: int | None = None


@dataclass(frozen=True)
class SampleHistory:
    """A sample, and all of its draws in a run.

    Attributes:
        index: its index in the store; in a mixture counted through all stores.
        name: the store's name for it; empty = it has none.
        split: the store that has it, train or val.
        error: why the run could not use it; empty = it could.
        draws: in the order of the run.
    """

    index: int
    name: str
    split: Split
    error: str
    draws: list[SampleDraw]

    @property
    def num_drawn(self) -> int:
        """Number of draws that the run has reached."""
        return sum(draw.has_come for draw in self.draws)

    @property
    def num_to_come(self) -> int:
        """Number of draws that are to come."""
        return len(self.draws) - self.num_drawn


class _BadDraw(NamedTuple):
    place: MicroBatchId
    record: BadRecord


_Key = tuple[Split, int]


class History:
    """The draws of a run's samples; it reads the run's record once.

    Args:
        run: the run, from `open_run`.

    Attributes:
        num_done: steps that the run has done.
    """

    def __init__(self, run: RecordedRun) -> None:
        self.run = run
        status = join_address(run.address, STATUS)
        records = read_records(run.address)
        if exists(status):
            with damage_told(status):
                self.num_done = whole_number(read_json(status)["step"], "step")
        else:
            self.num_done = int(max((each["step"] for each in records), default=0))
        self._validated = {
            record.get("epoch") for record in records if record.get("kind") == "val"
        }
        self._bad = defaultdict[_Key, list[_BadDraw]](list)
        self._stood_in = defaultdict[_Key, list[_BadDraw]](list)
        folder = run.stream.quarantine
        for name in names_of_records(folder) if folder else ():
            place = run.check_place(place_of(name))
            for record in read_bad_samples(folder, place):
                draw = _BadDraw(place, record)
                self._bad[place.split, record.index].append(draw)
                if record.substitute is not None:
                    self._stood_in[place.split, record.substitute].append(draw)

    def of(self, sample: int | str, split: Split = "train") -> SampleHistory:
        """Find the draws of a sample.

        All draws of the run are made to find them. A name is looked for among all names of the store.

        Args:
            sample: its index, or the store's name for it, or the end of the name from a "/" or a blank on.
            split: the store.

        Raises:
            ConfigError: there is no such sample, or there are several of the name.
        """
        store = self._store(split)
        index = sample if isinstance(sample, int) else index_of(store, sample)
        return self._of_indices([index], split)[0]

    def bad(self) -> list[SampleHistory]:
        """Find the draws of all samples that the run could not use, by its quarantine/."""
        splits: tuple[Split, Split] = ("train", "val")
        found = []
        for split in splits:
            indices = sorted(index for of, index in self._bad if of == split)
            if indices:
                found += self._of_indices(indices, split)
        return found

    def _store(self, split: Split) -> Store:
        store = self.run.spec.stores.get(split)
        if store is None:
            raise ConfigError(f"{self.run.address} has no validation store")
        return store

    def _of_indices(self, indices: list[int], split: Split) -> list[SampleHistory]:
        """The histories of several samples, in one pass over the run's draws."""
        store = self._store(split)
        for index in indices:
            if not 0 <= index < len(store):
                raise ConfigError(
                    f"{store.address} has the samples 0 to {len(store) - 1:,}, and no sample {index:,}"
                )
        num_epochs = self.run.plan.config.epochs
        if num_epochs > _MAX_EPOCHS:
            raise ConfigError(
                f"{self.run.address} has {num_epochs:,} epochs, and draws are listed for {_MAX_EPOCHS:,} at most"
            )
        bad = {
            (index, draw.place): draw.record
            for index in indices
            for draw in self._bad[split, index]
        }
        draws = {index: list(self._stand_ins(index, split)) for index in indices}
        for index, place in self.run.plan.places_of_all(indices, split):
            record = bad.get((index, place.micro_batch))
            draws[index].append(self._draw(place, record))
        histories = []
        for index, of_index in draws.items():
            of_index.sort(key=attrgetter("epoch", "step", "micro", "row"))
            errors = (draw.record.error for draw in self._bad[split, index])
            name = name_of(store, index)
            error = next(errors, "")
            histories.append(SampleHistory(index, name, split, error, of_index))
        return histories

    def _stand_ins(self, index: int, split: Split) -> Iterator[SampleDraw]:
        """The recorded draws of bad samples that this one has replaced."""
        for place, record in self._stood_in[split, index]:
            drawn = self.run.plan.draw(place).indices.tolist()
            for row, other in enumerate(drawn):
                if other == record.index:
                    yield self._draw(SamplePlace(place, row), instead_of=other)

    def _draw(
        self,
        place: SamplePlace,
        bad: BadRecord | None = None,
        instead_of: int | None = None,
    ) -> SampleDraw:
        at = place.micro_batch
        step = self.run.step_of(at)
        if at.split == "val":
            has_come = step < self.num_done or at.epoch in self._validated
        else:
            has_come = step <= self.num_done
        return SampleDraw(
            at.split,
            at.epoch,
            step,
            self.run.rank_of(at),
            at.micro,
            place.row,
            has_come,
            bad is not None,
            bad.substitute if bad else None,
            instead_of,
        )


def index_of(store: Store, name: str) -> int:
    """Find a sample by its column `name`, or by its place in the store, in a pass over all of them.

    Args:
        name: the name, or its end from a "/" or a blank on.

    Raises:
        ConfigError: there is no such sample, or there are several.
    """
    found: list[int] = []
    for full_names in (
        names_in(store),
        (name_of(store, index) for index in range(len(store))),
    ):
        for index, full_name in enumerate(full_names):
            if full_name == name:
                return index
            if str(full_name).endswith((f"/{name}", f" {name}")):
                found.append(index)
        if found:
            break
    if len(found) == 1:
        return found[0]
    if found:
        some = ", ".join(
            f"{index} ({name_of(store, index)})" for index in found[:_NUM_NAMED]
        )
        raise ConfigError(
            f"{len(found)} samples of {store.address} have a name that ends in {name!r}, such as {some}: give "
            "the index, or more of the name"
        )
    first = name_of(store, 0)
    example = (
        f"; its names look like {first!r}" if first else ", whose samples have no names"
    )
    raise ConfigError(f"no sample of {store.address} has the name {name!r}{example}")
