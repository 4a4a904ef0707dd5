"""Pipelines that end with a normalization, in other libraries' loops: they get what the transforms' library makes.

The end is done on the loader's device; actors send uint8.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import albumentations as A  # noqa: N812
import cv2
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerated import forget_accelerate
from albumentations.pytorch import ToTensorV2
from torchvision.transforms import v2

import raypipe
from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.inline import inline_batches
from raypipe.streaming.loader import Loader
from raypipe.streaming.spec import StreamSpec

NUMBERS: Any = {"mean": (0.49, 0.48, 0.45), "std": (0.25, 0.24, 0.26)}
Images = dict[str, list[torch.Tensor]]
"""Images by split, in the order in which a model gets them."""


def picture(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 24, 3), np.uint8)
    return cv2.imencode(".png", pixels)[1].tobytes()


STORE = MemoryStore([picture(seed) for seed in range(8)], [n % 3 for n in range(8)])


class Library:
    """A library of transforms: pipelines of it with an end or without, and its end on the CPU."""

    def __init__(self, name: str) -> None:
        self._is_albumentations = name == "albumentations"
        if self._is_albumentations:
            self._steps: dict[str, list[Any]] = {
                "train": [A.RandomCrop(16, 16), A.HorizontalFlip(p=0.5)],
                "val": [A.CenterCrop(16, 16)],
            }
            self._last: list[Any] = [A.Normalize(**NUMBERS), ToTensorV2()]
        else:
            self._steps = {
                "train": [v2.RandomCrop(16), v2.RandomHorizontalFlip(0.5)],
                "val": [v2.CenterCrop(16)],
            }
            self._last = [
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(**NUMBERS),
            ]

    def spec(self, ends: bool) -> StreamSpec:
        last = self._last if ends else []
        transforms = {}
        for split, steps in self._steps.items():
            if self._is_albumentations:
                transforms[f"{split}_transform"] = A.Compose([*steps, *last])
            else:
                transforms[f"{split}_transform"] = v2.Compose(
                    [v2.ToImage(), *steps, *last]
                )
        return raypipe.open_stream(
            STORE,
            STORE,
            plan=PlanConfig(epochs=1, micro_batch_size=2, global_batch_size=4),
            transform=TransformConfig(size=16),
            pool=PoolConfig(engine="inline"),
            **transforms,
        )

    def own(self, pixels: torch.Tensor) -> torch.Tensor:
        """The pipeline's end of uint8 pixels (3, H, W), by the library, on the CPU."""
        if self._is_albumentations:
            return A.Compose(self._last)(image=pixels.permute(1, 2, 0).numpy())["image"]
        return v2.Compose(self._last)(pixels)

    def expected(self) -> Images:
        images: Images = {}
        epoch = next(raypipe.loader(self.spec(ends=False)).epochs())
        for split, batches in (("train", epoch.train), ("val", epoch.val)):
            rows = [row.clone() for batch in batches for row in batch.image]
            assert rows[0].dtype == torch.uint8
            images[split] = [self.own(row) for row in rows]
        return images


class Net(torch.nn.Module):
    """A model that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3 * 16 * 16, 3)
        self.images: Images = {"train": [], "val": []}

    def forward(
        self, pixel_values: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        split = "train" if self.training else "val"
        self.images[split] += list(pixel_values.clone())
        logits = self.layer(pixel_values.flatten(1))
        loss = torch.nn.functional.cross_entropy(logits, labels.clamp(min=0))
        return {"loss": loss, "logits": logits}


def by_lightning(loader: Loader, folder: Path) -> Images:
    import lightning.pytorch as pl

    from raypipe.integrations.lightning import StreamDataModule

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.net(batch["image"], batch["target"])["loss"]

        def validation_step(self, batch: Any) -> None:
            self.net(batch["image"], batch["target"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quietly: dict[str, Any] = dict.fromkeys(
        (
            "logger",
            "enable_progress_bar",
            "enable_model_summary",
            "enable_checkpointing",
        ),
        False,
    )
    module = Module()
    trainer = pl.Trainer(
        **StreamDataModule.settings(loader), **quietly, accelerator="cpu"
    )
    trainer.fit(module, datamodule=StreamDataModule(loader))
    return module.net.images


def by_accelerate(loader: Loader, folder: Path) -> Images:
    forget_accelerate()
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=loader.accumulation_steps
    )
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer, train, val = accelerator.prepare(
        net, optimizer, *raypipe.plain_loaders(loader)
    )
    for batch in train:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch["image"], batch["target"])["loss"])
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    for batch in val:
        model(batch["image"], batch["target"])
    return net.images


def by_transformers(loader: Loader, folder: Path) -> Images:
    from transformers import TrainingArguments

    from raypipe.integrations.transformers import StreamTrainer

    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    net = Net()
    StreamTrainer(net, arguments, loader=loader).train()
    return net.images


@pytest.mark.parametrize("name", ["albumentations", "torchvision"])
@pytest.mark.parametrize("loop", [by_lightning, by_accelerate, by_transformers])
def test_a_loop_gets_what_the_library_makes_of_the_same_pixels(
    loop: Callable[[Loader, Path], Images],
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    library = Library(name)
    spec = library.spec(ends=True)
    images = loop(raypipe.loader(spec), tmp_path)
    assert "is done on the device; uint8 travels" in capsys.readouterr().out
    sent = next(iter(inline_batches(spec, spec.plan.start())))
    assert sent["image"].dtype == np.uint8
    expected = library.expected()
    for split in ("train", "val"):
        assert len(images[split]) == len(expected[split]) == 8
        assert all(image.dtype == torch.float32 for image in images[split])
        torch.testing.assert_close(
            torch.stack(images[split]),
            torch.stack(expected[split]),
            atol=2e-6,
            rtol=1e-6,
        )
