"""What is in a store, as one HTML page: its samples, classes, sizes, and how well each way to shuffle mixes it.

Nothing of it reads the whole store: labels of up to 20,000 samples, headers of up to 512, and 24 images are looked
at, evenly spread, so that it takes seconds for any number of samples.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from raypipe.commands.inspection import READ, read_each, spread
from raypipe.config import PlanConfig, Shuffle
from raypipe.console import shown
from raypipe.errors import ConfigError, RaypipeError, SampleError
from raypipe.pages import page
from raypipe.pages.page import Series
from raypipe.plan.schedule import MicroBatchId, Plan
from raypipe.storage.filesystem import as_uri
from raypipe.storage.whole_file import write_text
from raypipe.stores.base import Store
from raypipe.transform.decode import decode, encode_jpeg, resize_short_side
from raypipe.transform.encoded import image_size

_NUM_LABELS, _NUM_HEADERS, _NUM_SHOWN = 20_000, 512, 24
_NUM_MICRO_BATCHES = 64  # whose mixing is looked at
_NUM_POSITIONS = 2000  # in the picture of an order
_THUMBNAIL = 120  # pixels
_MAX_BARS = 40  # classes that are named; of more, the sizes alone are drawn


@dataclass(frozen=True)
class Mixing:
    """How well one setting of plan.shuffle mixes a store.

    Attributes:
        shuffle: the setting.
        spread: mean distance of two samples of a micro-batch in the store, as a share of that of two samples drawn
            from all of it, which is N / 3: 1 = as well as can be, near 0 = neighbours.
        classes: mean number of classes in a micro-batch; None = labels cannot be read.
        positions, indices: of some places in an epoch, which sample comes there.
    """

    shuffle: str
    spread: float
    classes: float | None
    positions: np.ndarray
    indices: np.ndarray


def write_page(store: Store, found: dict[str, Any], output: str, micro_batch: int = 128) -> str:
    """Write the page of a store.

    Args:
        store: to show.
        found: what `raypipe.commands.inspection.describe` says of it.
        output: the page, a path or a URI.
        micro_batch: B, for the mixing; as many as there are samples if it has fewer.

    Returns:
        The page's URI.

    Raises:
        ConfigError: it cannot be written.
        StoreError: the store cannot be read.
    """
    where = as_uri(output)
    write_text(where, render(store, found, micro_batch))
    return where


def render(store: Store, found: dict[str, Any], micro_batch: int = 128) -> str:
    """The page of a store, as HTML; the arguments are those of `write_page`."""
    named = {name: value for name, value in found.items() if value is not None}
    rows = [[name.replace("_", " "), shown(value)] for name, value in named.items()]
    body = [page.section("In short", page.table(rows))]
    if len(store):
        labels = _labels(store, _evenly(len(store), _NUM_LABELS))
        mixed = [mix for shuffle in get_args(Shuffle) if (mix := mixing(store, shuffle, micro_batch))]
        body += [
            page.section("Samples", _pictures(store)),
            page.section("Classes", *_classes(labels, store.classes)),
            page.section("Sizes", page.cards(_sizes(store))),
            page.section("Shuffling", *_mixing(mixed, min(micro_batch, len(store)))),
        ]
    return page.page(store.address, f"{len(store):,} samples", body)


def mixing(store: Store, shuffle: str, micro_batch: int) -> Mixing | None:
    """How well a setting mixes a store's first epoch; None for "auto", and for one that is not for this store."""
    if shuffle == "auto":
        return None
    micro_batch = min(micro_batch, len(store))
    try:
        plan = Plan.of(PlanConfig(epochs=1, micro_batch=micro_batch, shuffle=shuffle), store)  # type: ignore[arg-type]
    except ConfigError:
        return None
    steps = _evenly(plan.steps_per_epoch, _NUM_MICRO_BATCHES)
    spreads, classes = list[float](), list[int]()
    for step in steps.tolist():
        indices = plan.indices(MicroBatchId("train", 0, step, 0))
        spreads.append(float(np.abs(np.subtract.outer(indices, indices)).mean()) * 3 / len(store))
        if len(classes) < _NUM_SHOWN and (labels := _labels(store, np.sort(indices))) is not None:
            classes.append(len(np.unique(labels)))
    positions = _evenly(plan.steps_per_epoch * micro_batch, _NUM_POSITIONS)
    return Mixing(
        shuffle,
        min(1.0, float(np.mean(spreads))),
        float(np.mean(classes)) if classes else None,
        positions,
        plan.train_order.indices(0, positions),
    )


def _evenly(total: int, most: int) -> np.ndarray:
    return np.unique(np.linspace(0, total - 1, min(total, most)).astype(np.int64))


def _labels(store: Store, indices: np.ndarray) -> np.ndarray | None:
    try:
        return np.asarray(store.read(indices, ("label",))["label"])
    except RaypipeError:  # one that is damaged; `inspect --verify` finds which
        return None


def _pictures(store: Store) -> str:
    figures = []
    indices = spread(store, _NUM_SHOWN)
    images, errors = read_each(store, indices, "image")
    labels, _ = read_each(store, indices, "label")
    for position, (index, image, label) in enumerate(zip(indices.tolist(), images, labels, strict=True)):
        try:
            if position in errors:
                raise SampleError(errors[position])
            thumbnail = resize_short_side(decode(image, min_side=_THUMBNAIL), _THUMBNAIL)
        except SampleError as error:
            figures.append(page.figure("", f"sample {index}: {error}"))
            continue
        name = "label unread" if label is None else _class_name(int(label), store.classes)
        address = f"data:image/jpeg;base64,{base64.b64encode(encode_jpeg(thumbnail, 85)).decode()}"
        figures.append(page.figure(address, f"{index:,}: {name}"))
    return page.gallery(figures)


def _class_name(label: int, classes: tuple[str, ...] | None) -> str:
    return classes[label] if classes and 0 <= label < len(classes) else f"label {label}"


def _classes(labels: np.ndarray | None, classes: tuple[str, ...] | None) -> Iterable[str]:
    if labels is None:
        yield page.paragraph("The labels cannot be read; raypipe inspect --verify tells which.")
        return
    counts = Counter(labels.tolist())
    names = [_class_name(label, classes) for label in counts]
    ordered = sorted(zip(names, counts.values(), strict=True), key=lambda pair: -pair[1])
    most, least = ordered[0], ordered[-1]
    empty = len(classes) - len(counts) if classes else 0
    yield page.paragraph(
        f"{len(counts):,} classes in {len(labels):,} labels, the largest {most[0]} with {most[1]:,}, the smallest"
        f" {least[0]} with {least[1]:,}: {most[1] / least[1]:.1f} times."
        + (f" {empty:,} of the store's classes were not met." if empty > 0 else "")
    )
    if len(ordered) <= _MAX_BARS:
        yield page.bars(ordered)
    else:
        sizes = [float(count) for _, count in ordered]
        yield page.cards(
            [page.chart("samples of a class, by rank", [Series("", range(len(sizes)), sizes)], "rank")]
        )


def _sizes(store: Store) -> Iterable[str]:
    heights, widths, num_bytes = [], [], []
    for few in np.array_split(indices := spread(store, _NUM_HEADERS), -(-len(indices) // READ)):
        for data in read_each(store, few, "image")[0]:
            try:
                height, width = image_size(data)
            except SampleError:
                continue
            heights.append(height)
            widths.append(width)
            num_bytes.append(len(data) / 1024)
    yield page.chart("height by width, pixels", [Series("", widths, heights, "dots")], "width")
    ranks = [100 * rank / max(1, len(num_bytes) - 1) for rank in range(len(num_bytes))]
    yield page.chart("KiB of an image, by percentile", [Series("", ranks, sorted(num_bytes))], "percentile")


def _mixing(mixed: list[Mixing], micro_batch: int) -> Iterable[str]:
    rows = [
        [mix.shuffle, f"{mix.spread:.0%}", "" if mix.classes is None else f"{mix.classes:.1f}"] for mix in mixed
    ]
    yield page.paragraph(
        f"Of micro-batches of {micro_batch}: how far apart their samples lie in the store, as a share of what a"
        " full shuffle gives, and how many classes they have."
    )
    yield page.table(rows, ["plan.shuffle", "spread", "classes"])
    yield page.cards(
        page.chart(
            f"{mix.shuffle}: which sample comes when",
            [Series("", mix.positions.tolist(), mix.indices.tolist(), "dots")],
            "position",
        )
        for mix in mixed
    )
