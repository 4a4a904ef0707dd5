"""What the epochs of a plan contain, counted before a run: draws of sources, samples and classes. Numpy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from raypipe.plan.schedule import Plan
from raypipe.plan.weights import Weighted
from raypipe.stores.base import Store
from raypipe.stores.scan import numbers_of

# To draw so many takes seconds, and a table of so many samples 32 MB.
MAX_COUNTED, _CHUNK = 1 << 22, 1 << 16


@dataclass(frozen=True)
class Contents:
    """What epochs draw.

    Attributes:
        sources: of a mixture: draws of each source in each epoch that was asked for.
        passes: of a mixture: how often each source is walked through in the first of these epochs.
        buckets: draws of each bucket in the first and in the last of these epochs; empty where there are none, or
            too many micro-batches to count.
        times: how often the first epoch draws each sample that is kept, int64 (n,), or, of a weighted plan that
            draws too many to count, a pass over the store; None = nothing was counted.
        classes: by label, of plans with weights: its share of the samples that are kept, and of the draws.
    """

    sources: Mapping[str, list[int]] = field(default_factory=dict)
    passes: Mapping[str, float] = field(default_factory=dict)
    buckets: Mapping[str, list[int]] = field(default_factory=dict)
    times: np.ndarray | None = None
    classes: Mapping[int, tuple[float, float]] = field(default_factory=dict)


def contents_of(plan: Plan, train: Store, epochs: list[int]) -> Contents:
    """Look at the sources of some epochs of a plan, and at all draws of the first, if they are not too many.

    Args:
        train: the plan's training store; its labels are read where the plan has weights.
        epochs: numbers, ascending.
    """
    layout, repeats = plan.layout, plan.config.repeats
    by_epoch = [[draws * repeats for draws in found] for found in _of_sources(plan, epochs)]
    sources = dict(zip(layout.sources, map(list, zip(*by_epoch, strict=True)), strict=False))
    passes = {
        name: draws[0] / repeats / size for (name, draws), size in zip(sources.items(), layout.sizes, strict=False)
    }
    counts = [_of_buckets(plan, epoch) for epoch in (epochs[0], epochs[-1])]
    buckets = dict(zip(plan.config.buckets, map(list, zip(*counts, strict=True)), strict=False))
    times = _times(plan, epochs[0])
    classes: dict[int, tuple[float, float]] = {}
    weighted = plan.config.weights or plan.config.class_balance
    if weighted and times is not None and "label" in train.columns:
        labels = numbers_of(train, "label", "--show-plan")[plan.kept["train"].indices(np.arange(plan.num_train))]
        found, inverse = np.unique(labels, return_inverse=True)
        stored = np.bincount(inverse) / len(labels)
        drawn = np.bincount(inverse, times) / times.sum()
        classes = dict(zip(found.tolist(), zip(stored.tolist(), drawn.tolist(), strict=True), strict=True))
    return Contents(sources, passes, buckets, times, classes)


def _of_sources(plan: Plan, epochs: list[int]) -> list[list[int]]:
    mixture, steps = plan.layout.mixture, plan.steps_per_epoch
    return [mixture.of_leaves(epoch * steps, (epoch + 1) * steps) for epoch in epochs] if mixture else []


def _of_buckets(plan: Plan, epoch: int) -> list[int]:
    """Draws of each bucket in an epoch."""
    draws, config = plan.layout.draws, plan.config
    num = plan.steps_per_epoch * config.per_step
    if draws is None or not config.buckets or num > MAX_COUNTED:
        return []
    found = np.zeros(len(config.buckets), np.int64)
    for first in range(0, num, _CHUNK):
        numbers = np.arange(first, min(num, first + _CHUNK))
        found += np.bincount(draws.buckets(epoch, numbers * config.micro_batch_size), minlength=len(found))
    return (found * config.micro_batch_size).tolist()


def _times(plan: Plan, epoch: int) -> np.ndarray | None:
    """See `Contents.times`."""
    num_draws = plan.steps_per_epoch * plan.global_batch_size
    kept = plan.kept["train"]
    if max(num_draws, plan.num_train) <= MAX_COUNTED:
        times = np.zeros(plan.num_train, np.int64)
        for first in range(0, num_draws, _CHUNK):
            drawn, _ = plan.train_draws(epoch, np.arange(first, min(num_draws, first + _CHUNK)))
            times += np.bincount(kept.numbers(drawn), minlength=len(times))
        return times
    leaf = plan.layout.leaves[0] if len(plan.layout.leaves) == 1 else None
    return leaf.counts(0) * plan.config.repeats if isinstance(leaf, Weighted) else None
