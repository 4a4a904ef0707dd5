"""What is in a store, as one HTML page: its samples, classes, sizes, and how well each way to shuffle mixes it.

Nothing of it reads the whole store: labels of up to 20,000 samples, headers of up to 512, and 24 images are looked
at, evenly spread, so that it takes seconds for any number of samples.
"""

from __future__ import annotations

import base64
import contextlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from raypipe import pages
from raypipe.commands.inspection import READ, read_each, spread
from raypipe.config import PlanConfig, Shuffle
from raypipe.errors import ConfigError, RaypipeError, SampleError
from raypipe.logs import shown
from raypipe.pages import Series
from raypipe.plan.schedule import MicroBatchId, Plan
from raypipe.storage.filesystem import as_uri
from raypipe.storage.whole_file import write_text
from raypipe.stores.base import Store
from raypipe.transform.decode import decode, encode_jpeg, image_size, resize_short_side

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
    """Write the page of a store to a path or URI, and return its URI; other arguments are those of `render`.

    Raises:
        ConfigError: it cannot be written.
        StoreError: the store cannot be read.
    """
    where = as_uri(output)
    write_text(where, render(store, found, micro_batch))
    return where


def render(store: Store, found: dict[str, Any], micro_batch: int = 128) -> str:
    """The page of a store, as HTML.

    Args:
        store: to show.
        found: what `raypipe.commands.inspection.describe` says of it.
        micro_batch: B, for the mixing; as many as there are samples if it has fewer.
    """
    rows = [[name.replace("_", " "), shown(value)] for name, value in found.items() if value is not None]
    contents = _contents(store, min(micro_batch, len(store))) if len(store) else {}
    return pages.render("store.html", store=store, found=rows, **contents)


def _contents(store: Store, micro_batch: int) -> dict[str, Any]:
    """What the template shows of a store with samples."""
    labels = _labels(store, _evenly(len(store), _NUM_LABELS))
    counts = Counter([] if labels is None else labels.tolist()).most_common()
    ranked = Series("", range(len(counts)), [count for _, count in counts])
    mixed = [mix for shuffle in get_args(Shuffle) if (mix := mixing(store, shuffle, micro_batch))]
    orders = [Series("", mix.positions.tolist(), mix.indices.tolist(), "dots") for mix in mixed]
    return {
        "pictures": _pictures(store),
        "classes": [(_class_name(label, store.classes), count) for label, count in counts],
        "max_bars": _MAX_BARS,
        "class_sizes": pages.chart("samples of a class", [ranked], "rank"),
        "sizes": _sizes(store),
        "micro_batch": micro_batch,
        "mixed": mixed,
        "orders": [
            pages.chart(f"{mix.shuffle}: which sample comes when", [order], "position")
            for mix, order in zip(mixed, orders, strict=True)
        ],
    }


def mixing(store: Store, shuffle: str, micro_batch: int) -> Mixing | None:
    """How well a setting mixes a store's first epoch; None for "auto", and for one that is not for this store."""
    if shuffle == "auto":
        return None
    micro_batch = min(micro_batch, len(store))
    try:
        plan = Plan.of(PlanConfig(epochs=1, micro_batch=micro_batch, shuffle=shuffle), store)  # type: ignore[arg-type]
    except ConfigError:
        return None
    spreads, classes = list[float](), list[int]()
    for step in _evenly(plan.steps_per_epoch, _NUM_MICRO_BATCHES).tolist():
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


def _pictures(store: Store) -> Iterable[tuple[str, str]]:
    """Address and caption of some samples' thumbnails; of one that cannot be decoded, no address."""
    indices = spread(store, _NUM_SHOWN)
    images, errors = read_each(store, indices, "image")
    labels, _ = read_each(store, indices, "label")
    for position, (index, image, label) in enumerate(zip(indices.tolist(), images, labels, strict=True)):
        try:
            if position in errors:
                raise SampleError(errors[position])
            thumbnail = resize_short_side(decode(image, min_side=_THUMBNAIL), _THUMBNAIL)
        except SampleError as error:
            yield "", f"sample {index}: {error}"
            continue
        name = "label unread" if label is None else _class_name(int(label), store.classes)
        encoded = base64.b64encode(encode_jpeg(thumbnail, 85)).decode()
        yield f"data:image/jpeg;base64,{encoded}", f"{index:,}: {name}"


def _class_name(label: int, classes: tuple[str, ...] | None) -> str:
    return classes[label] if classes and 0 <= label < len(classes) else f"label {label}"


def _sizes(store: Store) -> list[str]:
    """Charts of the images' sizes."""
    indices = spread(store, _NUM_HEADERS)
    found = []
    for few in np.array_split(indices, -(-len(indices) // READ)):
        for data in read_each(store, few, "image")[0]:
            with contextlib.suppress(SampleError):
                found.append((*image_size(data), len(data) / 1024))
    heights, widths, kib = zip(*found, strict=True) if found else ((), (), ())
    ranks = np.linspace(0, 100, len(kib)).tolist()
    return [
        pages.chart("height, pixels", [Series("", widths, heights, "dots")], "width"),
        pages.chart("KiB of an image", [Series("", ranks, sorted(kib))], "percentile"),
    ]
