"""Datasets of articles, as they stand there, through `raypipe.DataLoader`: one digest for all ways to run them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import albumentations as A  # noqa: N812
import numpy as np
import pytest
import torch
from albumentations.pytorch import ToTensorV2
from data_ranks import Ranks
from data_ranks import ranks as ranks
from pictures import samples
from PIL import Image
from torch.utils.data import Dataset
from torchvision.io import read_image
from torchvision.transforms import v2

import raypipe

NUM = 24
EPOCHS = 2


class CustomDataset(Dataset):
    def __init__(self, img_dir, transform=None, target_transform=None):  # type: ignore[no-untyped-def]
        self.img_dir = img_dir
        self.img_names = sorted(os.listdir(img_dir))  # noqa: PTH208
        self.transform = transform
        self.target_transform = target_transform

    def __len__(self):  # type: ignore[no-untyped-def]
        return len(self.img_names)

    def __getitem__(self, idx):  # type: ignore[no-untyped-def]
        img_path = os.path.join(self.img_dir, self.img_names[idx])  # noqa: PTH118
        image = read_image(img_path)
        label = int(self.img_names[idx].split("_")[1].split(".")[0])
        if self.transform:
            image = self.transform(image)
        if self.target_transform:
            label = self.target_transform(label)
        return image, label


class OptimizedDataset(Dataset):
    def __init__(self, image_paths, labels, transform=None):  # type: ignore[no-untyped-def]
        self.image_paths = image_paths
        self.labels = labels
        self.transform = transform

    def __len__(self):  # type: ignore[no-untyped-def]
        return len(self.image_paths)

    def __getitem__(self, idx):  # type: ignore[no-untyped-def]
        image = Image.open(self.image_paths[idx]).convert("RGB")
        image = np.array(image)
        if self.transform:
            augmented = self.transform(image=image)
            image = augmented["image"]
        return image, self.labels[idx]


def custom(folder: Path) -> Any:
    crop = v2.RandomResizedCrop(16, antialias=True)
    return CustomDataset(str(folder), v2.Compose([crop, v2.RandomHorizontalFlip()]))


def optimized(folder: Path) -> Any:
    paths = sorted(str(path) for path in folder.iterdir())
    steps = [A.RandomCrop(16, 16), A.HorizontalFlip(p=0.5), A.Normalize(), ToTensorV2()]
    return OptimizedDataset(paths, list(range(NUM)), A.Compose(steps))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, sample in enumerate(samples(NUM)):
        path = tmp_path / f"img{number:03d}_{number % 5}.jpg"
        path.write_bytes(sample["image"])  # type: ignore[arg-type]
    return tmp_path


def digest(batches: list[Any]) -> str:
    content = hashlib.blake2b()
    for images, labels in batches:
        content.update(images.numpy().tobytes() + labels.numpy().tobytes())
    return content.hexdigest()


@pytest.mark.parametrize("made", [custom, optimized])
def test_an_articles_dataset_has_one_digest(
    made: Callable[[Path], Any], folder: Path, ranks: Ranks
) -> None:
    def loader(batch_size: int, rank: int = 0, size: int = 1) -> raypipe.DataLoader:
        ranks(rank, size)
        return raypipe.DataLoader(made(folder), batch_size, True, drop_last=True)

    one = loader(8)
    whole = [batch for _ in range(EPOCHS) for batch in one]
    assert len(whole) == 6 and not torch.equal(whole[0][0], whole[3][0])
    halves = []
    for rank in range(2):
        # it is killed after two steps, and its successors go on at the place that it has saved
        killed = loader(4, rank, 2)
        steps = iter(killed)
        taken = [next(steps), next(steps)]
        state = killed.state_dict()
        resumed = loader(4, rank, 2)
        resumed.load_state_dict(state)
        halves.append(taken + [batch for _ in range(EPOCHS) for batch in resumed])
    together = [
        [torch.cat(parts) for parts in zip(*pair, strict=True)]
        for pair in zip(*halves, strict=True)
    ]
    assert digest(together) == digest(whole)
    alone = loader(8)
    alone.load_state_dict(state)
    rest = [batch for _ in range(EPOCHS) for batch in alone]
    assert digest(whole[:2] + rest) == digest(whole)
