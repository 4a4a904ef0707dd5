"""Where a run draws samples, and how much of that has happened."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from raypipe.errors import ConfigError
from raypipe.history.record_checks import damage_told, read_lines, whole_number
from raypipe.history.recorded import RecordedRun
from raypipe.metrics.flags import FLAGS
from raypipe.metrics.records import STATUS
from raypipe.plan.places import SamplePlace, Split
from raypipe.printing import Result
from raypipe.storage.files import names_of_lines, read_json
from raypipe.storage.filesystem import as_uri, exists, join_address
from raypipe.stores.base import Store, name_of
from raypipe.stores.scan import sample_names

_NUM_NAMED = 3  # samples that an error about a name lists
_MAX_EPOCHS = 1_000_000  # a longer run is refused


class History:
    """The draws of a run's samples; it reads the run's record once.

    Args:
        run: the run.

    Attributes:
        num_done: steps that the run has done.
    """

    def __init__(self, run: RecordedRun) -> None:
        self._run = run
        # a kill leaves a status of some seconds before the last record
        steps = [int(record["step"]) for record in run.records]
        status = join_address(run.address, STATUS)
        if exists(status):
            with damage_told(status):
                steps.append(whole_number(read_json(status)["step"], "step"))
        self.num_done = max(steps)
        self._validated = {
            record.get("epoch") for record in run.records if record.get("kind") == "val"
        }
        folder = run.stream.quarantine
        self._bad = {
            (sample.position, sample.index): sample
            for name in (names_of_lines(folder) if folder else ())
            for sample in run.stream.bad_samples(run.place_of(name))
        }

    def of(self, sample: int | str, split: Split = "train") -> Result:
        """Find the draws of a sample.

        All draws of the run are made to find them. A name is looked for among all names of the store.

        Args:
            sample: its index, or the store's name for it, or the end of the name from a "/" or a blank on.
            split: the store.

        Returns:
            `index` in the store, in a mixture counted through all stores; `name`, empty = it has none; `split`;
            `error`: why the run could not use it, empty = it could; `num_drawn` and `num_to_come`: numbers of
            draws that the run has reached, and of others; and `draws` in the order of the run, each with `split`,
            `epoch`, `step` (as in metrics.jsonl, from 1; a validation has that of the step before it), `rank` (got
            it, or will get it with as many ranks as now), `micro`, `row`, `has_come`, `was_bad` (whether the run
            could not use it), `replaced_by` (the sample that the model saw instead; None = none, so the row had
            weight 0) and `instead_of` (the bad sample in whose place it was; None = the plan draws it).

        Raises:
            ConfigError: there is no such sample, or there are several of the name.
        """
        if isinstance(sample, str):
            sample = index_of(self._store(split), sample)
        return self._of_indices([sample], split)[0]

    def bad(self) -> list[Result]:
        """Find the draws of all samples that the run could not use, by its quarantine/; see `of`."""
        return [*self._bad_in("train"), *self._bad_in("val")]

    def _bad_in(self, split: Split) -> list[Result]:
        errors = self._errors(split)
        return self._of_indices(sorted(errors), split) if errors else []

    def _errors(self, split: Split) -> dict[int, str]:
        """The samples of a split that the run could not use, and why."""
        return {
            bad.index: bad.error
            for bad in self._bad.values()
            if bad.position.split == split
        }

    def flags(self) -> list[Result]:
        """Read all micro-batches that the loop has flagged, in the order of the run's steps."""
        folder = join_address(as_uri(self._run.address), FLAGS)
        flags = list[Result]()
        for name in names_of_lines(folder):
            written = read_lines(join_address(folder, f"{name}.jsonl"), _flag)
            of_reason = {flag["reason"]: {**flag, "place": name} for flag in written}
            flags += of_reason.values()
        return sorted(flags, key=itemgetter("step", "place", "time"))

    def _store(self, split: Split) -> Store:
        store = self._run.stream.spec.stores.get(split)
        if store is None:
            raise ConfigError(f"{self._run.address} has no validation store")
        return store

    def _of_indices(self, indices: list[int], split: Split) -> list[Result]:
        """The histories of several samples, in one pass over the run's draws."""
        store = self._store(split)
        plan = self._run.plan
        for index in indices:
            if not 0 <= index < len(store):
                raise ConfigError(
                    f"{store.address} has the samples 0 to {len(store) - 1:,}, and no sample {index:,}"
                )
        if plan.config.epochs > _MAX_EPOCHS:
            raise ConfigError(
                f"{self._run.address} has {plan.config.epochs:,} epochs, and draws are listed for "
                f"{_MAX_EPOCHS:,} at most"
            )
        errors = self._errors(split)
        draws: dict[int | None, list[Result]] = {index: [] for index in indices}
        epochs = [
            epoch
            for epoch in range(plan.config.epochs)
            if split == "train" or self._run.has_val(epoch)
        ]
        for index, place in plan.places_of([*indices, *errors], split, epochs):
            draw = self._draw(place)
            bad = self._bad.get((place.micro_batch, index))
            if bad:
                draws.get(bad.substitute, []).append(draw | {"instead_of": index})
                draw |= {"was_bad": True, "replaced_by": bad.substitute}
            draws.get(index, []).append(draw)
        return [
            {
                "index": index,
                "name": name_of(store, index),
                "split": split,
                "error": errors.get(index, ""),
                "num_drawn": sum(draw["has_come"] for draw in draws[index]),
                "num_to_come": sum(not draw["has_come"] for draw in draws[index]),
                "draws": draws[index],
            }
            for index in indices
        ]

    def _draw(self, place: SamplePlace) -> Result:
        at = place.micro_batch
        step = self._run.step_of(at)
        has_come = step <= self.num_done
        if at.split == "val":
            has_come = step < self.num_done or at.epoch in self._validated
        return {
            "split": at.split,
            "epoch": at.epoch,
            "step": step,
            "rank": self._run.rank_of(at),
            "micro": at.micro,
            "row": place.row,
            "has_come": has_come,
            "was_bad": False,
            "replaced_by": None,
            "instead_of": None,
        }


def _flag(flag: Any) -> Result:
    """A line of a flag; raises ValueError for anything else."""
    for number in ("epoch", "step", "rank", "micro"):
        whole_number(flag[number], number)
    return {**flag, "time": float(flag["time"]), "reason": str(flag["reason"])}


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
        found: dict[int, str] = {}
        for index, full_name in enumerate(map(str, names)):
            if full_name == name:
                return index
            if full_name.endswith(ends):
                found[index] = full_name
        if len(found) == 1:
            return next(iter(found))
        if found:
            some = [f"{index} ({each})" for index, each in found.items()][:_NUM_NAMED]
            raise ConfigError(
                f"{len(found)} samples of {store.address} have a name that ends in {name!r}, such as "
                f"{', '.join(some)}: give the index, or more of the name"
            )
    first = name_of(store, 0)
    raise ConfigError(
        f"no sample of {store.address} has the name {name!r}; that of the first is {first!r}"
    )
