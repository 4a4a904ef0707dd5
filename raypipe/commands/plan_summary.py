"""What the epochs of a run will contain, before it starts, as plain values."""

from __future__ import annotations

from typing import Any

from raypipe.commands.plan_contents import Contents, contents_of
from raypipe.plan.compose import bucket_unit
from raypipe.plan.schedule import Plan
from raypipe.stores.scan import numbers_of
from raypipe.streaming.spec import StreamSpec


def summary(spec: StreamSpec) -> dict[str, Any]:
    """What the run's epochs contain.

    Returns:
        Plain values: `plan` (the fingerprint), `epochs`, `steps` and `samples` of an epoch, `micro_batch` and
        `global_batch` (samples), `stored` and `left_out` (samples of the store, and those that a filter or a list
        excludes), `left_over` (samples that epoch 0 never draws; None = not counted), `drawn` (how often it draws
        one: `min`, `mean`, `max`), `val_samples`, `val_steps`, `val_padding` and `validations`; and of plans that
        have them `sizes` (first epoch → side of the images), `buckets` (its name → `samples`, of these
        `left_over`, too few for a micro-batch, `micro_batches` of epoch 0, `share` of the draws in the first and
        the last epoch; None = not counted), `buckets_left_over` (micro-batches of a pass, too few for a step; None
        where no epoch leaves any over), `val_buckets` (its name → `samples`, `micro_batches`), `sources`
        (name → `samples`, `left_out`, `share` likewise, `passes` in the first) and `classes` (label → share of the
        samples, share of the draws).
    """
    plan, store = spec.plan, spec.stores["train"]
    config, labels = plan.config, None
    if (config.weights or config.class_balance) and "label" in store.columns:
        labels = numbers_of(store, "label", "--show-plan")
    contents = contents_of(plan, [0, config.epochs - 1], labels)
    times = contents.times
    num_draws = plan.steps_per_epoch * plan.global_batch_size
    found: dict[str, Any] = {
        "plan": plan.fingerprint,
        "epochs": config.epochs,
        "steps": plan.steps_per_epoch,
        "samples": num_draws,
        "micro_batch": config.micro_batch_size,
        "global_batch": plan.global_batch_size,
        "stored": len(store),
        "left_out": plan.kept["train"].num_left_out,
        "left_over": None if times is None else int((times == 0).sum()),
        "drawn": _spread(contents),
        "val_samples": plan.num_val,
        "val_steps": plan.val_steps,
        "val_padding": plan.val_steps * plan.global_batch_size - plan.num_val,
        "validations": sum(map(plan.has_val, range(config.epochs))),
    }
    sizes = spec.transform.size_by_epoch
    if len(sizes) > 1:
        found["sizes"] = {str(epoch): size for epoch, size in sizes.items()}
    if config.buckets:
        found |= _of_buckets(plan, contents)
    if contents.sources:
        kept: Any = plan.kept["train"]
        stores: Any = store
        found["sources"] = {
            name: {
                "samples": len(stores.parts[name]),
                "left_out": part.num_left_out,
                "share": [draws[0] / num_draws, draws[-1] / num_draws],
                "passes": contents.passes[name],
            }
            for (name, draws), part in zip(contents.sources.items(), kept.parts, strict=True)
        }
    if contents.classes:
        found["classes"] = {str(label): list(shares) for label, shares in contents.classes.items()}
    return found


def _of_buckets(plan: Plan, contents: Contents) -> dict[str, Any]:
    """See `summary`; only those that draw each sample once in a pass leave any over."""
    config, unit = plan.config, bucket_unit(plan.config)
    is_fixed = not (plan.sources or config.weights or config.class_balance)
    num_draws = plan.steps_per_epoch * plan.global_batch_size
    buckets: dict[str, dict[str, Any]] = {}
    assert plan.training
    sizes = [[bucket.selection.size for bucket in source] for source in plan.training.store_samplers]
    for name, of_stores in zip(config.buckets, zip(*sizes, strict=True), strict=True):
        num = sum(of_stores)
        draws = contents.buckets.get(name)
        buckets[name] = {
            "samples": num,
            "left_over": num % unit if is_fixed else 0,
            "micro_batches": draws and draws[0] // config.micro_batch_size,
            "share": draws and [each / num_draws for each in draws],
        }
    found: dict[str, Any] = {"buckets": buckets, "buckets_left_over": None}
    if is_fixed and not config.epoch_samples:
        pass_draws = sum(bucket["samples"] // unit * unit for bucket in buckets.values())
        found["buckets_left_over"] = (pass_draws * config.repeats - num_draws) // config.micro_batch_size
    if plan.validation and config.val_buckets:
        counts = zip(config.buckets, plan.validation.buckets, plan.validation.counts, strict=True)
        found["val_buckets"] = {name: {"samples": each.size, "micro_batches": num} for name, each, num in counts}
    return found


def _spread(contents: Contents) -> dict[str, float] | None:
    times = contents.times
    if times is None:
        return None
    return {"min": int(times.min()), "mean": float(times.mean()), "max": int(times.max())}
