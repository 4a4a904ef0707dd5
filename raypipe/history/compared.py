"""Where two recorded runs part: their settings, the first step with other samples, pixels, or losses."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from raypipe.errors import RaypipeError
from raypipe.history.recorded import RecordedRun
from raypipe.metrics.records import read_records
from raypipe.plan.schedule import Plan
from raypipe.storage.filesystem import as_uri
from raypipe.streaming.digest import other_settings
from raypipe.streaming.hashes import batch_hash

# Settings that decide nothing that a model sees.
_FREE = ("workers", "actors", "from_step", "to_step")
# Draws that are compared at most, which takes some seconds.
_MAX_DRAWS = 1 << 22
# Steps whose pixels are compared: the first, and those at the begin of epochs.
_MAX_MADE = 8


class Steps(Protocol):
    """A run and the batches of its steps: a `Replay`."""

    run: RecordedRun

    def __len__(self) -> int: ...

    def __getitem__(self, step: int, /) -> Any: ...


def compare_runs(first: Steps, second: Steps) -> dict[str, Any]:
    """Compare two runs.

    Returns:
        `equal`: nothing differs in what was compared; `settings` that differ, name → [the first's, the second's];
        `order`: the first step with other samples or seeds, None = none of the `compared_steps` has; `pixels`: the
        first step that was made and is not the same, None = none is; `made_steps`; `loss`: the first step at which
        their records have different losses; and `unknown`: why pixels could not be compared, empty = they were.
    """
    order, compared_steps = first_other_draws(first.run.plan, second.run.plan)
    # until the order parts, else the first and those that begin epochs
    num_steps = min(len(first), len(second)) if order is None else order - 1
    begins = range(1, num_steps + 1, max(1, first.run.plan.steps_per_epoch))
    made: list[int] = []
    pixels = None
    unknown = ""
    try:
        for step in begins[:_MAX_MADE]:
            hashes = [[*map(batch_hash, run[step])] for run in (first, second)]
            made.append(step)
            if hashes[0] != hashes[1]:
                pixels = step
                break
    except RaypipeError as error:
        made = []
        unknown = str(error)
    settings = other_settings(first.run.config, second.run.config)
    for name in _FREE:
        settings.pop(name, None)
    losses = _losses(first.run)
    others = _losses(second.run)
    parted = [step for step in losses.keys() & others if losses[step] != others[step]]
    return {
        "equal": order is None and pixels is None,
        "settings": settings,
        "order": order,
        "compared_steps": compared_steps,
        "pixels": pixels,
        "made_steps": made,
        "loss": min(parted, default=None),
        "unknown": unknown,
    }


def first_other_draws(one: Plan, other: Plan) -> tuple[int | None, int]:
    """Look for the first step at which two plans have other samples or other keys.

    Returns:
        The step, None = there is none among those compared; and how many steps were compared.
    """
    num_steps = min(plan.config.epochs * plan.steps_per_epoch for plan in (one, other))
    if one.fingerprint == other.fingerprint:
        return None, num_steps
    num_steps = min(num_steps, max(1, _MAX_DRAWS // one.global_batch_size))
    for step in range(num_steps):
        if not np.array_equal(_drawn(one, step), _drawn(other, step)):
            return step + 1, step + 1
    return None, num_steps


def _drawn(plan: Plan, step: int) -> np.ndarray:
    """The samples and their keys of a step that is counted from 0 through all epochs, (n, 3)."""
    first = step * plan.global_batch_size
    draws = plan.draw_epoch(0, np.arange(first, first + plan.global_batch_size))
    keys = plan.sample_keys("train", draws)
    return np.column_stack([draws.indices.astype(np.uint64), keys])


def _losses(run: RecordedRun) -> dict[int, float]:
    return {
        record["step"]: record["loss"]
        for record in read_records(as_uri(run.address))
        if record.get("kind") == "train" and "loss" in record
    }
