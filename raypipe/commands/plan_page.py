"""What the epochs of a run will contain, before it starts: as a table, as plain values, and as an HTML page."""

from __future__ import annotations

from typing import Any

import numpy as np

from raypipe import pages
from raypipe.commands.inspection import evenly
from raypipe.commands.plan_contents import Contents, contents_of
from raypipe.pages import Series, number
from raypipe.plan.compose import bucket_unit
from raypipe.plan.schedule import Plan
from raypipe.storage.files import write_text
from raypipe.storage.filesystem import as_uri
from raypipe.stores.scan import numbers_of
from raypipe.streaming.spec import StreamSpec

_NUM_EPOCHS = 200  # whose sources are looked at: a chart shows no more
_NUM_CLASSES = 40  # that the page has a bar for
Rows = list[tuple[str, str]]


def summary(spec: StreamSpec) -> tuple[dict[str, Any], Contents]:
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
        And what was counted, see `Contents`.
    """
    plan, store = spec.plan, spec.stores["train"]
    epochs = evenly(plan.config.epochs, _NUM_EPOCHS).tolist()
    config, labels = plan.config, None
    if (config.weights or config.class_balance) and "label" in store.columns:
        labels = numbers_of(store, "label", "--show-plan")
    contents = contents_of(plan, epochs, labels)
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
        "drawn": None if times is None else _spread(times),
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
    return found, contents


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


def _spread(times: np.ndarray) -> dict[str, float]:
    return {"min": int(times.min()), "mean": float(times.mean()), "max": int(times.max())}


def rows(found: dict[str, Any], plan: Plan) -> Rows:
    """The same as names and values, for people."""
    config = plan.config
    per_step = f"{number(plan.config.per_step)} x {number(config.micro_batch_size)}"
    told = [
        ("plan", found["plan"]),
        ("epochs", number(found["epochs"])),
        ("steps in an epoch", f"{number(found['steps'])} of {per_step} samples"),
        ("samples in an epoch", number(found["samples"])),
        ("samples of the store", number(found["stored"])),
    ]
    if found["left_out"]:
        told.append(("excluded by lists and filters", _of(found["left_out"], found["stored"])))
    if found["drawn"]:
        kept = found["stored"] - found["left_out"]
        drawn = found["drawn"]
        told.append(("never drawn in epoch 0", _of(found["left_over"], kept)))
        times = f"{drawn['min']} to {drawn['max']}, {drawn['mean']:.3g} on average"
        told.append(("draws of a sample in epoch 0", times))
    if config.repeats > 1:
        where = "step" if config.repeats_in == "step" else "micro-batch"
        told.append(("draws of a sample in a row", f"{config.repeats}, in one {where}"))
    if sizes := found.get("sizes"):
        parts = [f"{size} from epoch {epoch} on" for epoch, size in sizes.items()]
        told.append(("side of the images, pixels", ", ".join(parts)))
    for name, bucket in found.get("buckets", {}).items():
        held = f"{number(bucket['samples'])} samples"
        if bucket["share"]:
            held += f", {number(bucket['micro_batches'])} micro-batches of epoch 0, {_shares(bucket['share'])}"
        left_over = f"; {number(bucket['left_over'])} samples left over" if bucket["left_over"] else ""
        told.append((f"bucket {name}", held + left_over))
    if found.get("buckets_left_over"):
        told.append(("micro-batches left over in an epoch", number(found["buckets_left_over"])))
    for name, source in found.get("sources", {}).items():
        share = _shares(source["share"])
        left_out = f" without {number(source['left_out'])}" if source["left_out"] else ""
        samples = f"{number(source['samples'])} samples{left_out}"
        told.append((f"source {name}", f"{share}; {samples}, {source['passes']:.3g} times in epoch 0"))
    if classes := found.get("classes"):
        for what, which in (("stored", 0), ("drawn", 1)):
            shares = sorted(pair[which] for pair in classes.values())
            told.append((f"shares of {len(classes)} classes, {what}", f"{shares[0]:.3%} to {shares[-1]:.3%}"))
    if found["val_steps"]:
        padding = f", {number(found['val_padding'])} rows of padding" if found["val_padding"] else ""
        told.append(("samples of a validation", number(found["val_samples"])))
        told.append(("steps of a validation", number(found["val_steps"]) + padding))
        told.append(("validations", number(found["validations"])))
    for name, bucket in found.get("val_buckets", {}).items():
        held = f"{number(bucket['samples'])} samples, {number(bucket['micro_batches'])} micro-batches"
        told.append((f"bucket {name} of a validation", held))
    return told


def _shares(share: list[float]) -> str:
    first, last = share
    return f"{first:.2%}" if first == last else f"{first:.2%} in the first epoch, {last:.2%} in the last"


def _of(part: int, whole: int) -> str:
    return f"{number(part)} of {number(whole)}"


def write_page(spec: StreamSpec, found: dict[str, Any], contents: Contents, output: str) -> str:
    """Write the page of a plan to a path or URI, and return its URI; raises ConfigError where it cannot."""
    where = as_uri(output)
    write_text(where, render(spec, found, contents))
    return where


def render(spec: StreamSpec, found: dict[str, Any], contents: Contents) -> str:
    """The page of a plan, as HTML; `found` and `contents` are of `summary`."""
    store = spec.stores["train"]
    epochs = evenly(spec.plan.config.epochs, _NUM_EPOCHS).tolist()
    charts = []
    if contents.sources:
        lines = [
            Series(name, epochs, [100 * each / found["samples"] for each in draws])
            for name, draws in contents.sources.items()
        ]
        charts.append(pages.chart("share of each source, % of the draws", lines, "epoch"))
    if contents.times is not None:
        times = np.sort(contents.times)
        points = evenly(len(times), 400)
        line = Series("", (100 * points / max(1, len(times) - 1)).tolist(), times[points].tolist())
        charts.append(pages.chart("draws of a sample in epoch 0", [line], "percentile of the samples"))
    if contents.classes:
        stored, drawn = (
            sorted((100 * pair[i] for pair in contents.classes.values()), reverse=True) for i in (0, 1)
        )
        places = list(range(1, len(stored) + 1))
        lines = [Series("stored", places, stored), Series("drawn", places, drawn)]
        charts.append(pages.chart("share of a class, %", lines, "classes, the largest first"))
    buckets = [
        (name, bucket["samples"] / max(1, found["stored"] - found["left_out"]), bucket["share"][0])
        for name, bucket in found.get("buckets", {}).items()
        if bucket["share"]
    ]
    largest = sorted(contents.classes.items(), key=lambda entry: -entry[1][0])[:_NUM_CLASSES]
    names = store.classes or ()
    classes = [
        (names[label] if 0 <= label < len(names) else f"label {label}", stored, drawn)
        for label, (stored, drawn) in largest
    ]
    return pages.render(
        "plan.html",
        store=store,
        found=found,
        rows=rows(found, spec.plan),
        charts=charts,
        classes=classes,
        buckets=buckets,
    )
