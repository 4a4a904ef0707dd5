"""Datasets of articles as they stand, and a training: article_datasets.py KIND FOLDER OUT WORKERS DIES_AT.

Its processes are those of torchrun, or it is alone. Each writes a hash of every sample into OUT, and goes on from
the state that the first one saves there after each step. DIES_AT > 0: it kills itself after so many steps.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import albumentations as A  # noqa: N812
import numpy as np
import torch
from albumentations.pytorch import ToTensorV2
from PIL import Image
from torch import distributed
from torch.utils.data import Dataset
from torchvision.io import read_image
from torchvision.transforms import v2

import raypipe

GLOBAL_BATCH = 8
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


def made(kind: str, folder: str) -> Any:
    if kind == "custom":
        crop = v2.RandomResizedCrop(16, antialias=True)
        return CustomDataset(folder, v2.Compose([crop, v2.RandomHorizontalFlip()]))
    paths = sorted(str(path) for path in Path(folder).iterdir())
    steps = [A.RandomCrop(16, 16), A.HorizontalFlip(p=0.5), A.Normalize(), ToTensorV2()]
    return OptimizedDataset(paths, list(range(len(paths))), A.Compose(steps))


def main() -> None:
    kind, folder, out, workers, dies_at = sys.argv[1:]
    torch.set_num_threads(1)
    rank = 0
    world_size = 1
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
        rank = distributed.get_rank()
        world_size = distributed.get_world_size()
    state = Path(out, "state")
    if not state.exists():
        # those that go on have the seed of the state
        torch.manual_seed(3)
    loader = raypipe.DataLoader(
        made(kind, folder),
        batch_size=GLOBAL_BATCH // world_size,
        shuffle=True,
        num_workers=int(workers),
        drop_last=True,
    )
    if state.exists():
        loader.load_state_dict(torch.load(state))
    if world_size > 1:
        distributed.barrier()  # nobody saves before all have looked
    num_steps = 0
    with Path(out, f"seen-{rank}").open("a") as file:
        for _ in range(loader.state_dict()["epoch"], EPOCHS):
            for images, labels in loader:
                for image, label in zip(images, labels, strict=True):
                    pixels = hashlib.sha256(image.numpy().tobytes()).hexdigest()
                    print(int(label), pixels, file=file, flush=True)
                if world_size > 1:
                    distributed.barrier()
                num_steps += 1
                if rank == 0:
                    torch.save(loader.state_dict(), state)
                if world_size > 1:
                    distributed.barrier()
                if num_steps == int(dies_at) > 0:
                    os.kill(os.getpid(), 9)


if __name__ == "__main__":
    main()
