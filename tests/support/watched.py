"""`raypipe.loader` for the pages' scripts: each rank writes down what it is given, and one kills a process."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ray import cloudpickle

import raypipe
from raypipe.device.prefetcher import Batch
from raypipe.plan.places import MicroBatchId
from raypipe.plan.schedule import Plan
from raypipe.streaming.loader import Loader

# The trainers of a cluster cannot import a module of the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def loader(
    folder: str, dies_at: int, victim: int, spec: raypipe.StreamSpec, **options: Any
) -> Loader:
    """What `raypipe.loader` makes, watched.

    Args:
        folder: where rank r writes seen-r, the samples of each micro-batch, and rank 0 what was reported.
        dies_at: the step before which rank 0 kills, in a run that began at its beginning; 0 = never.
        victim: a process's id; 0 = that of rank 0.
    """
    made = raypipe.loader(spec, **options)
    take, report = made._next, made.report
    kills = dies_at if made.rank == made.global_step == 0 else 0

    def write(name: str, line: list[Any]) -> None:
        with Path(folder, name).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def watched(at: MicroBatchId) -> Batch:
        batch = take(at)
        if kills and at.split == "train" and made.plan.global_step(at) == kills:
            os.kill(victim or os.getpid(), signal.SIGKILL)
            time.sleep(600)  # Ray ends the workers of a driver that has died
        write(
            f"seen-{made.rank}",
            [at.split, at.epoch, at.step, at.micro, *batch.index.tolist()],
        )
        return batch

    def reported(metrics: dict[str, Any], **parts: Any) -> None:
        if made.rank == 0:
            write("reported", [made.global_step, metrics])
        report(metrics, **parts)

    made._next, made.report = watched, reported  # type: ignore[method-assign, assignment]
    return made


def lines(folder: Path, name: str) -> list[list[Any]]:
    """What is in a file, which is then removed."""
    found = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    (folder / name).unlink()
    return found


def planned(
    plan: Plan, rank: int, world_size: int, from_step: int = 0
) -> list[list[Any]]:
    """What a rank's seen-r has to be, from a training step on."""
    return [
        [at.split, at.epoch, at.step, at.micro, *plan.indices(at).tolist()]
        for at in plan.micro_batches(plan.cursor_at(from_step))
        if at.micro % world_size == rank
    ]
