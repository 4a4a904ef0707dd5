"""What raypipe is for: one small test for each thing that a user comes for, by the public API or the command line.

Read this file first: each test is the shortest use of one capability. Other files test the same parts in depth.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import itertools
import json
import os
import runpy
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import albumentations as A  # noqa: N812
import cv2
import foreign_lmdbs
import h5py
import kornia.augmentation as K  # noqa: N812
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch
import without_ray
import yaml
from albumentations.pytorch import ToTensorV2
from documented import ROOT
from pictures import CLASSES, samples
from PIL import Image
from small_runs import parse_run, small_run
from tars import put, write_tar
from torchvision.transforms import v2

import raypipe
from raypipe.commands import cli
from raypipe.commands.cli import main
from raypipe.config import RunConfig
from raypipe.device.prefetcher import Batch
from raypipe.errors import StoreError
from raypipe.launch.run import launch
from raypipe.metrics.timing import Situation, StageTimes, diagnose
from raypipe.metrics.utilization import Utilization
from raypipe.stores import MemoryStore
from raypipe.stores.sources import open_source

# `raypipe.convert` and the actors use the cluster that all tests share.
pytestmark = pytest.mark.usefixtures("ray_cluster")

PLAN = raypipe.PlanConfig(epochs=2, micro_batch_size=8, global_batch_size=16, seed=1)
SMALL = raypipe.TransformConfig(train="small", val="resize", size=16)
INLINE = raypipe.PoolConfig(engine="inline")
IMAGES = 48


@pytest.fixture
def images(tmp_path: Path) -> list[dict[str, Any]]:
    return samples(IMAGES)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """An LMDB of 48 JPEGs in 5 classes."""
    raypipe.convert(samples(IMAGES), tmp_path / "train.lmdb", classes=CLASSES)
    return tmp_path / "train.lmdb"


def open_small(train: Any, val: Any = None, **options: Any) -> raypipe.StreamSpec:
    """A stream of small images, made in this process unless a pool or a transform is given."""
    sizes = SMALL
    if "train_transform" in options:
        sizes = raypipe.TransformConfig(size=16)
    return raypipe.open_stream(
        train, val, **{"plan": PLAN, "transform": sizes, "pool": INLINE, **options}
    )


def training(spec: raypipe.StreamSpec, **options: Any) -> list[Batch]:
    """Every training batch of a stream."""
    loader = raypipe.loader(spec, **options)
    return [batch for epoch in loader.epochs() for batch in epoch.train]


def labels_of(batches: list[Batch]) -> list[int]:
    return [label for batch in batches for label in batch.target.tolist()]


def assert_trains_on(train: Any, **options: Any) -> None:
    """Each of the 48 samples comes once in each epoch, with its label."""
    batches = training(open_small(train, **options))
    assert len(batches) == 2 * IMAGES // 8 and all(
        batch.image.shape == (8, 3, 16, 16) for batch in batches
    )
    assert sorted(labels_of(batches)) == sorted(
        2 * [number % 5 for number in range(IMAGES)]
    )


def assert_equal(one: list[Batch], two: list[Batch]) -> None:
    assert len(one) == len(two) > 0
    for first, second in zip(one, two, strict=True):
        assert torch.equal(first.image, second.image) and torch.equal(
            first.target, second.target
        )


def run_command(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """The JSON of a command's last line."""
    main([str(word) for word in words])
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


# Stores


def test_lmdb(
    store: Path,
    images: list[dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """raypipe's own, and those that others wrote, in place."""
    assert_trains_on(store)
    encoded, labels = (
        [sample["image"] for sample in images],
        [sample["label"] for sample in images],
    )
    assert_trains_on(
        foreign_lmdbs.write_folders(tmp_path / "keys.lmdb", encoded, labels, CLASSES)
    )
    assert_trains_on(
        foreign_lmdbs.write_lsun(tmp_path / "lsun", encoded, labels, CLASSES)
    )
    for kind, dumps in foreign_lmdbs.DUMPS.items():
        pairs = foreign_lmdbs.write_values(tmp_path / kind, encoded, labels, dumps)
        if kind == "pickle":
            with pytest.raises(StoreError, match=r"--store\.trust-pickles true"):
                open_small(pairs)
        assert_trains_on(pairs, trust_pickles=kind == "pickle")
    words = [f"word {label}" for label in labels]
    text = foreign_lmdbs.write_texts(tmp_path / "text", encoded, words)
    batches = training(open_small(text, target_column="", columns=["text"]))
    assert sorted(
        word for batch in batches for word in batch.columns["text"]
    ) == sorted(2 * words)
    described = run_command(
        capsys, "inspect", tmp_path / "pickle", "--store.trust-pickles", "true"
    )
    assert described["samples"] == IMAGES


def test_parquet(images: list[dict[str, Any]], tmp_path: Path, bucket: str) -> None:
    plain = {
        "image": [sample["image"] for sample in images],
        "label": [sample["label"] for sample in images],
    }
    hugging_face = {
        **plain,
        "image": [{"bytes": image, "path": None} for image in plain["image"]],
    }
    for name, columns in (("plain", plain), ("hf", hugging_face)):
        pq.write_table(
            pa.table(columns), tmp_path / f"{name}.parquet", row_group_size=10
        )
        assert_trains_on(tmp_path / f"{name}.parquet")
    for number in range(2):
        half = {
            name: values[24 * number : 24 * number + 24]
            for name, values in plain.items()
        }
        pq.write_table(pa.table(half), tmp_path / f"many-{number}.parquet")
    assert_trains_on(tmp_path / "many-*.parquet")
    raypipe.convert(tmp_path / "plain.parquet", f"{bucket}/train.parquet")
    assert_trains_on(f"{bucket}/train.parquet")


def test_webdataset(
    images: list[dict[str, Any]],
    tmp_path: Path,
    bucket: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    halves = [
        [(sample["image"], sample["label"]) for sample in images[24 * i : 24 * i + 24]]
        for i in range(2)
    ]
    for shard, half in enumerate(halves):
        tar = write_tar(tmp_path / f"train-{shard}.tar", half, 24 * shard)
        put(tar, f"{bucket}/train-{shard}.tar")
        write_tar(tmp_path / f"train-{shard}.tar.gz", half, 24 * shard, "w:gz")
    assert_trains_on(tmp_path / "train-{0..1}.tar")
    assert_trains_on(tmp_path / "train-{0..1}.tar.gz")
    assert (
        run_command(capsys, "index", f"{bucket}/train-{{0..1}}.tar")["samples"]
        == IMAGES
    )
    assert_trains_on(f"{bucket}/train-{{0..1}}.tar")
    # On disk the whole store is shuffled, in a bucket windows of it; with one setting both have one order.
    local, remote = (
        training(
            open_small(
                f"{place}/train-{{0..1}}.tar",
                plan=dataclasses.replace(PLAN, shuffle="window"),
            )
        )
        for place in (tmp_path, bucket)
    )
    assert_equal(local, remote)


def test_other_stores(
    images: list[dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One command makes a store of each; files of MXNet, TensorFlow, MosaicML, LitData and datasets are theirs."""
    with h5py.File(tmp_path / "train.h5", "w") as file:
        file["labels"] = [sample["label"] for sample in images]
        encoded = file.create_dataset("images", (IMAGES,), h5py.vlen_dtype(np.uint8))
        for number, sample in enumerate(images):
            encoded[number] = np.frombuffer(sample["image"], np.uint8)
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        for number, sample in enumerate(images):
            archive.writestr(f"photos/{sample['label']}/{number}.jpg", sample["image"])
    (tmp_path / "own_rows.py").write_text(
        "from pictures import samples\ndef rows():\n    yield from samples(48)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for number, source in enumerate(
        (tmp_path / "train.h5", tmp_path / "photos.zip", "own_rows:rows")
    ):
        assert (
            run_command(capsys, "convert", source, tmp_path / f"{number}.lmdb")[
                "samples"
            ]
            == IMAGES
        )
        assert_trains_on(tmp_path / f"{number}.lmdb")
    others = (
        "mxnet/one-label.rec",
        "tensorflow-train.tfrecord",
        "mds",
        "litdata",
        "arrow",
    )
    for name in others:
        source = open_source(ROOT / "tests" / "stores" / "data" / name)
        assert source is not None and len(list(source.samples)) == 8
    raypipe.convert(iter(images), tmp_path / "iterable.lmdb")
    assert_trains_on(tmp_path / "iterable.lmdb")


def test_ray_data(images: list[dict[str, Any]], tmp_path: Path) -> None:
    raypipe.convert(ray.data.from_items(images), tmp_path / "dataset.lmdb")
    assert_trains_on(tmp_path / "dataset.lmdb")
    spec = open_small(tmp_path / "dataset.lmdb")
    epoch = raypipe.dataset(spec, epoch=1, channels_first=True).iter_torch_batches(
        batch_size=8
    )
    for found, batch in zip(epoch, training(spec)[IMAGES // 8 :], strict=True):
        assert torch.equal(found["image"], batch.image) and torch.equal(
            found["label"], batch.target
        )
    encoded, labels = (
        [sample["image"] for sample in images],
        [sample["label"] for sample in images],
    )
    others = foreign_lmdbs.write_folders(
        tmp_path / "others.lmdb", encoded, labels, CLASSES
    )
    for path in (tmp_path / "dataset.lmdb", others):
        dataset = raypipe.read_lmdb(
            path, columns=["label", "image"], override_num_blocks=4
        )
        # Ray Data takes blocks as they come, unless it is told to preserve their order.
        threes = sorted(row["image"] for row in dataset.take_all() if row["label"] == 3)
        assert threes == sorted(encoded[3::5])


# The CPU half


@pytest.mark.usefixtures("two_cpus")
def test_actors(store: Path) -> None:
    spec = open_small(store, pool=raypipe.PoolConfig(max_actors=2))
    loader = raypipe.loader(spec)
    made = [batch for epoch in loader.epochs() for batch in epoch.train]
    assert_equal(made, training(open_small(store)))
    nodes = yaml.safe_load((ROOT / "cluster.yaml").read_text())["available_node_types"]
    growing = [
        kind
        for kind in nodes.values()
        if kind.get("max_workers", 0) > kind.get("min_workers", 0) == 0
    ]
    assert any("GPU" not in kind.get("resources", {}) for kind in growing)


def test_albumentations(store: Path) -> None:
    """A pipeline as it stands in a training script: what its last steps make, the device makes."""
    steps = [
        A.RandomCrop(16, 16),
        A.HorizontalFlip(p=0.5),
        A.RandomBrightnessContrast(p=0.5),
    ]
    last = A.Compose([A.Normalize((0.5, 0.4, 0.3), (0.3, 0.2, 0.1)), ToTensorV2()])
    batches = training(
        open_small(store, train_transform=A.Compose([*steps, *last.transforms]))
    )
    for batch, before in zip(
        batches,
        training(open_small(store, train_transform=A.Compose(steps))),
        strict=True,
    ):
        expected = [
            last(image=image.permute(1, 2, 0).numpy())["image"]
            for image in before.image
        ]
        torch.testing.assert_close(
            batch.image, torch.stack(expected), atol=1e-5, rtol=1e-5
        )


def test_torchvision_v2(store: Path) -> None:
    steps = [
        v2.ToImage(),
        v2.RandomResizedCrop(16),
        v2.RandomHorizontalFlip(),
        v2.ColorJitter(0.4),
    ]
    last = [
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize((0.5, 0.4, 0.3), (0.3, 0.2, 0.1)),
    ]
    batches = training(open_small(store, train_transform=v2.Compose([*steps, *last])))
    for batch, before in zip(
        batches,
        training(open_small(store, train_transform=v2.Compose(steps))),
        strict=True,
    ):
        torch.testing.assert_close(
            batch.image, v2.Compose(last)(before.image), atol=1e-5, rtol=1e-5
        )


def test_fast_decode(store: Path) -> None:
    """The crop alone is decoded, with the pixels of the whole image, cropped: those of libjpeg-turbo."""
    center = training(
        open_small(store, train_transform=A.Compose([A.CenterCrop(16, 16)]))
    )[0]
    encoded = raypipe.open_store(store).read(center.index)["image"]
    decoded = (
        cv2.imdecode(np.frombuffer(image, np.uint8), cv2.IMREAD_COLOR_RGB)
        for image in encoded
    )
    for image, whole in zip(center.image, decoded, strict=True):
        top, left = (whole.shape[0] - 16) // 2, (whole.shape[1] - 16) // 2
        assert np.array_equal(
            image.permute(1, 2, 0), whole[top : top + 16, left : left + 16]
        )
    light = raypipe.TransformConfig(train="light", size=16)
    whole = dataclasses.replace(light, crop_decode="off")
    assert_equal(
        training(open_small(store, transform=light)),
        training(open_small(store, transform=whole)),
    )


def test_decode_once(store: Path, tmp_path: Path) -> None:
    raypipe.convert(store, tmp_path / "short.lmdb", short_side=20)
    assert len(raypipe.open_store(tmp_path / "short.lmdb")) == IMAGES
    assert_trains_on(tmp_path / "short.lmdb")


# The device half


def kornia_module() -> torch.nn.Module:
    flip, crop = (
        K.RandomHorizontalFlip(p=0.5),
        K.RandomResizedCrop((16, 16), scale=(0.5, 1.0)),
    )
    return torch.nn.Sequential(
        flip, crop, K.ColorJitter(0.2, 0.2, 0.2, 0.1), K.RandomErasing(p=0.25)
    )


def test_kornia(store: Path, tmp_path: Path) -> None:
    """A module makes the pixels of a call by hand, given as an object or by name, and moves masks and boxes."""
    augmented, plain = (
        training(open_small(store), augment=kornia_module()),
        training(open_small(store)),
    )
    by_hand = kornia_module()
    for batch, raw in zip(augmented, plain, strict=True):
        torch.manual_seed(batch.seed)
        assert torch.equal(batch.image, by_hand(raw.image.float() * (1 / 255)))
    by_name = raypipe.AugmentConfig(
        module=f"{__name__}:kornia_module", mean=(0, 0, 0), std=(1, 1, 1)
    )
    assert_equal(augmented, training(open_small(store), augment=by_name))
    Image.fromarray(np.repeat(np.uint8([[0, 1]]), 16, 1).repeat(16, 0)).save(
        png := io.BytesIO(), "PNG"
    )
    sample = {
        "image": png.getvalue(),
        "mask": png.getvalue(),
        "boxes": [16, 0, 32, 16, 4],
    }
    raypipe.convert([sample] * 16, tmp_path / "boxes.lmdb")
    targets = raypipe.TransformConfig(
        train="none", mask_column="mask", boxes_column="boxes", max_targets=2
    )
    moves = K.AugmentationSequential(
        K.RandomHorizontalFlip(p=0.5), data_keys=["input", "mask", "bbox_xyxy"]
    )
    spec = open_small(tmp_path / "boxes.lmdb", transform=targets, target_column=None)
    for batch in training(spec, augment=moves):
        x0 = batch.fields["boxes"][:, 0, 0]
        assert set(x0.tolist()) == {0, 16}
        assert torch.equal(batch.fields["mask"][:, 0, 0] == 1, x0 == 0)


def test_batch_transforms(store: Path) -> None:
    """Erasing, and MixUp and CutMix by their own shares."""
    shares = {"mixup_alpha": 0.4, "cutmix_alpha": 1, "mix_probs": (0.4, 0.4)}
    augment = raypipe.AugmentConfig(ops=[{"op": "RandomErasing", "p": 1}], **shares)
    kinds = [
        batch.mix and batch.mix.is_cutmix
        for batch in training(open_small(store), augment=augment)
    ]
    assert set(kinds) == {None, False, True}


def test_differentiable(store: Path) -> None:
    """The gradient of a loss with respect to the CPU's pixels, and the same augmentation of changed pixels."""
    augment = raypipe.AugmentConfig(preset="strong", differentiable=True)
    for batch in training(open_small(store), augment=augment):
        (gradient,) = torch.autograd.grad(batch.image.square().mean(), batch.pixels)
        assert gradient.shape == batch.pixels.shape and gradient.any()
        brighter = batch.augment((batch.pixels + 0.1).detach())
        assert brighter.shape == batch.image.shape and not torch.equal(
            brighter, batch.image
        )


def test_gpu_decode(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Actors send encoded bytes; the rank's device decodes, crops and augments the same samples, seeded."""
    encoded = dataclasses.replace(SMALL, train="light", decode="device")
    pixels = dataclasses.replace(encoded, decode="cpu")
    augment = raypipe.AugmentConfig(preset="standard")
    device, again = (
        training(open_small(store, transform=encoded), augment=augment)
        for _ in range(2)
    )
    host = training(open_small(store, transform=pixels), augment=augment)
    assert all(
        torch.equal(one.image, other.image)
        for one, other in zip(device, again, strict=True)
    )
    for ours, other in zip(device, host, strict=True):
        assert ours.index.tolist() == other.index.tolist() and torch.equal(
            ours.target, other.target
        )
        assert (
            ours.image - other.image
        ).abs().mean() < 0.1  # the same crops, flips and augmentation
    options = (
        "--pool.engine=inline",
        "--plan.micro_batch_size=8",
        "--transform.decode=device",
    )
    assert run_command(capsys, "digest", store, *options)


def test_prefetch(store: Path, cuda_or_pretended: None) -> None:
    """Batches come by a CUDA stream of their own, into a ring of pinned memory, normalized there."""
    batches = training(
        open_small(store),
        device="cuda",
        augment=raypipe.AugmentConfig(),
        keep_batches=9,
    )
    assert {batch.image.dtype for batch in batches} == {torch.float32}
    assert {batch.image.device.type for batch in batches} == {"cuda"}


def test_cache(images: list[dict[str, Any]]) -> None:
    class Slow(MemoryStore):
        num_read = 0

        def read(self, indices: Any, columns: Any = ("image", "label")) -> Any:
            self.num_read += len(indices) * ("image" in columns)
            return super().read(indices, columns)

    def make() -> Slow:
        return Slow(
            [sample["image"] for sample in images],
            [sample["label"] for sample in images],
        )

    slow = make()
    kept = open_small(slow, in_memory=True)
    before = slow.num_read
    assert_equal(training(kept), training(open_small(make())))
    assert slow.num_read - before <= IMAGES  # in two epochs


def test_cache_on_the_device(store: Path, cuda_or_pretended: None) -> None:
    """A small set is decoded once, into the GPU's memory, and comes in the order of the stream."""
    data = raypipe.resident(store, "cuda", plan=PLAN, size=16, border=2, flip=0.5)
    fixed = raypipe.TransformConfig(train="resize", val="resize", size=16)
    streamed = training(open_small(store, transform=fixed))
    found = [batch for number in range(PLAN.epochs) for batch in data.epoch(number)]
    assert [batch.index.tolist() for batch in found] == [
        batch.index.tolist() for batch in streamed
    ]
    assert {(batch.image.device.type, *batch.image.shape) for batch in found} == {
        ("cuda", 8, 3, 16, 16)
    }
    assert [batch.position for batch in data.epoch(1, step=2)] == [
        batch.position for batch in found[10:]
    ]


# One stream


@pytest.mark.usefixtures("two_cpus")
def test_interleave_prefetch_parallel_map_autotune(
    images: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Nothing is set: a batch mixes the files, and as many actors as there is room for work ahead of the loop."""
    for number in range(2):
        columns = {
            name: [sample[name] for sample in images[number::2]]
            for name in ("image", "label")
        }
        pq.write_table(pa.table(columns), tmp_path / f"many-{number}.parquet")
    made = tmp_path / "made"
    made.mkdir()

    def transform(image: np.ndarray) -> np.ndarray:
        with (made / str(os.getpid())).open("a") as file:
            file.write("x")
        return image[:16, :16]

    spec = open_small(
        tmp_path / "many-*.parquet",
        plan=dataclasses.replace(PLAN, epochs=200),
        train_transform=transform,
        pool=raypipe.PoolConfig(),
    )
    loader = raypipe.loader(spec)
    batches = itertools.chain.from_iterable(epoch.train for epoch in loader.epochs())
    batch = next(batches)
    assert batch.index.min() < IMAGES // 2 <= batch.index.max()
    deadline = time.monotonic() + 60
    while (
        len(actors := {path.name for path in made.iterdir()} - {str(os.getpid())}) < 2
        or num_made(made) < 40
    ):
        assert time.monotonic() < deadline, (actors, num_made(made))
        time.sleep(0.1)
        next(batches)  # the first actor may have made all that is ahead of the loop
    loader.close()


def num_made(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_debug(store: Path) -> None:
    """A debugger stops in a transform, since it runs in this process."""
    seen: list[int] = []

    def transform(image: np.ndarray) -> np.ndarray:
        seen.append(os.getpid())
        return image[:16, :16]

    training(open_small(store, train_transform=transform, val_transform=transform))
    assert set(seen) == {os.getpid()}


@pytest.mark.usefixtures("two_cpus")
def test_seeds(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = (
        "--plan.epochs=2",
        "--plan.micro-batch-size=8",
        "--plan.global-batch-size=16",
        "--transform.size=16",
    )
    written = tmp_path / "one.json"
    one = run_command(
        capsys, "digest", store, *settings, "--pool.engine=inline", "--output", written
    )
    elsewhere = ("--pool.max-actors=2", "--train.num-workers=2", "--from-step=1")
    two = run_command(
        capsys, "digest", store, *settings, *elsewhere, "--compare", written
    )
    assert len(one["digest"]) == 32 and two["equal"] is True


@pytest.mark.usefixtures("one_cpu")
def test_persistent_workers(store: Path) -> None:
    """One actor makes every epoch and every validation."""
    pids: set[int] = set()

    def transform(image: np.ndarray) -> np.ndarray:
        return np.full((16, 16, 3), os.getpid() % 251, np.uint8)

    spec = open_small(
        store,
        store,
        train_transform=transform,
        val_transform=transform,
        pool=raypipe.PoolConfig(max_actors=1),
    )
    for batch in without_ray.every_batch(raypipe.loader(spec)):
        pids |= set(batch.image.flatten().tolist())
    assert len(pids) == 1


# Training


def final_weights(result: dict[str, Any]) -> dict[str, torch.Tensor]:
    last = sorted(Path(result["run_dir"]).glob("checkpoint_*/"))[-1]
    weights: dict[str, torch.Tensor] = raypipe.read_checkpoint(last).state["model"]
    return weights


def test_ddp(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two workers learn the weights that one learns."""
    run = small_run(tmp_path, store, store, 1, 2)
    alone = without_ray.train(dataclasses.replace(run, name="alone"))
    two = dataclasses.replace(run.train, num_workers=2, cpus_per_worker=0.5)
    together = launch(dataclasses.replace(run, name="two", train=two))
    for name, value in final_weights(alone).items():
        assert torch.equal(value, final_weights(together)[name]), name


@pytest.fixture
def watched_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A user's model, by its address, which notes what reaches it."""
    (tmp_path / "watched_model.py").write_text(WATCHED_MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("watched_model")
    yield module
    del sys.modules["watched_model"]


WATCHED_MODEL = """
import torch

seen = []

class Net(torch.nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3)
        self.last = torch.nn.Linear(8, num_classes)

    def forward(self, image):
        features = self.conv(image)
        tensors = {"image": image, "features": features, "weight": self.conv.weight}
        layouts = {
            name: tensor.is_contiguous(memory_format=torch.channels_last)
            for name, tensor in tensors.items()
        }
        seen.append((features.dtype, torch.backends.cudnn.benchmark, layouts))
        return self.last(features.mean((2, 3)))
"""


def watched_run(store: Path, tmp_path: Path, **train: Any) -> RunConfig:
    run = small_run(tmp_path, store, store, 1, 2, **train)
    return dataclasses.replace(
        run, train=dataclasses.replace(run.train, model="watched_model:Net")
    )


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_precision(amp: str, store: Path, tmp_path: Path, watched_model: Any) -> None:
    """AMP and accumulated gradients; images are channels_last in memory on any device."""
    run = watched_run(store, tmp_path, amp=amp)
    result = without_ray.train(run)
    assert 0 <= result["val_accuracy"] <= 1 and result["steps"] == IMAGES // 12
    assert all(value.isfinite().all() for value in final_weights(result).values())
    for dtype, _, layouts in watched_model.seen:
        assert dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[amp]
        assert layouts["image"] and layouts["features"]


def test_precision_on_the_device(
    store: Path,
    tmp_path: Path,
    watched_model: Any,
    cuda_or_pretended: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On CUDA, channels_last and cudnn.benchmark are on by themselves, for weights too."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    without_ray.train(watched_run(store, tmp_path), device="cuda")
    assert watched_model.seen
    for dtype, chooses, layouts in watched_model.seen:
        assert dtype == torch.bfloat16 and chooses and all(layouts.values())


def test_imbalance(tmp_path: Path) -> None:
    rare = [
        sample | {"label": int(number < 4)}
        for number, sample in enumerate(samples(IMAGES))
    ]
    raypipe.convert(rare, tmp_path / "rare.lmdb")
    balanced = dataclasses.replace(PLAN, weights=1.0, epoch_samples=160)
    shares = (
        np.bincount(
            labels_of(training(open_small(tmp_path / "rare.lmdb", plan=balanced)))
        )
        / 320
    )
    assert shares == pytest.approx([0.5, 0.5], abs=0.1)


@pytest.mark.system
def test_policy_search(store: Path, tmp_path: Path) -> None:
    """Ray Tune tries policies, compares the best with the run's own, and writes a config that trains."""
    job = runpy.run_path(str(ROOT / "jobs" / "tune.py"))
    run = small_run(tmp_path, store, store, 2, 2)
    run = dataclasses.replace(
        run,
        name="search",
        pool=INLINE,
        train=dataclasses.replace(run.train, ema_decay=0),
    )
    result = job["search"](run, trials=2, seeds=2)
    assert len(result["best"]) == len(result["default"]) == 2
    winner = parse_run([f"--config={tmp_path}/search/best.yaml"], None)
    assert winner.plan == run.plan


def test_strength(store: Path) -> None:
    """No augmentation at the run's start and end, all of it in between, on the CPU and the device."""
    on_cpu = raypipe.TransformConfig(
        train="heavy", val="center", size=16, strength=(0.5, 1, 0.5)
    )
    weak = training(open_small(store, transform=on_cpu))
    none = training(
        open_small(store, transform=dataclasses.replace(on_cpu, strength=0.0))
    )
    same = [
        torch.equal(one.image, two.image) for one, two in zip(weak, none, strict=True)
    ]
    assert same[:2] == [True, True] and not any(same[2:])
    flips = [{"op": "RandomHorizontalFlip", "p": 1.0}]
    fixed = raypipe.TransformConfig(train="resize", val="resize", size=16)
    augment = raypipe.AugmentConfig(
        ops=flips, strength=(0.5, 1, 0.5), mean=(0, 0, 0), std=(1, 1, 1)
    )
    augmented = training(open_small(store, transform=fixed), augment=augment)
    plain = training(open_small(store, transform=fixed))
    turned = [
        float(
            (one.image - two.image / 255)
            .abs()
            .gt(0.01)
            .flatten(1)
            .any(1)
            .float()
            .mean()
        )
        for one, two in zip(augmented, plain, strict=True)
    ]
    assert turned[0] == 0 and max(turned) > turned[-1]


def test_validation(store: Path) -> None:
    """Validation is the same in every epoch, not augmented, and counts each sample once."""
    loader = raypipe.loader(
        open_small(store, store), augment=raypipe.AugmentConfig(preset="strong")
    )
    epochs = [list(epoch.val) for epoch in loader.epochs()]
    assert_equal(*epochs)
    assert sum(float(batch.weight.sum()) for batch in epochs[0]) == IMAGES


def test_bottleneck(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run says who waits for whom, the GPU's utilization, and what to change."""
    result = without_ray.train(small_run(tmp_path, store, store, 2, 2))
    records = (Path(result["run_dir"]) / "metrics.jsonl").read_text().splitlines()
    texts = [
        record["text"]
        for record in map(json.loads, records)
        if record["kind"] == "diagnosis"
    ]
    assert any("of a trainer is" in text for text in texts)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 40)
    assert Utilization(torch.device("cuda", 0)).sample() == 0.4
    fed = StageTimes(images=1000, wait_s=1, compute_s=99, micro_batches=100)
    advice = " ".join(diagnose(fed, Situation(1, 4, "cuda", gpu_utilization=0.4)))
    assert "it executes kernels for 40%" in advice and "train.compile=true" in advice


RESUMED = """
import os
import sys

import torch

import raypipe

store, state = sys.argv[1:]
spec = raypipe.open_stream(
    store,
    plan=raypipe.PlanConfig(epochs=2, micro_batch_size=8, seed=1),
    transform=raypipe.TransformConfig(train="light", size=16),
    pool=raypipe.PoolConfig(engine="inline"),
)
loader = raypipe.loader(spec)
if os.path.exists(state):
    loader.load_state_dict(torch.load(state))
for epoch in loader.epochs():
    for batch in epoch.train:
        print(loader.global_step, int(batch.image.long().sum()), flush=True)
        torch.save(loader.state_dict(), state)
        if os.path.exists(state + ".kill") and loader.global_step == 5:
            os.remove(state + ".kill")
            os.kill(os.getpid(), 9)
"""


def test_resume(
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`kill -9`, then the same command: the next step, the same bits."""

    def steps(state: str) -> dict[str, str]:
        command = [sys.executable, "-c", RESUMED, str(store), str(tmp_path / state)]
        printed = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=60
        ).stdout
        return dict(line.split() for line in printed.splitlines())

    (tmp_path / "mine.kill").touch()
    killed = steps("mine")
    resumed = steps("mine")
    assert len(killed) == 5 and not resumed.keys() & killed.keys()
    monkeypatch.setattr(sys, "argv", ["-c", str(store), str(tmp_path / "unbroken")])
    exec(RESUMED, {})
    assert killed | resumed == dict(
        line.split() for line in capsys.readouterr().out.splitlines()
    )


def test_submit() -> None:
    """`ray job submit … python jobs/train.py`; tests/test_jobs.py submits it to a cluster."""
    job = runpy.run_path(str(ROOT / "jobs" / "train.py"))
    assert job["train"] is cli.COMMANDS["train"]
    cluster = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    assert (
        cluster["provider"]["type"] == "aws"
        and "head" in cluster["available_node_types"]
    )


def test_container(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The image holds what `raypipe` needs, and a notebook looks at augmented images."""
    result = run_command(
        capsys,
        "preview",
        store,
        "-o",
        tmp_path / "grid.png",
        "--transform.size=16",
        "--augment.preset=strong",
    )
    assert Path(result["output"]).stat().st_size > 1000
    assert "COPY raypipe raypipe" in (ROOT / "deploy" / "Dockerfile").read_text()
    cells = json.loads((ROOT / "docs" / "preview.ipynb").read_text())["cells"]
    assert any("preview" in "".join(cell["source"]) for cell in cells)
