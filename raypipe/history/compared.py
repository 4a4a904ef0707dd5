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
# Steps whose draws are compared at once.
_CHUNK = 256
# Steps whose pixels are compared: the first, and those at the begin of epochs.
_MAX_MADE = 8


class Steps(Protocol):
    """A run and its batches by step and number: a `Replay`."""

    run: RecordedRun

    def __getitem__(self, key: tuple[int, int], /) -> Any: ...


def compare_runs(first: Steps, second: Steps) -> dict[str, Any]:
    """Compare two runs.

    Returns:
        `equal`: nothing differs in what was compared; `settings` that differ, name → [the first's, the second's];
        `order`: the first step with other samples or seeds, None = none of the `compared_steps` has; `pixels`: the
        first step that was made and is not the same, None = none is; `made_steps`; `loss`: the first step at which
        their records have different losses; and `unknown`: why pixels could not be compared, empty = they were.
    """
    steps = min(first.run.num_steps, second.run.num_steps)
    order, compared_steps = first_other_draws(first.run.plan, second.run.plan)
    made = _steps_to_make(first.run, steps, order)
    pixels = None
    unknown = ""
    try:
        pixels = _first_other_pixels(first, second, made)
    except RaypipeError as error:
        made = []
        unknown = str(error)
    settings = other_settings(first.run.config, second.run.config)
    differs = order is not None or pixels is not None
    return {
        "equal": not differs,
        "settings": {
            name: pair for name, pair in settings.items() if name not in _FREE
        },
        "order": order,
        "compared_steps": compared_steps,
        "pixels": pixels,
        "made_steps": made,
        "loss": _first_other_loss(first.run, second.run),
        "unknown": unknown,
    }


def first_other_draws(one: Plan, other: Plan) -> tuple[int | None, int]:
    """Look for the first step at which two plans have other samples or other keys.

    Returns:
        The step, None = there is none among those compared; and how many steps were compared.
    """
    per_step = one.global_batch_size
    if per_step != other.global_batch_size:
        return 1, 1
    steps = min(one.steps_per_epoch, other.steps_per_epoch)
    epochs = min(one.config.epochs, other.config.epochs)
    if one.fingerprint == other.fingerprint:
        return None, epochs * steps
    compared = 0
    for epoch in range(epochs):
        for first in range(0, steps * per_step, _CHUNK * per_step):
            last = min(first + _CHUNK * per_step, steps * per_step)
            positions = np.arange(first, last)
            differs = _differs(one, other, epoch, positions)
            if differs.any():
                step = compared + int(differs.argmax()) // per_step + 1
                return step, step
            compared += len(positions) // per_step
            if compared * per_step >= _MAX_DRAWS:
                return None, compared
        if one.steps_per_epoch != other.steps_per_epoch:
            # one begins an epoch here, and the other does not
            return steps + 1, steps + 1
    return None, compared


def _differs(one: Plan, other: Plan, epoch: int, positions: np.ndarray) -> np.ndarray:
    """Return which positions of an epoch have other samples or keys, bool (n,)."""
    drawn = [plan.draw_epoch(epoch, positions) for plan in (one, other)]
    keys = [
        plan.sample_keys("train", draws)
        for plan, draws in zip((one, other), drawn, strict=True)
    ]
    has_other_sample = drawn[0].indices != drawn[1].indices
    has_other_key = (keys[0] != keys[1]).any(axis=1)
    return has_other_sample | has_other_key


def _steps_to_make(run: RecordedRun, steps: int, order: int | None) -> list[int]:
    """The steps whose pixels are compared: until the order parts, else the first and those that begin epochs."""
    if order is not None:
        steps = order - 1
    begins = range(1, steps + 1, max(1, run.plan.steps_per_epoch))
    return list(begins)[:_MAX_MADE]


def _first_other_pixels(first: Steps, second: Steps, steps: list[int]) -> int | None:
    for step in steps:
        for micro in range(first.run.plan.config.per_step):
            if batch_hash(first[step, micro]) != batch_hash(second[step, micro]):
                return step
    return None


def _first_other_loss(one: RecordedRun, other: RecordedRun) -> int | None:
    """The first step that both runs have recorded with different losses; None = they have none."""
    first = _losses(one)
    second = _losses(other)
    different = [step for step in first.keys() & second if first[step] != second[step]]
    return min(different, default=None)


def _losses(run: RecordedRun) -> dict[int, float]:
    return {
        record["step"]: record["loss"]
        for record in read_records(as_uri(run.address))
        if record.get("kind") == "train" and "loss" in record
    }
