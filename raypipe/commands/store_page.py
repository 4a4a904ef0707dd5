"""What is in a store, as one HTML page: its samples, classes, sizes, and how well each way to shuffle mixes it.

It reads labels of up to 20,000 samples and up to 64 images, evenly spread, so it takes seconds for any store.
"""

from __future__ import annotations

import base64
from collections import Counter
from typing import Any, get_args

import numpy as np

from raypipe import pages
from raypipe.commands.inspection import CheckedSample, describe
from raypipe.config import PlanConfig, Shuffle
from raypipe.errors import ConfigError, RaypipeError
from raypipe.logs import shown
from raypipe.pages import Series
from raypipe.plan.schedule import MicroBatchId, Plan
from raypipe.storage.files import write_text
from raypipe.storage.filesystem import as_uri
from raypipe.stores.base import Store
from raypipe.transform.decode import decode, encode_jpeg, resize_short_side

_NUM_LABELS, _NUM_SHOWN = 20_000, 24
_NUM_MICRO_BATCHES = 64  # whose mixing is looked at
_THUMBNAIL = 120  # pixels
_MAX_BARS = 40  # classes that are named; of more, the sizes alone are drawn


def write_page(store: Store, samples: list[CheckedSample], output: str, micro_batch: int = 128) -> str:
    """Write the page of a store to a path or URI, and return its URI; other arguments are those of `render`.

    Raises:
        ConfigError: it cannot be written.
        StoreError: the store cannot be read.
    """
    where = as_uri(output)
    write_text(where, render(store, samples, micro_batch))
    return where


def render(store: Store, samples: list[CheckedSample], micro_batch: int = 128) -> str:
    """The page of a store, as HTML.

    Args:
        store: to show.
        samples: of it, see `raypipe.commands.inspection.sampled`.
        micro_batch: B, for the mixing; as many as there are samples if it has fewer.
    """
    found = describe(store, samples=samples).items()
    rows = [[name.replace("_", " "), shown(value)] for name, value in found if value is not None]
    contents = _contents(store, samples, min(micro_batch, len(store))) if samples else {}
    return pages.render("store.html", store=store, found=rows, **contents)


def _contents(store: Store, samples: list[CheckedSample], micro_batch: int) -> dict[str, Any]:
    """What the template shows of a store with samples."""
    labels = _labels(store, _evenly(len(store), _NUM_LABELS))
    counts = Counter([] if labels is None else labels.tolist()).most_common()
    ranked = Series("", range(len(counts)), [count for _, count in counts])
    mixed = {shuffle: mix for shuffle in get_args(Shuffle) if (mix := mixing(store, shuffle, micro_batch))}
    return {
        "pictures": [_picture(samples[i], store) for i in _evenly(len(samples), _NUM_SHOWN)],
        "classes": [(_class_name(label, store.classes), count) for label, count in counts],
        "max_bars": _MAX_BARS,
        "class_sizes": pages.chart("samples of a class", [ranked], "rank"),
        "sizes": _sizes([sample for sample in samples if sample.image and sample.height]),
        "micro_batch": micro_batch,
        "mixed": mixed,
    }


def mixing(store: Store, shuffle: str, micro_batch: int) -> tuple[float, float | None] | None:
    """How well a setting of plan.shuffle mixes a store's first epoch.

    Returns:
        The mean distance of two samples of a micro-batch in the store, as a share of that of two samples drawn
        from all of it, which is N / 3: 1 = as well as can be, near 0 = neighbours; and the mean number of classes
        in a micro-batch, None = labels cannot be read. None for "auto", and where it is not for this store.
    """
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
    return min(1.0, float(np.mean(spreads))), float(np.mean(classes)) if classes else None


def _evenly(total: int, most: int) -> np.ndarray:
    return np.unique(np.linspace(0, total - 1, min(total, most)).astype(np.int64))


def _labels(store: Store, indices: np.ndarray) -> np.ndarray | None:
    try:
        return np.asarray(store.read(indices, ("label",))["label"])
    except RaypipeError:  # one that is damaged; `inspect --verify` finds which
        return None


def _picture(sample: CheckedSample, store: Store) -> tuple[str, str]:
    """Address and caption of a thumbnail; no address where it cannot be decoded."""
    if sample.error:
        return "", f"sample {sample.index}: {sample.error}"
    thumbnail = resize_short_side(decode(sample.image, min_side=_THUMBNAIL), _THUMBNAIL)
    name = "no label" if sample.label is None else _class_name(sample.label, store.classes)
    encoded = base64.b64encode(encode_jpeg(thumbnail, 85)).decode()
    return f"data:image/jpeg;base64,{encoded}", f"{sample.index:,}: {name}"


def _class_name(label: int, classes: tuple[str, ...] | None) -> str:
    return classes[label] if classes and 0 <= label < len(classes) else f"label {label}"


def _sizes(decoded: list[CheckedSample]) -> list[str]:
    """Charts of the images' sizes."""
    ranks = np.linspace(0, 100, len(decoded)).tolist()
    kib = sorted(len(sample.image or b"") / 1024 for sample in decoded)
    shapes = Series("", [sample.width for sample in decoded], [sample.height for sample in decoded], dots=True)
    return [
        pages.chart("height, pixels", [shapes], "width"),
        pages.chart("KiB of an image", [Series("", ranks, kib)], "percentile"),
    ]
