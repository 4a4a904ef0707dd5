"""Mutated images and stores: each an image, a bad sample or one clear error; nothing dies, hangs or swells.

`python -m pytest -s --tier soak tests/mutations` takes all 25,800 of them, five minutes on two busy cores; the
default tier takes every kind's first tenth, and 120 at least. A failure names the input, which

    python fuzz/run_mutations.py KIND NUMBER 1 FOLDER

runs by itself.
"""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from mutation_runs import Program, Report
from tiers import in_system, is_soak

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


# What the program reads, by its own tables: a new entry has no mutants until a case is written for it.


@pytest.mark.parametrize("kind", in_system(NUM_INPUTS, "columns"))
def test_every_mutated_input_has_a_clear_outcome(
    kind: str, num_inputs: dict[str, int], reports: dict[str, list[Future[Report]]]
) -> None:
    report = Report()
    for batch in reports[kind]:
        report.add(batch.result())
    total = sum(report.outcomes.values(), Counter())
    cpu_s, *_ = report.slowest
    assert not report.wrong, "\n".join(report.wrong)
    assert total.total() == num_inputs[kind]
    assert total["good"] and total["bad sample"], (
        "the mutations reach nothing, or spoil everything"
    )
    assert cpu_s < MAX_CPU_S and report.peak_mib < PEAK_MIB
