"""Where a run draws samples, and how much of that has happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow.fs

from raypipe.errors import ConfigError
from raypipe.history.record_checks import damage_told, read_lines, whole_number
from raypipe.history.recorded import RecordedRun
from raypipe.history.recorded_stream import RecordedBad
from raypipe.metrics.flags import FLAGS
from raypipe.metrics.records import STATUS, read_records
from raypipe.plan.places import MicroBatchId, SamplePlace, Split
from raypipe.storage.files import read_json
from raypipe.storage.filesystem import as_uri, exists, join_address, open_filesystem
from raypipe.stores.base import Store, name_of
from raypipe.stores.scan import sample_names

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
        self._bad = dict[MicroBatchId, dict[int, RecordedBad]]()
        folder = run.stream.quarantine
        for name in _names_in(folder) if folder else ():
            place = run.place_of(name)
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

    def flags(self) -> list[dict[str, Any]]:
        """Read all micro-batches that the loop has flagged, in the order of the run's steps."""
        folder = join_address(as_uri(self._run.address), FLAGS)
        flags = []
        for name in _names_in(folder):
            address = join_address(folder, f"{name}.jsonl")
            with damage_told(address):
                for flag in read_lines(address):
                    for number in ("epoch", "step", "rank", "micro"):
                        whole_number(flag[number], number)
                    place = (flag["step"], name, float(flag["time"]))
                    flags.append((place, {**flag, "reason": str(flag["reason"])}))
        return [flag for _, flag in sorted(flags, key=itemgetter(0))]

    def _store(self, split: Split) -> Store:
        store = self._run.spec.stores.get(split)
        if store is None:
            raise ConfigError(f"{self._run.address} has no validation store")
        return store

    def _of_indices(self, indices: Sequence[int], split: Split) -> list[SampleHistory]:
        """The histories of several samples, in one pass over the run's draws."""
        store = self._store(split)
        self._check(indices, store)
        draws, errors = self._draws_of(indices, split)
        histories = []
        for index, of_index in draws.items():
            of_index.sort(key=_ORDER)
            name = name_of(store, index)
            num = sum(draw.has_come for draw in of_index)
            num_left = len(of_index) - num
            histories.append(
                SampleHistory(
                    index, name, split, errors[index], num, num_left, of_index
                )
            )
        return histories

    def _check(self, indices: Sequence[int], store: Store) -> None:
        """Raise ConfigError if a sample does not exist, or the draws are too many."""
        for index in indices:
            if not 0 <= index < len(store):
                raise ConfigError(
                    f"{store.address} has the samples 0 to {len(store) - 1:,}, and no sample {index:,}"
                )
        num_epochs = self._run.plan.config.epochs
        if num_epochs > _MAX_EPOCHS:
            raise ConfigError(
                f"{self._run.address} has {num_epochs:,} epochs, and draws are listed for {_MAX_EPOCHS:,} "
                "at most"
            )

    def _draws_of(
        self, indices: Sequence[int], split: Split
    ) -> tuple[dict[int, list[SampleDraw]], dict[int, str]]:
        """The draws of samples, also as substitutes of bad ones, and the errors of those that are bad."""
        plan = self._run.plan
        draws: dict[int, list[SampleDraw]] = {index: [] for index in indices}
        errors = dict.fromkeys(indices, "")
        for index, place in plan.places_of(indices, split):
            bad = self._bad.get(place.micro_batch, {}).get(index)
            draws[index].append(self._draw(place, bad))
        for at, of_place in self._bad.items():
            for bad in of_place.values() if at.split == split else ():
                errors[bad.index] = bad.error
                if bad.substitute in draws:
                    rows = np.flatnonzero(plan.indices(at) == bad.index).tolist()
                    draws[bad.substitute] += [
                        self._draw(SamplePlace(at, row), instead_of=bad.index)
                        for row in rows
                    ]
        return draws, errors

    def _draw(
        self,
        place: SamplePlace,
        bad: RecordedBad | None = None,
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


def _names_in(folder: str) -> list[str]:
    """The names of a folder's files of JSON lines."""
    filesystem, path = open_filesystem(folder)
    selector = pyarrow.fs.FileSelector(path, allow_not_found=True)
    names = (info.base_name for info in filesystem.get_file_info(selector))
    return [name.removesuffix(".jsonl") for name in names if name.endswith(".jsonl")]


def index_of(store: Store, name: str) -> int:
    """Find a sample by its column `name`, or by its place in the store, in a pass over all of them.

    Args:
        name: the name, or its end from a "/" or a blank on.

    Raises:
        ConfigError: there is no such sample, or there are several.
    """
    ends = (f"/{name}", f" {name}")
    of_rows = (name_of(store, index) for index in range(len(store)))
    for names in (sample_names(store), of_rows):
        found: list[int] = []
        for index, full_name in enumerate(map(str, names)):
            if full_name == name:
                return index
            if full_name.endswith(ends):
                found.append(index)
        if len(found) == 1:
            return found[0]
        if found:
            some = [
                f"{index} ({name_of(store, index)})" for index in found[:_NUM_NAMED]
            ]
            raise ConfigError(
                f"{len(found)} samples of {store.address} have a name that ends in {name!r}, such as "
                f"{', '.join(some)}: give the index, or more of the name"
            )
    first = name_of(store, 0)
    raise ConfigError(
        f"no sample of {store.address} has the name {name!r}; that of the first is {first!r}"
    )
