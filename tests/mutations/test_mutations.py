"""Mutated images and stores: each an image, a bad sample or one clear error; nothing dies, hangs or swells.

`python -m pytest -s --tier soak tests/mutations` takes all 25,800 of them, five minutes on two busy cores; the
default tier takes every kind's first tenth, and 120 at least. It prints the outcomes, and a failure names the
input, which

    python fuzz/run_mutations.py KIND NUMBER 1 FOLDER

runs by itself.
"""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, get_args

import pyarrow as pa
import pytest
from mutate_columns import GROUPS, RECORD, Case, numeric_types
from mutation_runs import Program, Report
from tiers import in_system, is_soak

from raypipe.stores.arrow_columns import is_target
from raypipe.stores.kinds import STORES
from raypipe.stores.record import COLUMN_TYPES
from raypipe.transform.fields import FieldKind
from raypipe.transform.targets import TARGETS

NUM_INPUTS = {
    **{"png": 1100, "jpeg": 1100, "webp": 800, "bmp": 700, "gif": 500, "tiff": 500},
    **{"parquet": 1200, "lmdb": 1400, "tar": 600, "webdataset": 600, "folder": 300},
    **{"columns": 8000, "labels": 9000},  # of damaged values, see mutate_columns
}
BATCH = 1000  # per process
PEAK_MIB = 1100  # above what a process had before its first input
MAX_CPU_S = 24.0


@pytest.fixture(scope="module")
def num_inputs(pytestconfig: pytest.Config) -> dict[str, int]:
    return {
        kind: num if is_soak(pytestconfig) else max(120, num // 10)
        for kind, num in NUM_INPUTS.items()
    }


@pytest.fixture(scope="module")
def reports(
    num_inputs: dict[str, int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, list[Future[Report]]]]:
    """The batches of each kind, on their way in two processes at a time."""
    folder = tmp_path_factory.mktemp("mutations")
    programs = queue.SimpleQueue[Program]()

    def run(*batch: Any) -> Report:
        program = programs.get()
        try:
            return program.run(*batch)
        finally:
            programs.put(program)

    for _ in range(2):
        programs.put(Program())
    with ThreadPoolExecutor(2) as pool:
        yield {
            kind: [
                pool.submit(
                    run,
                    kind,
                    first,
                    min(BATCH, num - first),
                    folder / kind / str(first),
                )
                for first in range(0, num, BATCH)
            ]
            for kind, num in num_inputs.items()
        }
        pool.shutdown(cancel_futures=True)
    for _ in range(2):
        programs.get().end()


def test_there_are_as_many_as_is_said() -> None:
    assert sum(NUM_INPUTS.values()) == 25_800


# What the program reads, by its own tables: a new entry has no mutants until a case is written for it.


def cases() -> list[Case]:
    return [case for make in GROUPS.values() for case in make()]


def test_every_format_of_stores_has_damaged_values() -> None:
    # a table's values are those of Parquet's columns
    assert {case.store for case in cases()} == {*STORES} - {"table"}


def test_every_column_and_target_has_damaged_values_in_every_format() -> None:
    found: dict[str, set[str]] = {}
    for case in cases():
        found.setdefault(case.store, set()).add(case.form.split(",")[0])
    kinds = {*get_args(FieldKind), *TARGETS} - {"item"}
    with_columns = {store for store, kinds_of in found.items() if "text" in kinds_of}
    assert with_columns == {"lmdb", "parquet", "tar"}
    for store in with_columns:
        assert kinds <= {form.partition(" ")[0] for form in found[store]}, store


def test_every_type_of_a_label_has_damaged_values() -> None:
    forms = {
        store: {case.form for case in cases() if case.store == store}
        for store in STORES
    }
    others = [
        pa.null(),
        pa.date32(),
        pa.timestamp("s"),
        pa.duration("s"),
        pa.string(),
        pa.binary(),
    ]
    others += [
        pa.decimal128(5),
        pa.decimal256(5),
        pa.decimal32(5),
        pa.binary(4),
        pa.list_(pa.string()),
    ]
    accepted = [kind for kind in [*numeric_types(), *others] if is_target(kind)]
    assert {f"label {kind}" for kind in accepted} <= forms["parquet"]
    numbers = [kind for kind in COLUMN_TYPES if kind not in ("binary", "string")]
    assert {f"label {kind}" for kind in numbers} <= forms["lmdb"] and set(
        RECORD.values()
    ) >= set(COLUMN_TYPES)
    assert {
        "label cls",
        "label JSON integer",
        "label JSON number",
        "label JSON list",
    } <= forms["tar"]


@pytest.mark.parametrize("kind", in_system(NUM_INPUTS, "columns"))
def test_every_mutated_input_has_a_clear_outcome(
    kind: str, num_inputs: dict[str, int], reports: dict[str, list[Future[Report]]]
) -> None:
    report = Report()
    for batch in reports[kind]:
        report.add(batch.result())
    total = sum(report.outcomes.values(), Counter())
    print(
        f"\n{kind:10} {'mutation':22} {'good':>6} {'bad sample':>11} {'clear error':>12} {'wrong':>6}"
    )
    for name, counts in [*sorted(report.outcomes.items()), ("all", total)]:
        wrong = (
            counts.total()
            - counts["good"]
            - counts["bad sample"]
            - counts["clear error"]
        )
        columns = f"{counts['good']:6} {counts['bad sample']:11} {counts['clear error']:12} {wrong:6}"
        print(f"{'':10} {name:22} {columns}")
    cpu_s, number, name = report.slowest
    print(
        f"slowest: {cpu_s:.1f} s, input {number} ({name}); peak of memory: {report.peak_mib:.0f} MiB"
    )
    assert not report.wrong, "\n".join(report.wrong)
    assert total.total() == num_inputs[kind]
    assert total["good"] and total["bad sample"], (
        "the mutations reach nothing, or spoil everything"
    )
    assert cpu_s < MAX_CPU_S and report.peak_mib < PEAK_MIB
