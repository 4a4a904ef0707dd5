"""Datasets of torchvision whose items a store and a transform make as well, bit by bit, in less time.

    ImageFolder, DatasetFolder of images     the folder's store
    CIFAR10, CIFAR100; MNIST and its like    a store of their pixels

Actors run the pipeline up to ToTensor, Normalize and the like, which make floats of a whole batch. If code of the
user's makes the items, opens the files or changes the target, or some items that are compared differ, the Dataset
makes its items itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate

from raypipe.config import TransformConfig
from raypipe.errors import RaypipeError
from raypipe.stores.base import NAME, Store
from raypipe.stores.folder import FolderStore
from raypipe.stores.memory import MemoryStore
from raypipe.stores.png import stored_png
from raypipe.transform.decode.array import decoder_of
from raypipe.transform.pipelines import flat, package_of, shortened, transform_kind
from raypipe.transform.process_state import process_kept, seed_process
from raypipe.transform.sample_transform import SampleTransform

_NUM_COMPARED = 4
# Steps that make a tensor of an image, or its floats pixel by pixel.
_TO_TENSOR = ("ToTensor", "ToImage", "PILToTensor", "ToPureTensor")
_LAST = (*_TO_TENSOR, "ToDtype", "ConvertImageDtype", "Normalize")


class Recognized(NamedTuple):
    """A Dataset as a store, a transform, and steps for whole batches.

    Attributes:
        store: its samples.
        transform: a pipeline of torchvision that makes uint8; None = pixels as they are stored.
        last: the steps after it.
        config: settings of the decode.
    """

    store: Store
    transform: Any
    last: Sequence[Any]
    config: TransformConfig

    def finished(self, images: torch.Tensor) -> torch.Tensor:
        """Return what the last steps make of images, uint8 (B, C, H, W)."""
        for step in self.last:
            name = type(step).__name__
            if name == "ToTensor":
                images = images.to(torch.get_default_dtype()).div(255)
            elif name not in _TO_TENSOR:
                images = step(images)
        return images


def recognized(dataset: Any) -> Recognized | None:
    """Return the store and the transform that make a Dataset's items; None = it is not known to."""
    transform = getattr(dataset, "transform", None)
    if getattr(dataset, "target_transform", None) is not None:
        return None
    with contextlib.suppress(RaypipeError):
        if transform_kind(transform) not in ("pil", "torchvision"):
            return None
        store = _store_of(dataset)
        if store is None or len(store) != len(dataset):
            return None
        steps = list(flat(transform))
        num_first = len(steps) - len(list(takewhile(_is_last, reversed(steps))))
        first = shortened(transform, num_first)
        is_gray = isinstance(store, MemoryStore) and dataset.data.ndim == 3
        config = TransformConfig(decode="array" if is_gray else "cpu")
        if first is not None and transform_kind(first) != "pil":
            from torchvision.transforms import v2

            # it would get tensors, and gets PIL images in a Dataset
            first = v2.Compose([v2.ToPILImage(), first])
        found = Recognized(store, first, steps[num_first:], config)
        # an array of one channel becomes no PIL image
        if not (is_gray and num_first) and _are_equal(dataset, found):
            return found
    return None


def _is_last(step: Any) -> bool:
    return type(step).__name__ in _LAST and package_of(step) == "torchvision"


def _store_of(dataset: Any) -> Store | None:
    """Return the store that has the samples of a Dataset, under the same indices; None = there is none."""
    from torchvision import datasets

    makes_item = type(dataset).__getitem__
    if makes_item in (datasets.CIFAR10.__getitem__, datasets.MNIST.__getitem__):
        images = list(map(stored_png, np.asarray(dataset.data)))
        return MemoryStore(images, np.asarray(dataset.targets), dataset.classes)
    loads = getattr(dataset, "loader", None)
    is_folder = makes_item is datasets.DatasetFolder.__getitem__
    if not is_folder or loads is not datasets.folder.default_loader:
        return None
    root = str(dataset.root)
    store = FolderStore(root, "folder")
    columns = store.read(np.arange(len(store)), (NAME, "label"))
    files = [f"{root.rstrip('/')}/{name}" for name in columns[NAME]]
    samples = list(zip(files, columns["label"].tolist(), strict=True))
    return store if samples == list(dataset.samples) else None


def _are_equal(dataset: Any, found: Recognized) -> bool:
    """Return whether some items are equal, with random steps that draw the same numbers."""
    decode = decoder_of(found.config)
    transform = SampleTransform(found.transform, found.config.decode != "array")
    indices = np.linspace(0, len(dataset) - 1, _NUM_COMPARED).astype(np.int64)
    columns = found.store.read(indices)
    with process_kept():
        for index, encoded in zip(indices.tolist(), columns["image"], strict=True):
            key = (index, _NUM_COMPARED)
            try:
                pixels = torch.from_numpy(transform(decode(encoded), key))
                ours = found.finished(pixels.movedim(-1, 0)[None])[0]
                seed_process(*key)
                item, target = dataset[index]
                is_equal = pixels.dtype == torch.uint8 and ours.equal(item)
                # other numbers of torch's have the target's own type
                target_type = default_collate([target]).dtype
                is_equal &= target_type in (torch.int64, torch.float64)
            except Exception:  # the Dataset raises it, too
                return False
            if not is_equal:
                return False
    return True
