"""Datasets of torchvision that become a store and a transform: the same items as torch's own DataLoader makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from pictures import samples
from torch.utils import data
from torchvision import datasets, transforms
from torchvision.transforms import v2

import raypipe
from raypipe.streaming.recognized import recognized

MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
OLD = transforms.Compose(
    [
        transforms.Resize(24),
        transforms.CenterCrop(20),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ]
)
NEW = v2.Compose(
    [
        v2.Resize((20, 24)),
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN, STD),
    ]
)
RANDOM = transforms.Compose(
    [
        transforms.RandomCrop(32, padding=4),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
    ]
)
NEW_RANDOM = v2.Compose(
    [
        v2.ToImage(),
        v2.RandomResizedCrop(16),
        v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN, STD),
    ]
)
UINT8 = v2.Compose([v2.Resize((20, 24)), v2.RandomHorizontalFlip(), v2.ToImage()])
TENSOR = transforms.ToTensor()
GRAY = transforms.Compose([TENSOR, transforms.Normalize((0.13,), (0.31,))])
PIPELINES = {
    "old": OLD,
    "v2": NEW,
    "one": TENSOR,
    "random": RANDOM,
    "random v2": NEW_RANDOM,
    "uint8": UINT8,
}


def cifar(kind: type = datasets.CIFAR10, **attributes: Any) -> Any:
    """A dataset of CIFAR as it is after it was read."""
    dataset = kind.__new__(kind)
    rng = np.random.default_rng(0)
    dataset.data = rng.integers(0, 256, (14, 32, 32, 3), np.uint8)
    dataset.targets = [number % 10 for number in range(14)]
    dataset.classes = [f"class {number}" for number in range(10)]
    dataset.transform = OLD
    dataset.target_transform = None
    for name, value in attributes.items():
        setattr(dataset, name, value)
    return dataset


def mnist(kind: type = datasets.MNIST, **attributes: Any) -> Any:
    pixels = torch.from_numpy(cifar().data[..., 0].copy())[:, :28, :28].contiguous()
    targets = torch.arange(14) % 10
    gray = {"data": pixels, "targets": targets, "transform": TENSOR}
    return cifar(kind, **{**gray, **attributes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Photographs in two classes, and one class of PNGs."""
    for number, sample in enumerate(samples(12)):
        name = ("a/2.jpg", "a/1.jpg", "b/1.jpeg")[number % 3]
        path = tmp_path / name.replace("/", f"/{number:02d}-")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(sample["image"])  # type: ignore[arg-type]
    (tmp_path / "c").mkdir()
    gray = np.arange(40 * 50, dtype=np.uint8).reshape(40, 50)
    cv2.imwrite(str(tmp_path / "c" / "gray.png"), gray)
    return tmp_path


def assert_equal(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert type(one) is type(other)
        for tensor, expected in zip(one, other, strict=True):
            assert tensor.dtype == expected.dtype and tensor.is_contiguous()
            assert torch.equal(tensor, expected)


def assert_as_the_dataset(dataset: Any) -> None:
    """A store makes its items, random ones as well, as they are made by index, and as torch's DataLoader does."""
    assert recognized(dataset) is not None
    options: Any = {"batch_size": 4, "shuffle": True}
    by_index = raypipe.DataLoader(dataset, collate_fn=data.default_collate, **options)
    assert_equal(raypipe.DataLoader(dataset, **options), by_index)
    if dataset.transform in (OLD, NEW, TENSOR, GRAY):
        assert_equal(raypipe.DataLoader(dataset, 4), data.DataLoader(dataset, 4))


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("kind", [datasets.CIFAR10, datasets.CIFAR100])
def test_cifar_is_equal(kind: type, name: str) -> None:
    assert_as_the_dataset(cifar(kind, transform=PIPELINES[name]))


@pytest.mark.parametrize("transform", [TENSOR, GRAY], ids=["one", "two"])
@pytest.mark.parametrize("kind", [datasets.MNIST, datasets.FashionMNIST])
def test_mnist_is_equal(kind: type, transform: Any) -> None:
    assert_as_the_dataset(mnist(kind, transform=transform))


@pytest.mark.parametrize("name", sorted({*PIPELINES} - {"one", "random"}))
def test_folders_are_equal(folder: Path, name: str) -> None:
    transform = PIPELINES[name]
    assert_as_the_dataset(datasets.ImageFolder(folder, transform))
    kinds = (".jpg", ".jpeg", ".png")
    loads = datasets.folder.default_loader
    dataset = datasets.DatasetFolder(f"{folder}/", loads, kinds, transform)
    assert_as_the_dataset(dataset)


def test_a_line_says_that_a_store_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    raypipe.DataLoader(cifar(transform=RANDOM), 14)
    assert capsys.readouterr().out.startswith("CIFAR10 is read as a store")


class Own(datasets.CIFAR10):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)


@pytest.mark.parametrize(
    "dataset",
    [
        cifar(Own),
        cifar(transform=None),
        cifar(transform=lambda image: TENSOR(image)),
        cifar(transform=transforms.Compose([])),
        cifar(transform=transforms.Compose([transforms.ToTensor(), torch.numel])),
        cifar(target_transform=str),
        mnist(target_transform=str),
        mnist(transform=RANDOM),
        cifar(targets=np.arange(14, dtype=np.int32) % 10),
        cifar(targets=[number % 2 == 0 for number in range(14)]),
        cifar(targets=[str(number) for number in range(14)]),
        [1, 2],
    ],
    ids=[
        "own",
        "none",
        "function",
        "PIL",
        "numbers",
        "target",
        "gray target",
        "gray",
        "int32",
        "bools",
        "texts",
        "list",
    ],
)
def test_what_might_differ_stays_a_dataset(dataset: Any) -> None:
    assert recognized(dataset) is None


def test_folders_with_code_or_lists_of_the_users_stay_datasets(folder: Path) -> None:
    own = datasets.ImageFolder(folder, OLD, loader=lambda path: TENSOR(path))
    fewer = datasets.ImageFolder(folder, OLD)
    fewer.samples = fewer.samples[::2]
    relabeled = datasets.ImageFolder(folder, OLD)
    relabeled.samples = [(path, 0) for path, _ in relabeled.samples]
    damaged = datasets.ImageFolder(folder, OLD)
    Path(damaged.samples[0][0]).write_bytes(b"no image")
    for dataset in (own, fewer, relabeled, damaged):
        assert recognized(dataset) is None
