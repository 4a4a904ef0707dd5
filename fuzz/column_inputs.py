"""Runs the cases of `mutate_columns`: a store with one damaged value, read, converted and made into a micro-batch.

Each row must be what the library of the format makes of the stored value, to the bit. A value that the library
cannot read has no row: its sample is a bad one, with its name, or one error names the store.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from mutate_columns import GROUPS, NUM, Case

from raypipe.config import PlanConfig, TransformConfig
from raypipe.errors import ConfigError, StoreError
from raypipe.plan.places import MicroBatchId
from raypipe.stores import open_store
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.opening import open_stream
from raypipe.streaming.row import of_source_row, source_row
from raypipe.transform.fields import COLUMN, MicroBatch, Ragged, in_group
from raypipe.transform.samples import read_samples

AT = MicroBatchId("train", 0, 0, 0)


class Columns:
    """One store per input: of a case, with one value damaged, or in each case's first turn with none."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._folder = folder
        self.mutations = [(case.name, case) for case in GROUPS[kind]()]

    def run(self, number: int, rng: np.random.Generator) -> tuple[str, str]:
        turn, place = divmod(number, len(self.mutations))
        name, case = self.mutations[place]
        values = [case.seeds[i % len(case.seeds)] for i in range(NUM)]
        damaged = NUM - 1 if rng.integers(4) else int(rng.integers(NUM))
        whole = [value for value in case.seeds if value != b""]
        values[damaged] = sound = whole[int(rng.integers(len(whole)))]
        if turn:
            mutate = list(case.damage.values())[int(rng.integers(len(case.damage)))]
            values[damaged] = mutate(values[damaged], rng)
        path = self._folder / str(number)
        try:
            outcome = check(
                case, path, values, damaged, through_row=bool(rng.integers(2))
            )
        finally:
            for left in self._folder.glob(f"{number}*"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        assert outcome == "good" or values[damaged] is not sound, (
            f"a sound store is {outcome}"
        )
        return name, outcome

    def warm_up(self) -> None:
        stores = {case.store: number for number, (_, case) in enumerate(self.mutations)}
        for number in stores.values():
            assert self.run(number, np.random.default_rng(0))[1] == "good"


def check(
    case: Case, path: Path, values: list[Any], damaged: int, through_row: bool
) -> str:
    """What becomes of a store of these values, of which one may be damaged."""
    written = case.write(path, values)
    address = getattr(written, "address", str(written))
    try:
        rows = rows_of(case, written, damaged, through_row)
    except (StoreError, ConfigError) as error:
        assert address in str(error) and len(str(error)) < 2_000, error
        return "clear error"
    assert rows.keys() | {damaged} == set(range(NUM)), "a sound sample is missing"
    for index, row in rows.items():
        try:
            meaning = case.mean(values[index])
        except Exception as error:
            raise AssertionError(
                f"{values[index]!r:.60} cannot be read ({error!s:.60}), and is {row!r:.60}"
            ) from None
        assert is_same(case, row, meaning), (
            f"{values[index]!r:.60} is {meaning!r:.60}, and became {row!r:.60}"
        )
    return "good" if damaged in rows else "bad sample"


def rows_of(
    case: Case, written: Any, damaged: int, through_row: bool
) -> dict[int, Any]:
    """The samples of a micro-batch by their indices; the damaged one may have been recorded as a bad one."""
    store = (
        open_store(written, **case.options) if isinstance(written, Path) else written
    )
    spec = open_stream(
        store,
        plan=PlanConfig(epochs=1, micro_batch_size=NUM, shuffle="off"),
        transform=TransformConfig(train="none", **case.transform),
        columns=case.columns,
    )
    given = None
    if through_row:  # as a reader hands it over
        reads_class = spec.columns.reads_class
        read = read_samples(store, spec.plan.indices(AT), spec.names, reads_class)
        _, given = of_source_row(source_row([AT], read))
    (batch,), bad, _ = MicroBatchMaker(spec).block([AT], given)
    store.close()
    assert [sample.index for sample in bad] in ([], [damaged])
    assert all(sample.error and (sample.name or sample.store) for sample in bad)
    rows: dict[int, Any] = {}
    for row, index in enumerate(batch.index.tolist()):
        assert batch.weight[row] == 1
        rows[index] = row_of(case, batch, row)
    assert bool(bad) == (damaged not in batch.index.tolist())
    return rows


def row_of(case: Case, batch: MicroBatch, row: int) -> Any:
    columns = {
        name: (values.unpacked() if isinstance(values, Ragged) else values)[row]
        for name, values in in_group(batch.fields, COLUMN).items()
    }
    if not case.column:
        return {"label": batch["label"][row], **columns}
    if case.column in ("label", "image", "mask", "boxes", "keypoints"):
        return batch[case.column][row]
    found = columns[case.column]
    if f"{case.column}_length" in columns:
        length = int(columns[f"{case.column}_length"])
        assert (found[length:] == case.columns[case.column]["fill"]).all()
        return found[:length]
    return found


def is_same(case: Case, row: Any, meaning: Any) -> bool:
    """Whether a row is what a value means: to the bit, but for the fractions of floats that its dtype rounds."""
    if isinstance(meaning, dict) and not case.column:
        return all(
            is_same(case, row[name], each)
            for name, each in meaning.items()
            if name in row
        )
    if isinstance(meaning, str | bytes):
        return type(row) is type(meaning) and row == meaning
    if isinstance(meaning, dict | list) and not isinstance(row, np.ndarray):
        return json.dumps(row) == json.dumps(meaning)
    if case.column in ("boxes", "keypoints"):
        assert (row[len(meaning) :, -1] == -1).all()
        row = row[: len(meaning)]
    if case.column == "label" and np.ndim(row) and np.ndim(meaning) == 0:
        return False
    found, exact = (
        np.asarray(row),
        meaning if isinstance(meaning, np.ndarray) else np.asarray(meaning, object),
    )
    if found.shape != exact.shape:
        return not found.size and not exact.size
    return all(itertools.starmap(is_same_number, _pairs(found, exact)))


def _pairs(found: np.ndarray, exact: np.ndarray) -> Iterator[tuple[Any, Any, Any]]:
    for number, wanted in zip(found.flat, exact.flat, strict=True):
        yield (
            number.item(),
            wanted.item() if isinstance(wanted, np.generic) else wanted,
            found.dtype,
        )


def is_same_number(found: Any, wanted: Any, dtype: Any) -> bool:
    if found == wanted or (found != found and wanted != wanted):
        return True
    if (
        not isinstance(wanted, float)
        or dtype.kind != "f"
        or not math.isfinite(found)
        or not math.isfinite(wanted)
    ):
        return False
    return bool(found == dtype.type(wanted).item())
