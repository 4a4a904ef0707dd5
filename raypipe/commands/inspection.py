"""The command `inspect`, which describes a store: its own figures, and those of a few samples spread over it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from raypipe.config import RunConfig
from raypipe.errors import ConfigError, StoreError
from raypipe.stores.base import Store

# Samples that a description decodes, within a second or two.
_NUM_SAMPLED = 64
# Samples that show the type of a column.
_NUM_TYPED = 8


def inspect_store(run: RunConfig, target: str = "") -> dict[str, Any]:
    """Describe a store: format, columns, classes, and a few of its images.

    Examples:
        raypipe inspect train.lmdb
        raypipe inspect 's3://bucket/train-*.parquet' --store.image-column img
    """
    from raypipe.streaming.opening import open_train
    from raypipe.transform.checks import check_target_columns

    store = open_train(run)
    targets = run.transform.target_columns
    check_target_columns(store, targets)
    return describe(store, targets, run.transform.boxes_format)


def describe(
    store: Store, targets: Mapping[str, str] | None = None, boxes_format: str = ""
) -> dict[str, Any]:
    """Describe a store.

    Args:
        store: to look at.
        targets: columns of targets that are decoded with the images, see `TransformConfig.target_columns`.
        boxes_format: see `TransformConfig`.

    Returns:
        `store` (address), `kind`, `samples`, `bytes` (of the encoded images, by the mean of the sampled),
        `columns` (what each holds, by name), `classes` and `groups` (how many, None where it has none),
        `fingerprint`; and of `sampled` samples that were decoded: `formats` (kind → how many), `image_bytes`,
        `height_px` and `width_px`
        ([least, median, most], None without any), and `bad_samples`, how many of them are bad; `16_bits`, a
        sentence, if any have 16.

    Raises:
        StoreError: it cannot be opened.
    """
    from raypipe.commands.checked_samples import check_samples, spread_over

    samples = list(
        check_samples(
            store,
            spread_over(store, _NUM_SAMPLED),
            targets,
            boxes_format=boxes_format,
        )
    )
    sizes = [sample.num_bytes for sample in samples]
    good = [sample for sample in samples if not sample.error]
    deep = [sample.largest for sample in good if sample.largest]
    notes: dict[str, str] = {}
    if deep:
        notes["16_bits"] = (
            f"{len(deep)} of the sampled images have 16 bits, largest value {max(deep)}, and a run gets the "
            "highest 8 bits: set transform.decode: array"
        )
    return {
        "store": store.address,
        "kind": type(store).__name__.removesuffix("Store").lower(),
        "samples": len(store),
        "bytes": round(sum(sizes) / max(1, len(samples)) * len(store)),
        "columns": types_of(store),
        "classes": None if store.classes is None else len(store.classes),
        "groups": None if store.groups is None else len(store.groups) - 1,
        "fingerprint": store.fingerprint,
        "sampled": len(samples),
        "formats": dict(Counter(sample.kind for sample in samples)),
        "image_bytes": _range(sizes),
        "height_px": _range([sample.height for sample in good]),
        "width_px": _range([sample.width for sample in good]),
        "bad_samples": len(samples) - len(good),
        **notes,
    }


def types_of(store: Store) -> dict[str, str]:
    """The contents of each column of a store in words, by its schema, or by a few samples."""
    from raypipe.commands.checked_samples import spread_over
    from raypipe.transform.column_types import types_in
    from raypipe.transform.columns import SampleColumns

    kinds = dict.fromkeys(store.schema.names, "unknown") | {"image": "images"}
    indices = spread_over(store, _NUM_TYPED)[:_NUM_TYPED]
    for name in store.schema.names if len(indices) else ():
        if name != "image":
            column = SampleColumns({name: (name,)})
            with contextlib.suppress(ConfigError, StoreError):  # it has no values
                kinds[name] = str(types_in(store, column, indices)[name])
    return kinds


def _range(values: list[int]) -> list[int] | None:
    if values:
        return [min(values), int(np.median(values)), max(values)]
    return None
