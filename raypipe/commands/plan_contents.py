"""What the epochs of a plan contain, counted before a run: draws of sources, samples and classes. Numpy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from raypipe.plan.samplers import Weighted
from raypipe.plan.schedule import Plan
from raypipe.plan.selection import JoinedSelection

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


def contents_of(plan: Plan, epochs: list[int], labels: np.ndarray | None = None) -> Contents:
    """Look at the sources of some epochs of a plan, and at all draws of the first, if they are not too many.

    Args:
        epochs: numbers, ascending.
        labels: of all samples of the training store; None = classes are not counted.
    """
    assert plan.training, "a plan without draws has no contents"
    repeats, selection = plan.config.repeats, plan.kept["train"]
    by_epoch = [[draws * repeats for draws in counts] for counts in _source_counts(plan, epochs)]
    sources = dict(zip(plan.sources, map(list, zip(*by_epoch, strict=True)), strict=False))
    passes = {}
    if isinstance(selection, JoinedSelection):
        parts = zip(sources.items(), selection.parts, strict=True)
        passes = {name: draws[0] / repeats / part.size for (name, draws), part in parts}
    counts = [_bucket_counts(plan, epoch) for epoch in (epochs[0], epochs[-1])]
    buckets = dict(zip(plan.config.buckets, map(list, zip(*counts, strict=True)), strict=False))
    times = _times(plan, epochs[0])
    classes: dict[int, tuple[float, float]] = {}
    if labels is not None and times is not None:
        labels = labels[selection.indices(np.arange(plan.num_train))]
        names, inverse = np.unique(labels, return_inverse=True)
        stored = np.bincount(inverse) / len(labels)
        drawn = np.bincount(inverse, times) / times.sum()
        classes = dict(zip(names.tolist(), zip(stored.tolist(), drawn.tolist(), strict=True), strict=True))
    return Contents(sources, passes, buckets, times, classes)


def _source_counts(plan: Plan, epochs: list[int]) -> list[list[int]]:
    """Draws of each source in each epoch, before they are repeated."""
    assert plan.training
    mixture, steps = plan.training.mixture, plan.steps_per_epoch
    return [mixture.source_counts(epoch * steps, (epoch + 1) * steps) for epoch in epochs] if mixture else []


def _bucket_counts(plan: Plan, epoch: int) -> list[int]:
    """Draws of each bucket in an epoch."""
    config = plan.config
    num = plan.steps_per_epoch * config.per_step
    if not config.buckets or num > MAX_COUNTED:
        return []
    counts = np.zeros(len(config.buckets), np.int64)
    for first in range(0, num, _CHUNK):
        positions = np.arange(first, min(num, first + _CHUNK)) * config.micro_batch_size
        counts += np.bincount(plan.draw_epoch(epoch, positions).buckets, minlength=len(counts))
    return (counts * config.micro_batch_size).tolist()


def _times(plan: Plan, epoch: int) -> np.ndarray | None:
    """See `Contents.times`."""
    num_draws, selection = plan.steps_per_epoch * plan.global_batch_size, plan.kept["train"]
    if max(num_draws, selection.num_samples) <= MAX_COUNTED:
        times = np.zeros(selection.num_samples, np.int64)
        for first in range(0, num_draws, _CHUNK):
            draws = plan.draw_epoch(epoch, np.arange(first, min(num_draws, first + _CHUNK)))
            times += np.bincount(draws.indices, minlength=len(times))
        return times[selection.indices(np.arange(plan.num_train))]
    assert plan.training
    sampler = plan.training.store_samplers[0][0]
    is_whole = not plan.sources and not plan.config.buckets
    return sampler.counts(0) * plan.config.repeats if is_whole and isinstance(sampler, Weighted) else None
