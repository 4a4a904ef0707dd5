"""The contents of a run's epochs as plain values, before it starts. Needs only numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from raypipe.plan.samplers import Weighted
from raypipe.plan.schedule import Plan
from raypipe.plan.selection import JoinedSelection
from raypipe.stores.scan import numbers_of
from raypipe.streaming.spec import StreamSpec

# Counting this many draws takes seconds and 100 MB.
MAX_COUNTED = 1 << 22


def summary(spec: StreamSpec) -> dict[str, Any]:
    """Count what the run's epochs contain.

    Returns:
        Plain values: `plan` (the fingerprint), `epochs`, `steps` and `samples` of an epoch, `micro_batch` and
        `global_batch` (samples), `stored` and `excluded` (samples of the store, and those that a filter or a list
        excludes), `left_over` (samples that epoch 0 never draws; None = not counted), `drawn` (how often it draws
        one: `min`, `mean`, `max`), `val_samples`, `val_steps`, `val_padding` and `validations`; and of plans that
        have them `sizes` (first epoch → side of the images), `buckets` (its name → `samples`, of these
        `left_over`, too few for a micro-batch, `micro_batches` of epoch 0, `share` of the draws in the first and
        the last epoch; None = not counted), `buckets_left_over` (micro-batches of a pass, too few for a step; None
        where no epoch leaves any over), `val_buckets` (its name → `samples`, `micro_batches`), `sources`
        (name → `samples`, `excluded`, `share` too, `passes` in the first) and `classes` (label → share of the
        samples, share of the draws).
    """
    plan, store = spec.plan, spec.stores["train"]
    config, num_draws, times = plan.config, plan.steps_per_epoch * plan.global_batch_size, draw_counts(plan)
    contents: dict[str, Any] = {
        "plan": plan.fingerprint,
        "epochs": config.epochs,
        "steps": plan.steps_per_epoch,
        "samples": num_draws,
        "micro_batch": config.micro_batch_size,
        "global_batch": plan.global_batch_size,
        "stored": len(store),
        "excluded": plan.kept["train"].num_left_out,
        "left_over": None if times is None else int((times == 0).sum()),
        "drawn": None
        if times is None
        else {"min": int(times.min()), "mean": float(times.mean()), "max": int(times.max())},
        "val_samples": plan.num_val,
        "val_steps": plan.val_steps,
        "val_padding": plan.val_steps * plan.global_batch_size - plan.num_val,
        "validations": sum(map(plan.has_val, range(config.epochs))),
    }
    sizes = spec.transform.size_by_epoch
    if len(sizes) > 1:
        contents["sizes"] = {str(epoch): size for epoch, size in sizes.items()}
    if config.buckets:
        contents |= _of_buckets(plan)
    if plan.sources:
        contents["sources"] = _of_sources(plan, store)
    if (config.weights or config.class_balance) and "label" in store.columns and times is not None:
        contents["classes"] = class_shares(plan, times, numbers_of(store, "label", "raypipe plan"))
    return contents


def draw_counts(plan: Plan) -> np.ndarray | None:
    """Count how often epoch 0 draws each sample that is kept, int64 (n,).

    A weighted plan of too many draws has the counts of a pass over the store; None = not counted.
    """
    num_draws, selection = plan.steps_per_epoch * plan.global_batch_size, plan.kept["train"]
    if max(num_draws, selection.num_samples) <= MAX_COUNTED:
        indices = plan.draw_epoch(0, np.arange(num_draws)).indices
        return np.bincount(indices, minlength=selection.num_samples)[selection.indices(np.arange(plan.num_train))]
    assert plan.training
    sampler = plan.training.store_samplers[0][0]
    is_whole = not plan.sources and not plan.config.buckets
    return sampler.counts(0) * plan.config.aug_repeats if is_whole and isinstance(sampler, Weighted) else None


def class_shares(plan: Plan, times: np.ndarray, labels: np.ndarray) -> dict[str, list[float]]:
    """Each label's share of the kept samples, and of the draws; `labels` has those of all samples."""
    names, inverse = np.unique(labels[plan.kept["train"].indices(np.arange(plan.num_train))], return_inverse=True)
    shares = np.stack([np.bincount(inverse) / len(inverse), np.bincount(inverse, times) / times.sum()], 1)
    return dict(zip(map(str, names.tolist()), shares.tolist(), strict=True))


def _of_sources(plan: Plan, store: Any) -> dict[str, Any]:
    """See `summary`."""
    assert plan.training and plan.training.mixture
    steps, kept = plan.steps_per_epoch, plan.kept["train"]
    assert isinstance(kept, JoinedSelection)
    epochs = (0, plan.config.epochs - 1)
    counts = [plan.training.mixture.source_counts(epoch * steps, (epoch + 1) * steps) for epoch in epochs]
    return {
        name: {
            "samples": len(store.parts[name]),
            "excluded": part.num_left_out,
            "share": [drawn / sum(of_epoch) for drawn, of_epoch in zip(of_source, counts, strict=True)],
            "passes": of_source[0] / part.size,
        }
        for name, part, of_source in zip(plan.sources, kept.parts, zip(*counts, strict=True), strict=True)
    }


def _of_buckets(plan: Plan) -> dict[str, Any]:
    """See `summary`; only plans that draw each sample once in a pass leave any over."""
    config, unit = plan.config, plan.config.micro_batch_size
    is_fixed = not (plan.sources or config.weights or config.class_balance)
    num = plan.steps_per_epoch * config.per_step
    assert plan.training
    sizes = np.sum([[bucket.selection.size for bucket in source] for source in plan.training.store_samplers], 0)
    counts = [_bucket_counts(plan, epoch) for epoch in (0, config.epochs - 1)] if num <= MAX_COUNTED else None
    buckets = {
        name: {
            "samples": size,
            "left_over": size % unit if is_fixed else 0,
            "micro_batches": counts and counts[0][bucket],
            "share": counts and [of_epoch[bucket] / num for of_epoch in counts],
        }
        for bucket, (name, size) in enumerate(zip(config.buckets, sizes.tolist(), strict=True))
    }
    contents: dict[str, Any] = {"buckets": buckets, "buckets_left_over": None}
    if is_fixed and not config.epoch_samples:
        contents["buckets_left_over"] = sum(size // unit for size in sizes.tolist()) * config.aug_repeats - num
    if plan.validation and config.val_buckets:
        of_val = zip(config.buckets, plan.validation.buckets, plan.validation.counts, strict=True)
        contents["val_buckets"] = {name: {"samples": kept.size, "micro_batches": n} for name, kept, n in of_val}
    return contents


def _bucket_counts(plan: Plan, epoch: int) -> list[int]:
    """Micro-batches of each bucket in an epoch."""
    positions = np.arange(plan.steps_per_epoch * plan.config.per_step) * plan.config.micro_batch_size
    return np.bincount(plan.draw_epoch(epoch, positions).buckets, minlength=len(plan.config.buckets)).tolist()
