"""Where a run draws samples, and how much of that has happened."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import pyarrow.fs

from raypipe.errors import ConfigError
from raypipe.history.record_checks import damage_told, whole_number
from raypipe.history.recorded import RecordedRun
from raypipe.history.recorded_stream import BadSample
from raypipe.metrics.records import STATUS, read_records
from raypipe.plan.places import MicroBatchId, SamplePlace, Split
from raypipe.storage.files import read_json
from raypipe.storage.filesystem import exists, join_address, open_filesystem
from raypipe.stores.base import Store, name_of
from raypipe.stores.scan import names_in

_ORDER = attrgetter("epoch", "step", "micro", "row")
_NUM_NAMED = 3  # samples that an error about a name lists
_MAX_EPOCHS = 1_000_000  # a longer run is refused


class SampleDraw(NamedTuple):
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
        num_drawn, num_to_come: numbers of draws that the run has reached, and of others.
        draws: in the order of the run.
    """

    index: int
    name: str
    split: Split
    error: str
    num_drawn: int
    num_to_come: int
    draws: list[SampleDraw]


class History:
    """The draws of a run's samples; it reads the run's record once.

    Args:
        run: the run, from `open_run`.

    Attributes:
        num_done: steps that the run has done.
    """

    def __init__(self, run: RecordedRun) -> None:
        self._run = run
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
        self._bad = dict[MicroBatchId, dict[int, BadSample]]()
        folder = run.stream.quarantine
        filesystem, path = open_filesystem(folder or run.address)
        selector = pyarrow.fs.FileSelector(path, allow_not_found=True)
        for info in filesystem.get_file_info(selector) if folder else ():
            if info.base_name.endswith(".jsonl"):
                place = run.place_of(info.base_name.removesuffix(".jsonl"))
                samples = run.stream.bad_samples(place)
                self._bad[place] = {sample.index: sample for sample in samples}

    def of(self, sample: int | str, split: Split = "train") -> SampleHistory:
        """Find the draws of a sample.

        All draws of the run are made to find them. A name is looked for among all names of the store.

        Args:
            sample: its index, or the store's name for it, or the end of the name from a "/" or a blank on.
            split: the store.

        Raises:
            ConfigError: there is no such sample, or there are several of the name.
        """
        if isinstance(sample, str):
            sample = index_of(self._store(split), sample)
        return self._of_indices([sample], split)[0]

    def bad(self) -> list[SampleHistory]:
        """Find the draws of all samples that the run could not use, by its quarantine/."""
        splits: tuple[Split, Split] = ("train", "val")
        found = []
        for split in splits:
            of_split = [bad for at, bad in self._bad.items() if at.split == split]
            indices = sorted({index for bad in of_split for index in bad})
            if indices:
                found += self._of_indices(indices, split)
        return found

    def _store(self, split: Split) -> Store:
        store = self._run.spec.stores.get(split)
        if store is None:
            raise ConfigError(f"{self._run.address} has no validation store")
        return store

    def _of_indices(self, indices: Sequence[int], split: Split) -> list[SampleHistory]:
        """The histories of several samples, in one pass over the run's draws."""
        store = self._store(split)
        num_epochs = self._run.plan.config.epochs
        for index in indices:
            if not 0 <= index < len(store):
                raise ConfigError(
                    f"{store.address} has the samples 0 to {len(store) - 1:,}, and no sample {index:,}"
                )
        if num_epochs > _MAX_EPOCHS:
            raise ConfigError(
                f"{self._run.address} has {num_epochs:,} epochs, and draws are listed for {_MAX_EPOCHS:,} at most"
            )
        errors = {
            index: bad.error
            for at, of_place in self._bad.items()
            for index, bad in of_place.items()
            if at.split == split
        }
        found = self._draws_of(indices, split)
        histories = []
        for index in indices:
            draws = sorted(found[index], key=_ORDER)
            num = sum(draw.has_come for draw in draws)
            name = name_of(store, index)
            error = errors.get(index, "")
            histories.append(
                SampleHistory(index, name, split, error, num, len(draws) - num, draws)
            )
        return histories

    def _draws_of(
        self, indices: Sequence[int], split: Split
    ) -> dict[int, list[SampleDraw]]:
        """The plan's draws of samples, and the recorded ones of bad samples that they have replaced."""
        plan = self._run.plan
        draws = defaultdict[int, list[SampleDraw]](list)
        for index, place in plan.places_of(indices, split):
            bad = self._bad.get(place.micro_batch, {}).get(index)
            draws[index].append(self._draw(place, bad))
        for at, of_place in self._bad.items():
            for sample in of_place.values():
                other = sample.substitute
                if at.split == split and other is not None and other in indices:
                    rows = np.flatnonzero(plan.indices(at) == sample.index)
                    draws[other] += [
                        self._draw(SamplePlace(at, row), instead_of=sample.index)
                        for row in rows.tolist()
                    ]
        return draws

    def _draw(
        self,
        place: SamplePlace,
        bad: BadSample | None = None,
        instead_of: int | None = None,
    ) -> SampleDraw:
        at = place.micro_batch
        step = self._run.step_of(at)
        has_come = step <= self.num_done
        if at.split == "val":
            has_come = step < self.num_done or at.epoch in self._validated
        return SampleDraw(
            at.split,
            at.epoch,
            step,
            self._run.rank_of(at),
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
    ends = (f"/{name}", f" {name}")
    for names in (
        names_in(store),
        (name_of(store, index) for index in range(len(store))),
    ):
        found: dict[int, str] = {}
        for index, full_name in enumerate(map(str, names)):
            if full_name == name:
                return index
            if full_name.endswith(ends):
                found[index] = full_name
        if len(found) == 1:
            return min(found)
        if found:
            some = [f"{index} ({name_of(store, index)})" for index in found]
            raise ConfigError(
                f"{len(found)} samples of {store.address} have a name that ends in {name!r}, such as "
                f"{', '.join(some[:_NUM_NAMED])}: give the index, or more of the name"
            )
    first = name_of(store, 0)
    raise ConfigError(
        f"no sample of {store.address} has the name {name!r}; that of the first is {first!r}"
    )
