"""Every guard in every loop: own loops, Lightning, Accelerate and Transformers, on one process."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerated import forget_accelerate
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import raypipe
from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.device.prefetcher import Batch
from raypipe.errors import ConfigError, CursorError
from raypipe.integrations.lightning import StreamDataModule
from raypipe.integrations.transformers import StreamTrainer
from raypipe.stores.memory import MemoryStore
from raypipe.streaming import handover, plain
from raypipe.streaming.loader import Loader
from raypipe.streaming.plain import counted_target
from raypipe.streaming.shares import Share
from raypipe.streaming.spec import StreamSpec

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
    per_step: int = 2, store: MemoryStore = TRAIN, size: int = 8, seed: int = 0
) -> StreamSpec:
    return raypipe.open_stream(
        store,
        VAL,
        plan=PlanConfig(
            epochs=EPOCHS,
            micro_batch_size=size // per_step,
            global_batch_size=size,
            seed=seed,
        ),
        transform=TransformConfig(train="small", val="resize", size=12),
        pool=PoolConfig(engine="inline"),
    )


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3 * 12 * 12, 5)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.layer(pixel_values.flatten(1))
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Run:
    """A training with a checkpoint after each whole step.

    Args:
        loader: the stream's.
        folder: of the checkpoints; it resumes from the newest.
        dies_at: step after which it ends.
        limit: steps of an epoch, after which a loop leaves it.
        looks: how often it looks at the first batch before.
        epochs: how many it wants.
        flags: other arguments of Lightning's Trainer.

    Attributes:
        trained: the places and samples of each batch.
        val_losses: one for each validation, as a usual module logs it.
        net: the model.
    """

    def __init__(self, loader: Loader, folder: Path, **options: Any) -> None:
        self.loader = loader
        self.folder = folder
        self.dies_at = options.get("dies_at", 1_000)
        self.limit = options.get("limit", STEPS)
        self.looks = options.get("looks", 0)
        self.epochs = options.get("epochs", EPOCHS)
        self.flags = options.get("flags", {})
        self.trained = list[tuple[int, ...]]()
        self.val_losses = list[float]()
        self.net = Net()

    def given(self, batch: Batch) -> dict[str, torch.Tensor]:
        at = batch.position
        if at.split == "train":
            self.trained.append((at.epoch, at.step, at.micro, *batch.index.tolist()))
        pixels = batch.image.float() / 255
        return {"pixel_values": pixels, "labels": counted_target(batch)}

    def look(self, train: Any) -> None:
        for _ in range(self.looks):
            next(iter(train))
        self.trained.clear()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class Died(Exception):  # noqa: N818
    """The end of a run before its end."""


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
            if loader.global_step == run.dies_at:
                return
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
            accelerator.save_state(str(run.folder / "state"))
            if loader.global_step == run.dies_at:
                return
            if loader.cursor.step == run.limit:
                break
        validate(run, val)


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
            trainer.save_checkpoint(run.folder / "last.ckpt")
            if trainer.global_step == run.dies_at:
                raise Died

    quietly: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    settings = StreamDataModule.settings(run.loader) | {"max_epochs": run.epochs}
    settings |= run.flags
    limit = run.limit * run.loader.accumulation_steps
    trainer = pl.Trainer(
        **settings,
        **quietly,
        accelerator="cpu",
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
            if state.global_step == run.dies_at:
                raise Died

    usual = 3  # epochs, unless they are set
    epochs = {} if run.epochs in (EPOCHS, usual) else {"num_train_epochs": run.epochs}
    trainer = StreamTrainer(
        run.net,
        arguments_of(run.folder, **epochs),
        loader=run.loader,
        format=run.given,
        callbacks=[Ends()],
    )
    run.look(trainer.get_train_dataloader())
    trainer.train(get_last_checkpoint(str(run.folder)))
    history = trainer.state.log_history
    run.val_losses += [entry["eval_loss"] for entry in history if "eval_loss" in entry]


Loop = Callable[[Run], None]
LOOPS = [own, lightning, accelerate, transformers]
each_loop = pytest.mark.parametrize("loop", LOOPS)


def done(loop: Loop, spec: StreamSpec, folder: Path, **options: Any) -> Run:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    folder.mkdir(exist_ok=True)
    run = Run(raypipe.loader(spec), folder, **options)
    try:
        loop(run)
    except Died:
        pass
    finally:
        run.loader.close()
    return run


def samples(spec: StreamSpec) -> list[tuple[int, ...]]:
    plan = spec.plan
    return [
        (at.epoch, at.step, at.micro, *plan.indices(at).tolist())
        for at in plan.micro_batches(plan.start())
        if at.split == "train"
    ]


@pytest.mark.parametrize(
    "changed",
    [{"seed": 9}, {"size": 16}, {"per_step": 4}, {"store": store_of(60, 1)}, {}],
    ids=["seed", "global batch", "micro-batch", "store", "nothing"],
)
@each_loop
def test_a_checkpoint_resumes_only_the_plan_that_made_it(
    loop: Loop, changed: dict[str, Any], tmp_path: Path
) -> None:
    begun = done(loop, spec_of(), tmp_path, dies_at=4)
    # a Trainer fetches a step ahead
    assert begun.trained[: 4 * 2] == samples(spec_of())[: 4 * 2]
    if changed:
        with pytest.raises(CursorError, match="made under plan"):
            done(loop, spec_of(**changed), tmp_path)
    else:
        assert done(loop, spec_of(), tmp_path).trained == samples(spec_of())[4 * 2 :]


@pytest.mark.parametrize("per_step", [1, 2, 4])
@each_loop
def test_the_validations_loss_is_that_of_a_data_loader(
    loop: Loop, per_step: int, tmp_path: Path
) -> None:
    spec = spec_of(per_step)
    run = done(loop, spec, tmp_path)
    pairs = []
    for batch in raypipe.loader(spec).validation():
        rows = batch.index >= 0
        pairs += zip(batch.image[rows].float() / 255, batch.target[rows], strict=True)
    total = 0.0
    with torch.no_grad():
        for pixels, labels in DataLoader(pairs, spec.plan.config.micro_batch_size):
            total += float(run.net(pixels, labels)["loss"]) * len(labels)
    assert len(run.val_losses) == EPOCHS and len(pairs) == NUM_VAL
    assert run.val_losses[-1] == pytest.approx(total / NUM_VAL, rel=1e-5)


@pytest.mark.parametrize("looks", [1, 3])
@pytest.mark.parametrize("per_step", [1, 2])
@each_loop
def test_a_look_at_the_first_batch_costs_no_sample(
    loop: Loop, per_step: int, looks: int, tmp_path: Path
) -> None:
    run = done(loop, spec_of(per_step), tmp_path, looks=looks)
    assert {tuple(row[3:]) for row in run.trained} == {
        tuple(row[3:]) for row in samples(spec_of(per_step))
    }
    assert run.trained == samples(spec_of(per_step))
    assert len(run.val_losses) == EPOCHS
    undisturbed = done(loop, spec_of(per_step), tmp_path / "other")
    assert torch.equal(run.net.layer.weight, undisturbed.net.layer.weight)


@each_loop
def test_an_epoch_that_ends_early_is_over_for_a_resume_too(
    loop: Loop, tmp_path: Path
) -> None:
    whole = done(loop, spec_of(), tmp_path / "whole", limit=4)
    expected = [row for row in samples(spec_of()) if row[1] < 4]
    assert whole.trained == expected and len(whole.val_losses) == EPOCHS
    # Lightning's count of steps leaves out those that were not done
    dies_at = 4 + 2 if loop is lightning else STEPS + 2
    done(loop, spec_of(), tmp_path / "again", limit=4, dies_at=dies_at)
    again = done(loop, spec_of(), tmp_path / "again", limit=4)
    assert again.trained == expected[-2 * 2 :]
    assert torch.equal(again.net.layer.weight, whole.net.layer.weight)


@each_loop
def test_more_epochs_than_the_plan_has_are_refused(loop: Loop, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"plan\.epochs"):
        done(loop, spec_of(), tmp_path, epochs=EPOCHS + 2)


@each_loop
def test_workers_that_do_not_divide_a_step_are_refused(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "share_of", lambda *_: Share(0, 3, 0, 3))
    with pytest.raises(
        ConfigError, match=r"3 workers cannot share the 4 micro-batches .* elastic"
    ):
        done(loop, spec_of(4), tmp_path)


WITHOUT_EFFECT = {
    own: [{"lease": "a"}, {"trace_s": 5.0}],
    lightning: [{"accumulate_grad_batches": 3}, {"max_epochs": 9}],
    accelerate: [{"gradient_accumulation_steps": 3}, {}],
    transformers: [
        {"train_dataset": [1]},
        {"data_collator": list},
        {"auto_find_batch_size": True},
        {"data_seed": 4},
        {"dataloader_num_workers": 2},
        {"dataloader_drop_last": True},
        {"accelerator_config": {"split_batches": True}},
    ],
}


@pytest.mark.parametrize(
    ("loop", "argument"),
    [(loop, each) for loop, given in WITHOUT_EFFECT.items() for each in given],
)
def test_an_argument_that_would_do_nothing_is_named(
    loop: Loop,
    argument: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = next(iter(argument), "gradient_accumulation_steps")
    loader = raypipe.loader(spec_of())
    if loop is accelerate:
        # it does not tell a loader its arguments before the loop
        forget_accelerate()
        plain._warn_once.cache_clear()
        Accelerator(cpu=True, **argument)
        for train in raypipe.plain_loaders(loader) * 2:
            next(iter(train))
        assert caplog.text.count(name) == 1
        return
    with pytest.raises(ConfigError, match=name if name[:4] != "acce" else "split_b"):
        if loop is own:
            raypipe.loader(spec_of(), **argument)
        elif loop is lightning:
            done(loop, spec_of(), tmp_path, flags=argument)
        else:
            of_trainer = {"train_dataset", "data_collator"}.intersection(argument)
            kept = {} if of_trainer else argument
            others = argument if of_trainer else {}
            arguments = arguments_of(tmp_path, **kept)
            StreamTrainer(Net(), arguments, loader=loader, **others)


def test_a_trainer_leaves_its_arguments_to_the_user(tmp_path: Path) -> None:
    arguments = arguments_of(tmp_path)
    before = dict(vars(arguments))
    for per_step in (1, 2):  # the second plan contradicts what the first one sets
        loader = raypipe.loader(spec_of(per_step))
        trainer = StreamTrainer(Net(), arguments, loader=loader)
        assert trainer.args.gradient_accumulation_steps == per_step
        assert vars(arguments) == before
    # arguments for datasets of the user's
    own_data = arguments_of(tmp_path, dataloader_drop_last=True)
    StreamTrainer(Net(), own_data, loader=loader, eval_dataset=[1], data_collator=list)


def test_a_trainers_checkpoint_without_a_place_is_resumed_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done(transformers, spec_of(), tmp_path, dies_at=4)
    state = tmp_path / "checkpoint-4" / "trainer_state.json"
    state.write_text(state.read_text().replace('"raypipe"', '"unknown"'))
    assert len(done(transformers, spec_of(), tmp_path).trained) == 2 * (12 - 4)
    assert "does not say for which plan" in caplog.text


@pytest.mark.parametrize("size", [1, 4, 5, 12, 100])
def test_a_training_may_be_taken_in_chunks(size: int) -> None:
    taken = []
    for epoch in raypipe.loader(spec_of()).epochs():
        while chunk := list(itertools.islice(epoch.train, size)):
            taken += chunk
    assert [batch.position.step for batch in taken] == [
        step for _ in range(EPOCHS) for step in range(STEPS) for _ in range(2)
    ]


def test_a_second_loop_over_a_training_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    epoch = next(raypipe.loader(spec_of()).epochs())
    assert len(list(epoch.train)) == 12 and list(epoch.train) == []
    assert "a training comes once" in caplog.text
