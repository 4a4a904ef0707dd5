"""A small model that notes what reaches it: "watched_net:Net" for runs in this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from small_runs import small_run

from raypipe.config import RunConfig

seen: list[tuple[torch.dtype, bool, dict[str, bool]]] = []
"""For each call the dtype of its features, whether cudnn chooses, and which tensors are channels_last."""


class Net(torch.nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3)
        self.last = torch.nn.Linear(8, num_classes)

    def forward(self, image: torch.Tensor) -> Any:
        features = self.conv(image)
        tensors = {"image": image, "features": features, "weight": self.conv.weight}
        layouts = {
            name: tensor.is_contiguous(memory_format=torch.channels_last)
            for name, tensor in tensors.items()
        }
        seen.append((features.dtype, torch.backends.cudnn.benchmark, layouts))
        return self.last(features.mean((2, 3)))


def run_of(folder: Path, store: Path, **train: Any) -> RunConfig:
    """A run of this model; nothing is seen yet."""
    seen.clear()
    run = small_run(folder, store, store, 1, 2, **train)
    return replace(run, train=replace(run.train, model="watched_net:Net"))
