"""Trainings in loops that others wrote, in this process, or in two ranks that are killed in their midst."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import raypipe  # isort: skip
import cv2
import lightning.pytorch as pl
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.nn.functional import cross_entropy
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from raypipe.device.prefetcher import Batch
from raypipe.integrations.lightning import StreamDataModule
from raypipe.integrations.transformers import StreamTrainer
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.inline import inline_batches
from raypipe.streaming.loader import Loader
from raypipe.streaming.plain import counted_target
from raypipe.streaming.rank_stream import HostSource
from raypipe.streaming.shares import Share

EPOCHS = 2
STEPS = 6  # of 8 samples, in an epoch
NUM_VAL = 22


def store_of(num: int, seed: int) -> MemoryStore:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (num, 12, 12, 3), np.uint8)
    encoded = [cv2.imencode(".png", image)[1].tobytes() for image in images]
    return MemoryStore(encoded, rng.integers(0, 5, num))


TRAIN = store_of(50, 1)
VAL = store_of(NUM_VAL, 2)


def spec_of(
    per_step: int = 2,
    store: MemoryStore = TRAIN,
    size: int = 8,
    val: MemoryStore | None = VAL,
    **plan: Any,
) -> raypipe.StreamSpec:
    return raypipe.open_stream(
        store,
        val,
        plan=raypipe.PlanConfig(
            epochs=EPOCHS,
            micro_batch_size=size // per_step,
            global_batch_size=size,
            **plan,
        ),
        transform=raypipe.TransformConfig(train="small", val="resize", size=12),
        pool=raypipe.PoolConfig(engine="inline"),
    )


def rank_of(spec: raypipe.StreamSpec, rank: int, world_size: int) -> Loader:
    """A rank's loader, in this process."""

    share = Share(rank, world_size, rank, world_size)
    source = HostSource(lambda place: inline_batches(spec, place, rank, world_size))
    return Loader(spec, source, share, cursor=spec.plan.start())


def forget_accelerate() -> None:
    """Let the next `Accelerator` of this process be as its first."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3 * 12 * 12, 5)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.layer(pixel_values.flatten(1))
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def pixels_and_labels(batch: Batch) -> dict[str, torch.Tensor]:
    """A batch as the arguments of `Net`."""
    pixels = batch.image.float() / 255
    return {"pixel_values": pixels, "labels": counted_target(batch)}


class Died(Exception):  # noqa: N818
    """The end of a run before its end."""


class Run:
    """A training with a checkpoint after each whole step.

    Args:
        loader: the stream's.
        folder: of the checkpoints; it resumes from the newest.
        every: steps between two checkpoints.
        dies_at: step after which it ends.
        limit: steps of an epoch, after which a loop leaves it.
        looks: how often it looks at the first batch before.
        epochs: how many it wants.

    Attributes:
        trained: the places and samples of each batch.
        val_losses: one for each validation, as a usual module logs it.
        net: the model.
    """

    def __init__(self, loader: Loader, folder: Path, **options: Any) -> None:
        self.loader = loader
        self.folder = folder
        self.every = options.get("every", 1)
        self.dies_at = options.get("dies_at", 1_000)
        self.limit = options.get("limit", STEPS)
        self.looks = options.get("looks", 0)
        self.epochs = options.get("epochs", EPOCHS)
        self.trained = list[tuple[int, ...]]()
        self.val_losses = list[float]()
        self.net = Net()

    def given(self, batch: Batch) -> dict[str, torch.Tensor]:
        at = batch.position
        if at.split == "train":
            self.trained.append((at.epoch, at.step, at.micro, *batch.index.tolist()))
        return pixels_and_labels(batch)

    def look(self, train: Any) -> None:
        for _ in range(self.looks):
            next(iter(train))
        self.trained.clear()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)

    def end(self, step: int) -> None:
        """End where it is to die."""
        if step == self.dies_at:
            self.die()

    def die(self) -> None:
        raise Died


def own(run: Run) -> None:
    loader = run.loader
    train, val = raypipe.plain_loaders(loader, run.given)
    optimizer = run.optimizer
    file = run.folder / "state.pt"
    if file.exists():
        state = torch.load(file, weights_only=True)
        loader.load_state_dict(state["place"])
        run.net.load_state_dict(state["net"])
    run.look(train)
    for _ in range(loader.cursor.epoch, run.epochs):
        for number, batch in enumerate(train, 1):
            (run.net(**batch)["loss"] / loader.accumulation_steps).backward()
            if number % loader.accumulation_steps:
                continue
            optimizer.step()
            optimizer.zero_grad()
            state = {"place": loader.state_dict(), "net": run.net.state_dict()}
            torch.save(state, file)
            run.end(loader.global_step)
            if loader.cursor.step == run.limit:
                break
        validate(run, val)


def validate(run: Run, val: Any) -> None:
    """As a loop with a mean of torchmetrics' does it: each batch's mean, by its number of rows."""
    total = 0.0
    with torch.no_grad():
        for batch in val:
            total += float(run.net(**batch)["loss"]) * len(batch["labels"])
    run.val_losses.append(total / NUM_VAL)


def accelerate(run: Run) -> None:
    forget_accelerate()
    loader = run.loader
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=loader.accumulation_steps
    )
    model, optimizer, train, val = accelerator.prepare(
        run.net, run.optimizer, *raypipe.plain_loaders(loader, run.given)
    )
    accelerator.register_for_checkpointing(train)
    if (run.folder / "state").exists():
        accelerator.load_state(str(run.folder / "state"))
    run.look(train)
    for _ in range(loader.cursor.epoch, run.epochs):
        for batch in train:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            if loader.global_step % run.every == 0:
                accelerator.save_state(str(run.folder / "state"))
            run.end(loader.global_step)
            if loader.cursor.step == run.limit:
                break
        validate(run, val)


QUIETLY: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}
"""Arguments of Lightning's Trainer."""


def lightning(run: Run) -> None:
    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = run.net

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.net(**batch)["loss"]

        def validation_step(self, batch: Any) -> None:
            self.log("val_loss", self.net(**batch)["loss"])

        def on_validation_epoch_end(self) -> None:
            metrics: Any = self.trainer.callback_metrics
            run.val_losses.append(float(metrics["val_loss"]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return run.optimizer

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step % run.every == 0:
                trainer.save_checkpoint(run.folder / "last.ckpt")
            run.end(trainer.global_step)

    settings = StreamDataModule.settings(run.loader) | {"max_epochs": run.epochs}
    limit = run.limit * run.loader.accumulation_steps
    trainer = pl.Trainer(
        **settings,
        **QUIETLY,
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy="ddp" if "WORLD_SIZE" in os.environ else "auto",
        limit_train_batches=limit,
        callbacks=[Saves()],
    )
    data = StreamDataModule(run.loader, run.given)
    run.look(data.train_dataloader())
    saved = run.folder / "last.ckpt"
    path = saved if saved.exists() else None
    trainer.fit(Module(), datamodule=data, ckpt_path=path)


def arguments_of(folder: Path, **more: Any) -> TrainingArguments:
    usual: dict[str, Any] = {
        "eval_strategy": "epoch",
        "save_strategy": "steps",
        "save_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "learning_rate": 0.1,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
    }
    return TrainingArguments(output_dir=str(folder), use_cpu=True, **usual | more)


def transformers(run: Run) -> None:
    class Ends(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_epoch_stop = state.global_step % STEPS == run.limit % STEPS

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            run.end(state.global_step)

    usual = 3  # epochs, unless they are set
    epochs = {} if run.epochs in (EPOCHS, usual) else {"num_train_epochs": run.epochs}
    trainer = StreamTrainer(
        run.net,
        arguments_of(run.folder, save_steps=run.every, **epochs),
        loader=run.loader,
        format=run.given,
        callbacks=[Ends()],
    )
    run.look(trainer.get_train_dataloader())
    trainer.train(get_last_checkpoint(str(run.folder)))
    history = trainer.state.log_history
    run.val_losses += [entry["eval_loss"] for entry in history if "eval_loss" in entry]


LOOPS = [own, lightning, accelerate, transformers]


class RankRun(Run):
    """A training of one rank, which writes down what it is given, and is killed where it is to die."""

    def given(self, batch: Batch) -> dict[str, torch.Tensor]:
        at = batch.position
        row = [at.split, at.epoch, at.step, at.micro, *batch.index.tolist()]
        with (self.folder / f"seen-{self.loader.rank}").open("a") as file:
            file.write(json.dumps(row) + "\n")
        return super().given(batch)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def run(
    library: str, rank: int, world_size: int, port: int, folder: str, dies_at: int
) -> None:
    """Train in a process of its own, which kills itself once `dies_at` steps are done; 0 = never."""
    ranks = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_PORT": port,
    }
    os.environ |= {name: str(value) for name, value in ranks.items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    loader = raypipe.loader(spec_of(4))
    trained = RankRun(loader, Path(folder), every=2, dies_at=dies_at or 1_000)
    globals()[library](trained)
    if rank == 0:
        result = {"val_losses": trained.val_losses, "net": trained.net.state_dict()}
        torch.save(result, Path(folder, "result.pt"))
