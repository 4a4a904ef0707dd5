"""A micro-batch on its way through the CPU: as read, as made, and as a rank gets it.

read_samples → Read → MicroBatchTransform, whose arrays are put into a Room → MicroBatchResult → HostBatch
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raypipe.plan.schedule import PADDING, MicroBatchId
from raypipe.stores.base import Store
from raypipe.transform.sample_transform import EncodedSample

Read = tuple[list[EncodedSample], np.ndarray]
"""B samples, and labels int64 (B,); padding has no image, and label 0."""


@dataclass
class MicroBatchResult:
    """B transformed samples. Padding, and bad samples of a validation, have weight 0, label 0 and black pixels.

    Attributes:
        arrays: what the Content makes.
        label: int64 (B,); 0 for padding.
        index: int64 (B,), the sample that was delivered, so a substitute's own; -1 for padding.
        weight: float32 (B,), 1 or 0.
        bad: one record per bad sample: `store` (address), `index`, `name` (the store's own, "" where it has
            none), `substitute` (index, or None in a validation), `error` (reason).
    """

    arrays: dict[str, np.ndarray]
    label: np.ndarray
    index: np.ndarray
    weight: np.ndarray
    bad: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class HostBatch:
    """One micro-batch in host memory, possibly read-only; the device's `Batch` has what is not described here.

    Attributes:
        image: uint8 (B, H, W, 3); empty where the device is to decode.
        label: int64 (B,).
        encoded: what the device is to decode.
    """

    at: MicroBatchId
    image: np.ndarray
    label: np.ndarray
    weight: np.ndarray
    index: np.ndarray
    num_bad: int
    read_s: float = 0.0
    work_s: float = 0.0
    encoded: dict[str, np.ndarray] | None = None
    mask: np.ndarray | None = None
    boxes: np.ndarray | None = None


def read_samples(store: Store, indices: np.ndarray, targets: Mapping[str, str] | None = None) -> Read:
    """Samples and labels of int64 indices (B,).

    Args:
        targets: see `read_encoded`.
    """
    real = indices != PADDING
    read, read_labels = read_encoded(store, indices[real], targets)
    if real.all():
        return read, read_labels
    samples = [EncodedSample(None)] * len(indices)
    labels = np.zeros(len(indices), np.int64)
    for position, sample in zip(np.flatnonzero(real), read, strict=True):
        samples[position] = sample
    labels[real] = read_labels
    return samples, labels


def read_encoded(
    store: Store, indices: np.ndarray, targets: Mapping[str, str] | None = None
) -> tuple[list[EncodedSample], np.ndarray]:
    """Samples, and labels int64 (n,), of int64 indices (n,).

    Args:
        targets: columns of masks and boxes, see `TransformConfig.target_columns`. With targets, a store may do
            without labels: they are 0.
    """
    targets = targets or {}
    label = ("label",) if not targets or "label" in store.columns else ()
    columns = store.read(indices, ("image", *label, *targets.values()))
    nothing = [None] * len(indices)
    masks, boxes = (columns[targets[name]] if name in targets else nothing for name in ("mask", "boxes"))
    samples = [EncodedSample(*values) for values in zip(columns["image"], masks, boxes, strict=True)]
    return samples, columns["label"] if label else np.zeros(len(indices), np.int64)
