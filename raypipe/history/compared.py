"""Where the orders, settings and losses of two recorded runs part; `Replay.compare` has their pixels, too."""

from __future__ import annotations

from typing import Any

import numpy as np

from raypipe.history.recorded import RecordedRun
from raypipe.plan.schedule import Plan
from raypipe.streaming.digest import other_settings

# Settings that decide nothing that a model sees.
_FREE = ("workers", "actors", "from_step", "to_step")
# Draws that are compared at most, which takes some seconds.
_MAX_DRAWS = 1 << 22


def other_records(first: RecordedRun, second: RecordedRun) -> dict[str, Any]:
    """Compare what two runs have recorded.

    Returns:
        `settings` that differ, name → (the first's, the second's); and `loss`: the first step at which their
        records have different losses, None = there is none.
    """
    settings = other_settings(first.starts[-1].settings, second.starts[-1].settings)
    for name in _FREE:
        settings.pop(name, None)
    losses = _losses(first)
    others = _losses(second)
    parted = [step for step in losses.keys() & others if losses[step] != others[step]]
    return {"settings": settings, "loss": min(parted, default=None)}


def first_other_draws(one: Plan, other: Plan) -> tuple[int | None, int]:
    """Look for the first step that one of two plans skips, or that has other samples or other keys.

    Returns:
        The step, None = there is none among those compared; and how many steps were compared.
    """
    num_steps = min(plan.config.epochs * plan.steps_per_epoch for plan in (one, other))
    if one.fingerprint == other.fingerprint:
        return None, num_steps
    num_steps = min(num_steps, max(1, _MAX_DRAWS // one.global_batch_size))
    for step in range(num_steps):
        is_skipped = one.skipped.has(step)
        if is_skipped != other.skipped.has(step):
            return step + 1, step + 1
        if is_skipped:
            continue
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
        for record in run.records
        if record.get("kind") == "train" and "loss" in record
    }
