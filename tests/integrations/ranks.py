"""One rank of a training in a loop that others wrote. It records what it is given, and may be killed in its midst.

A checkpoint every second step; it goes on from the newest one, and FOLDER/resumed then has its step.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import raypipe  # isort: skip
import torch
from torch.nn.functional import cross_entropy

from raypipe.device.prefetcher import Batch
from raypipe.plan.places import MicroBatchId
from raypipe.streaming.inline import inline_batches
from raypipe.streaming.loader import Loader
from raypipe.transform.fields import MicroBatch

EVERY = 2


def spec_of(
    train: str | Path, val: str | Path | None = "", per_step: int = 4
) -> raypipe.StreamSpec:
    """Two epochs of steps of 16 samples, in so many micro-batches.

    Args:
        val: "" = `train`; None = no validation.
    """
    return raypipe.open_stream(
        train,
        train if val == "" else val,
        plan=raypipe.PlanConfig(
            epochs=2, micro_batch_size=16 // per_step, global_batch_size=16
        ),
        transform=raypipe.TransformConfig(train="small", val="resize", size=12),
        pool=raypipe.PoolConfig(engine="inline"),
    )


def rank_of(spec: raypipe.StreamSpec, rank: int, world_size: int) -> Loader:
    """A rank's loader, in this process."""

    def opened(place: MicroBatchId) -> Iterator[MicroBatch]:
        return inline_batches(spec, place, rank, world_size)

    return Loader(spec, opened, rank, world_size, cursor=spec.plan.start())


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3 * 12 * 12, 5)

    def forward(
        self, pixel_values: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        logits = self.layer(pixel_values.flatten(1))
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Rank:
    def __init__(self, rank: int, world_size: int, folder: Path, dies_at: int) -> None:
        self.rank, self.world_size, self.folder, self.dies_at = (
            rank,
            world_size,
            folder,
            dies_at,
        )

    def given(self, batch: Batch) -> dict[str, Any]:
        """What the loops get of a batch, which is written down."""
        at = batch.position
        with (self.folder / f"seen-{self.rank}").open("a") as file:
            file.write(
                json.dumps(
                    [at.split, at.epoch, at.step, at.micro, *batch.index.tolist()]
                )
                + "\n"
            )
        counts = batch.weight > 0
        return {
            "pixel_values": batch.image.float() / 255,
            "labels": batch.target.where(counts, -100),
        }

    def resumed(self, step: int) -> None:
        if self.rank == 0:
            (self.folder / "resumed").write_text(str(step))

    def done(self, step: int) -> None:
        if self.dies_at and step >= self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def lightning(self, loader: Loader) -> None:
        import lightning.pytorch as pl

        from raypipe.integrations.lightning import StreamDataModule

        rank = self

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = Net()

            def training_step(self, batch: Any) -> torch.Tensor:
                return self.net(**batch)["loss"]

            def validation_step(self, batch: Any) -> None:
                self.net(**batch)

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        class Watch(pl.Callback):
            def on_train_start(self, trainer: Any, *_: Any) -> None:
                rank.resumed(trainer.global_step)

            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                rank.done(trainer.global_step)

        saves = pl.callbacks.ModelCheckpoint(
            str(self.folder), "{step}", every_n_train_steps=EVERY, save_top_k=-1
        )
        trainer = pl.Trainer(
            **StreamDataModule.settings(loader),
            accelerator="cpu",
            devices=self.world_size,
            strategy="ddp",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Watch(), saves],
        )
        saved = self.folder.glob("step=*.ckpt")
        newest = max(
            saved, default=None, key=lambda path: int(path.stem.partition("=")[2])
        )
        trainer.fit(
            Module(), datamodule=StreamDataModule(loader, self.given), ckpt_path=newest
        )

    def accelerate(self, loader: Loader) -> None:
        from accelerate import Accelerator

        accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=loader.accumulation_steps
        )
        loaders, net = raypipe.plain_loaders(loader, self.given), Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model, optimizer, train, val = accelerator.prepare(net, optimizer, *loaders)
        assert (train, val) == loaders  # it does not shard them again
        accelerator.register_for_checkpointing(train)
        saved = self.folder.glob("step-*")
        if newest := max(
            saved, default=None, key=lambda path: int(path.name.partition("-")[2])
        ):
            accelerator.load_state(str(newest))
        self.resumed(loader.global_step)
        for _ in range(loader.cursor.epoch, loader.plan.config.epochs):
            for batch in train:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch)["loss"])
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    if loader.global_step % EVERY == 0:
                        accelerator.save_state(
                            str(self.folder / f"step-{loader.global_step}")
                        )
                    self.done(loader.global_step)
            with torch.no_grad():
                for batch in val:
                    model(**batch)

    def transformers(self, loader: Loader) -> None:
        from transformers import TrainerCallback, TrainingArguments
        from transformers.trainer_utils import get_last_checkpoint

        from raypipe.integrations.transformers import StreamTrainer

        rank = self

        class Watch(TrainerCallback):
            def on_train_begin(
                self, args: Any, state: Any, control: Any, **_: Any
            ) -> None:
                rank.resumed(state.global_step)

            def on_step_begin(
                self, args: Any, state: Any, control: Any, **_: Any
            ) -> None:
                rank.done(state.global_step)

        arguments = TrainingArguments(
            output_dir=str(self.folder),
            use_cpu=True,
            eval_strategy="epoch",
            save_strategy="steps",
            save_steps=EVERY,
            report_to=[],
            disable_tqdm=True,
            ddp_backend="gloo",
        )
        trainer = StreamTrainer(
            Net(), arguments, loader=loader, format=self.given, callbacks=[Watch()]
        )
        trainer.train(get_last_checkpoint(str(self.folder)))
        losses = [
            entry["eval_loss"]
            for entry in trainer.state.log_history
            if "eval_loss" in entry
        ]
        (self.folder / "eval_loss").write_text(str(losses[-1]))
        torch.save(trainer.model.state_dict(), self.folder / "trained.pt")


def run(
    library: str,
    rank: int,
    world_size: int,
    port: int,
    store: str,
    folder: str,
    dies_at: int,
) -> None:
    """In a process of its own, which kills itself once `dies_at` steps are done; 0 = never."""
    ranks = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
    }
    os.environ |= {
        name: str(value) for name, value in {**ranks, "MASTER_PORT": port}.items()
    }
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    loop = getattr(Rank(rank, world_size, Path(folder), dies_at), library)
    loop(raypipe.loader(spec_of(store)))
