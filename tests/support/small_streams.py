"""Stores of 48 small images, and streams of them through the public API, made in this process."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import foreign_lmdbs
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pictures import CLASSES, samples
from tars import write_tar

import raypipe
from raypipe.device.prefetcher import Batch
from raypipe.stores import MemoryStore

NUM = 48
PLAN = raypipe.PlanConfig(epochs=2, micro_batch_size=8, global_batch_size=16, seed=1)
INLINE = raypipe.PoolConfig(engine="inline")
SMALL = raypipe.TransformConfig(train="small", val="resize", size=16)
FIXED = raypipe.TransformConfig(train="resize", val="resize", size=16)

LMDBS = ("keys", "lsun", "texts", *foreign_lmdbs.DUMPS)


def images() -> list[bytes]:
    return [sample["image"] for sample in samples(NUM)]  # type: ignore[misc]


def labels() -> list[int]:
    return [number % len(CLASSES) for number in range(NUM)]


def rows() -> Iterator[dict[str, object]]:
    """The samples, as a program of a user's own gives them."""
    yield from samples(NUM)


def kornia_module() -> torch.nn.Module:
    """A user's augmentation on the device."""
    import kornia.augmentation as K  # noqa: N812

    crop = K.RandomResizedCrop((16, 16), scale=(0.5, 1.0))
    color = K.ColorJitter(0.2, 0.2, 0.2, 0.1)
    flip = K.RandomHorizontalFlip(p=0.5)
    return torch.nn.Sequential(flip, crop, color, K.RandomErasing(p=0.25))


def store_of(kind: str, folder: Path) -> Path:
    """Write the images and their labels into a store; return its address.

    Args:
        kind: "lmdb", as raypipe writes it; one of LMDBS, as others do; "parquet", "hugging face", "many parquet",
            "tar", "tar.gz", "hdf5" or "zip"; "csv", "tsv", "jsonl" or "paths" in Parquet, which name the images;
            "rare": 4 of one class, and 44 of another; "boxes": 16 images of
            32 x 16, the right half of which is the mask and the one box.
    """
    path = folder / f"train.{kind}"
    if kind in ("lmdb", "rare", "boxes"):
        path = folder / f"{kind} train.lmdb"
        classes = CLASSES if kind == "lmdb" else None
        raypipe.convert(_samples_of(kind), path, classes=classes)
        return path
    if kind in LMDBS:
        return _lmdb_of(kind, path)
    if kind in ("tar", "tar.gz"):
        return _tars(kind, folder)
    if kind == "hdf5":
        return _hdf5(path)
    if kind == "zip":
        return _zip(path)
    if kind in ("csv", "tsv", "jsonl", "paths"):
        return _table(kind, path)
    encoded: list[Any] = images()
    if kind == "hugging face":
        encoded = [{"bytes": image, "path": None} for image in encoded]
    table = pa.table({"image": encoded, "label": labels()})
    if kind == "many parquet":
        for number in range(2):
            half = table.slice(number * NUM // 2, NUM // 2)
            pq.write_table(half, folder / f"many-{number}.parquet")
        return folder / "many-*.parquet"
    path = path.with_suffix(".parquet")
    pq.write_table(table, path, row_group_size=10)
    return path


def _lmdb_of(kind: str, path: Path) -> Path:
    if kind == "keys":
        return foreign_lmdbs.write_folders(path, images(), labels(), CLASSES)
    if kind == "lsun":
        return foreign_lmdbs.write_lsun(path, images(), labels(), CLASSES)
    if kind == "texts":
        words = [f"word {label}" for label in labels()]
        return foreign_lmdbs.write_texts(path, images(), words)
    dumps = foreign_lmdbs.DUMPS[kind]
    return foreign_lmdbs.write_values(path, images(), labels(), dumps)


def _tars(kind: str, folder: Path) -> Path:
    pairs = list(zip(images(), labels(), strict=True))
    mode = "w:gz" if kind == "tar.gz" else "w"
    for shard in range(2):
        first = shard * NUM // 2
        half = pairs[first : first + NUM // 2]
        write_tar(folder / f"train-{shard}.{kind}", half, first, mode)
    return folder / f"train-{{0..1}}.{kind}"


def _samples_of(kind: str) -> list[dict[str, object]]:
    if kind == "lmdb":
        return samples(NUM)
    if kind == "rare":
        return [sample | {"label": int(i < 4)} for i, sample in enumerate(samples(NUM))]
    halves = np.zeros((16, 32), np.uint8)
    halves[:, 16:] = 1
    png = cv2.imencode(".png", halves)[1].tobytes()
    return [{"image": png, "mask": png, "boxes": [16, 0, 32, 16, 4]}] * 16


def _hdf5(path: Path) -> Path:
    path = path.with_suffix(".h5")
    with h5py.File(path, "w") as file:
        file["labels"] = labels()
        encoded = file.create_dataset("images", (NUM,), h5py.vlen_dtype(np.uint8))
        for number, image in enumerate(images()):
            encoded[number] = np.frombuffer(image, np.uint8)
    return path


def _zip(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for number, image in enumerate(images()):
            archive.writestr(f"photos/{labels()[number]}/{number}.jpg", image)
    return path


def _table(kind: str, path: Path) -> Path:
    photos = path.parent / "photos"
    photos.mkdir(exist_ok=True)
    for number, image in enumerate(images()):
        (photos / f"{number}.jpg").write_bytes(image)
    rows = [
        {"path": f"photos/{number}.jpg", "label": CLASSES[label]}
        for number, label in enumerate(labels())
    ]
    if kind == "paths":
        path = path.with_suffix(".parquet")
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        lines = [["path", "label"], *map(dict.values, rows)]
        path.write_text("\n".join(map({"csv": ",", "tsv": "\t"}[kind].join, lines)))
    return path


class CountingStore(MemoryStore):
    """The images in memory, and a count of those that were read."""

    num_read = 0

    def __init__(self) -> None:
        super().__init__(images(), labels())

    def read(self, indices: Any, columns: Any = ("image", "label")) -> Any:
        self.num_read += len(indices) * ("image" in columns)
        return super().read(indices, columns)


def spec_of(train: Any, val: Any = None, **options: Any) -> raypipe.StreamSpec:
    """A stream of small images, made in this process unless `pool` says otherwise."""
    sizes = SMALL
    if "train_transform" in options:
        sizes = raypipe.TransformConfig(size=16)
    settings = {"plan": PLAN, "transform": sizes, "pool": INLINE, **options}
    return raypipe.open_stream(train, val, **settings)


def batches_of(spec: raypipe.StreamSpec, **options: Any) -> list[Batch]:
    """Every training batch of a stream; `options` are those of `raypipe.loader`."""
    loader = raypipe.loader(spec, **options)
    return [batch for epoch in loader.epochs() for batch in epoch.train]


def labels_of(batches: list[Batch]) -> list[int]:
    return [label for batch in batches for label in batch.target.tolist()]


def assert_ends_on_device(
    train: Any,
    compose: Callable[[list[Any]], Any],
    steps: list[Any],
    last: list[Any],
    ended: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """What the last steps of a pipeline make of an image, the device makes.

    Args:
        compose: the class of the pipeline.
        ended: applies the last steps to an image.
    """
    begun = batches_of(spec_of(train, train_transform=compose(steps)))
    whole = batches_of(spec_of(train, train_transform=compose([*steps, *last])))
    for batch, before in zip(whole, begun, strict=True):
        expected = torch.stack([ended(image) for image in before.image])
        torch.testing.assert_close(batch.image, expected, atol=1e-5, rtol=1e-5)


def as_on_arrays(pipeline: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A pipeline of Albumentations as a function of an image (C, H, W)."""
    return lambda image: pipeline(image=image.permute(1, 2, 0).numpy())["image"]


def assert_trains_on(train: Any, **options: Any) -> None:
    """Each of the 48 samples comes once in each epoch, with its label."""
    batches = batches_of(spec_of(train, **options))
    assert {batch.image.shape for batch in batches} == {(8, 3, 16, 16)}
    assert sorted(labels_of(batches)) == sorted(2 * labels())


def assert_equal(one: list[Batch], two: list[Batch]) -> None:
    assert len(one) == len(two) > 0
    for first, second in zip(one, two, strict=True):
        assert torch.equal(first.image, second.image)
        assert torch.equal(first.target, second.target)


def shares_changed(
    some: list[Batch], others: list[Batch], scale: int = 1
) -> list[float]:
    """For each batch the share of images that differ from `others` / `scale`."""
    shares = []
    for one, other in zip(some, others, strict=True):
        differs = (one.image - other.image / scale).abs().gt(0.01)
        shares.append(float(differs.flatten(1).any(1).float().mean()))
    return shares
