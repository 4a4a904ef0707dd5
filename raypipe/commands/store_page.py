"""What is in a store, as one HTML page: its samples, classes, sizes, and how well each way to shuffle mixes it.

It reads labels of up to 20,000 samples and up to 64 images, evenly spread, so it takes seconds for any store.
"""

from __future__ import annotations

import base64
from collections import Counter
from typing import Any

import numpy as np

from raypipe import pages
from raypipe.commands.inspection import CheckedSample, describe, evenly
from raypipe.config import PlanConfig
from raypipe.errors import ConfigError, RaypipeError
from raypipe.logs import shown
from raypipe.pages import Series
from raypipe.plan.places import MicroBatchId
from raypipe.storage.files import write_text
from raypipe.storage.filesystem import as_uri
from raypipe.stores.base import Store
from raypipe.streaming.planning import make_plan
from raypipe.transform.decode import encode_jpeg, resize_short_side
from raypipe.transform.decode_array import as_rgb, decode_any

_NUM_LABELS, _NUM_SHOWN = 20_000, 24
_NUM_MICRO_BATCHES = 64  # whose mixing is looked at
_THUMBNAIL = 120  # pixels


def write_page(store: Store, samples: list[CheckedSample], output: str) -> str:
    """Write the page of a store to a path or URI, and return its URI; raises ConfigError where it cannot."""
    where = as_uri(output)
    write_text(where, render(store, samples))
    return where


def render(store: Store, samples: list[CheckedSample], micro_batch: int = 128) -> str:
    """The page of a store, as HTML.

    Args:
        samples: of it, see `raypipe.commands.inspection.sampled`.
        micro_batch: B, for the mixing; as many as there are samples if it has fewer.
    """
    found = describe(store, samples=samples).items()
    try:
        read = store.read(evenly(len(store), _NUM_LABELS), ("label",))["label"]
        labels = [label for label in np.asarray(read).tolist() if label is not None]
    except RaypipeError:  # one that is damaged; `inspect --verify` finds which
        labels = []
    mixed = {shuffle: mixing(store, shuffle, micro_batch) for shuffle in ("global", "window", "off")}
    decoded = [sample for sample in samples if sample.image and sample.height]
    kib = sorted(len(sample.image or b"") / 1024 for sample in decoded)
    shapes = Series("", [sample.width for sample in decoded], [sample.height for sample in decoded], dots=True)
    return pages.render(
        "store.html",
        store=store,
        found=[[name.replace("_", " "), shown(value)] for name, value in found if value is not None],
        pictures=[_picture(samples[i], store) for i in evenly(len(samples), _NUM_SHOWN)],
        classes=[(_class_name(label, store.classes), count) for label, count in Counter(labels).most_common()],
        sizes=[
            pages.chart("height, pixels", [shapes], "width"),
            pages.chart(
                "KiB of an image", [Series("", np.linspace(0, 100, len(kib)).tolist(), kib)], "percentile"
            ),
        ],
        micro_batch=min(micro_batch, len(store)),
        mixed={shuffle: share for shuffle, share in mixed.items() if share is not None},
    )


def mixing(store: Store, shuffle: str, micro_batch: int) -> float | None:
    """How well a setting of plan.shuffle mixes a store's first epoch.

    Returns:
        The mean distance of two samples of a micro-batch in the store, as a share of that of two samples drawn
        from all of it, which is N / 3: 1 = as well as can be, near 0 = neighbours; None = not for this store.
    """
    config: Any = {"epochs": 1, "micro_batch_size": max(1, min(micro_batch, len(store))), "shuffle": shuffle}
    try:
        plan = make_plan(PlanConfig(**config), store)
    except ConfigError:
        return None
    places = [
        MicroBatchId("train", 0, step, 0) for step in evenly(plan.steps_per_epoch, _NUM_MICRO_BATCHES).tolist()
    ]
    spreads = [np.abs(np.subtract.outer(found, found)).mean() for found in map(plan.indices, places)]
    return min(1.0, float(np.mean(spreads)) * 3 / len(store))


def _picture(sample: CheckedSample, store: Store) -> tuple[str, str]:
    """Address and caption of a thumbnail; no address where it cannot be decoded."""
    if sample.error:
        return "", f"sample {sample.index}: {sample.error}"
    thumbnail = resize_short_side(as_rgb(decode_any(sample.image, min_side=_THUMBNAIL)), _THUMBNAIL)
    name = "no label" if sample.label is None else _class_name(sample.label, store.classes)
    encoded = base64.b64encode(encode_jpeg(thumbnail, 85)).decode()
    return f"data:image/jpeg;base64,{encoded}", f"{sample.index:,}: {name}"


def _class_name(label: int, classes: tuple[str, ...] | None) -> str:
    return classes[label] if classes and 0 <= label < len(classes) else f"label {label}"
