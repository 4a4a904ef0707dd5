"""Where two recorded runs part: their settings, the first step with other samples, pixels, or losses."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from raypipe.device.prefetcher import Batch
from raypipe.errors import RaypipeError
from raypipe.history.recorded import RecordedRun
from raypipe.metrics.records import read_records
from raypipe.plan.schedule import Plan
from raypipe.storage.filesystem import as_uri

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
    settings = _settings(first.run.config, second.run.config)
    differs = order is not None or pixels is not None
    return {
        "equal": not differs,
        "settings": settings,
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
            if not same_batch(first[step, micro], second[step, micro]):
                return step
    return None


def same_batch(one: Batch, other: Batch) -> bool:
    """Return whether two micro-batches have the same tensors, bit for bit."""
    if one.fields.keys() != other.fields.keys():
        return False
    pairs = [(one.fields[name], other.fields[name]) for name in one.fields]
    pairs.append((one.weight, other.weight))
    if (one.mix is None) != (other.mix is None):
        return False
    if one.mix is not None and other.mix is not None:
        pairs.append((one.mix.target, other.mix.target))
    return all(_same(*pair) for pair in pairs)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _settings(one: dict[str, Any], other: dict[str, Any]) -> dict[str, list[Any]]:
    names = [name for name in {**one, **other} if name not in _FREE]
    return {
        name: [one.get(name), other.get(name)]
        for name in names
        if one.get(name) != other.get(name)
    }


def _first_other_loss(one: RecordedRun, other: RecordedRun) -> int | None:
    """The first step that both runs have recorded with different losses; None = they have none."""
    losses = []
    for run in (one, other):
        records = read_records(as_uri(run.address))
        losses.append(
            {
                record["step"]: record["loss"]
                for record in records
                if record.get("kind") == "train" and "loss" in record
            }
        )
    first, second = losses
    return next(
        (
            step
            for step in sorted(first)
            if step in second and first[step] != second[step]
        ),
        None,
    )
