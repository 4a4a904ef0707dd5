"""Lightning's flags, hooks and checkpoints, one by one, in this process: what a run trains, and what a resume."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch.nn.functional import cross_entropy

from raypipe.device.prefetcher import Batch
from raypipe.errors import ConfigError
from raypipe.integrations.lightning import StreamDataModule
from raypipe.plan.places import MicroBatchId
from raypipe.streaming.handover import loader
from raypipe.streaming.loader import Loader
from raypipe.streaming.spec import StreamSpec

sys.path.append(str(Path(__file__).parent))
from ranks import QUIETLY, spec_of

Flags = dict[str, Any]


class Place(NamedTuple):
    """That of a micro-batch, in a form that Lightning takes apart and puts together again."""

    split: str
    epoch: int
    step: int
    micro: int


class DiedError(Exception):
    pass


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3 * 12 * 12, 5)
        self.seen = list[Place]()

    def training_step(self, batch: Any) -> torch.Tensor:
        self.seen.append(batch["at"])
        return cross_entropy(self.layer(batch["image"].flatten(1)), batch["target"])

    def validation_step(self, batch: Any) -> None:
        self.seen.append(batch["at"])

    test_step = validation_step

    def predict_step(self, batch: Any) -> torch.Tensor:
        self.validation_step(batch)
        return batch["target"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def num(self, split: str) -> int:
        return sum(at.split == split for at in self.seen)


def place_of(at: MicroBatchId) -> Place:
    return Place(at.split, at.epoch, at.step, at.micro)


def formed(batch: Batch) -> Any:
    return {
        "image": batch.image.float() / 255,
        "target": batch.target.clamp(min=0),
        "at": place_of(batch.position),
    }


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    yield
    logging.getLogger("lightning.pytorch").setLevel(logging.NOTSET)


def trainer_of(stream: Loader, flags: Flags) -> pl.Trainer:
    settings = StreamDataModule.settings(stream) | QUIETLY | {"accelerator": "cpu"}
    return pl.Trainer(**settings | flags)


def fit(stream: Loader, path: Path | str | None = None, **flags: Any) -> Module:
    module = Module()
    try:
        trainer_of(stream, flags).fit(
            module, datamodule=StreamDataModule(stream, formed), ckpt_path=path
        )
    except DiedError:
        pass
    finally:
        stream.close()
    return module


def equal(one: Module, other: Module) -> bool:
    return torch.equal(one.layer.weight, other.layer.weight)


def num_filled(spec: StreamSpec) -> int:
    """The micro-batches of a validation that have samples."""
    return -(-spec.plan.num_val // spec.plan.config.micro_batch_size)


class At(pl.Callback):
    """At a hook's call of a number: a checkpoint, if a path is given, and the end."""

    def __init__(self, hook: str, number: int, path: Path | None = None) -> None:
        self.num_calls = 0

        def call(trainer: pl.Trainer, *_: Any, **__: Any) -> None:
            self.num_calls += 1
            if self.num_calls == number:
                if path:
                    trainer.save_checkpoint(path)
                raise DiedError

        setattr(self, hook, call)


HOOKS = [
    ("on_train_epoch_start", 2),
    ("on_train_batch_start", 6),  # in the midst of a step
    (
        "on_train_batch_start",
        24,
    ),  # before an epoch's last batch, which Lightning has already counted as its last
    ("on_before_optimizer_step", 6),
    ("on_before_zero_grad", 3),
    ("on_train_batch_end", 6),
    ("on_train_batch_end", 8),
    ("on_train_batch_end", 24),
    ("on_train_batch_end", 39),
    ("on_validation_start", 1),
    ("on_validation_batch_end", 3),
    ("on_validation_end", 1),
    ("on_train_epoch_end", 1),
]


@pytest.mark.parametrize(("hook", "number"), HOOKS)
def test_a_checkpoint_at_any_hook_resumes_with_equal_weights(
    hook: str, number: int, tmp_path: Path
) -> None:
    spec, flags = spec_of(4), {"limit_val_batches": 4}
    whole = fit(loader(spec), **flags)
    assert whole.num("train") == 48 and whole.num("val") == 8
    path = tmp_path / "saved.ckpt"
    fit(loader(spec), callbacks=[At(hook, number, path)], **flags)
    resumed = fit(loader(spec), path, **flags)
    assert equal(resumed, whole)
    trained = [at for at in resumed.seen if at.split == "train"]
    assert (
        trained == [at for at in whole.seen if at.split == "train"][48 - len(trained) :]
    )
    assert len(trained) % 4 == 0


@pytest.mark.parametrize(
    ("flags", "per_step", "num_steps", "num_val"),
    [
        ({}, 1, 12, 2.0),
        ({"limit_train_batches": 2}, 1, 4, 2.0),
        ({"limit_train_batches": 2}, 4, 4, 2.0),
        ({"max_steps": 3}, 4, 3, 0.0),
        ({"max_steps": 8, "max_epochs": -1}, 1, 8, 1.0),
        ({"max_epochs": 1}, 4, 6, 1.0),
        ({"val_check_interval": 0.5}, 1, 12, 4.0),
        ({"val_check_interval": 3}, 4, 12, 4.0),
        ({"val_check_interval": 4, "check_val_every_n_epoch": None}, 4, 12, 3.0),
        ({"check_val_every_n_epoch": 2}, 1, 12, 1.0),
        ({"num_sanity_val_steps": -1}, 4, 12, 3.0),
        ({"reload_dataloaders_every_n_epochs": 1}, 1, 12, 2.0),
        ({"overfit_batches": 2}, 4, 4, 0.0),
    ],
)
def test_a_flag_of_lightning_keeps_its_meaning(
    flags: Flags, per_step: int, num_steps: int, num_val: float
) -> None:
    """Flags that count batches are given in steps here; `num_val` is in whole validations."""
    spec, given = spec_of(per_step), dict(flags)
    for name in ("limit_train_batches", "val_check_interval", "overfit_batches"):
        if isinstance(given.get(name), int):
            given[name] *= per_step
    found = fit(loader(spec), **given)
    assert found.num("train") == num_steps * per_step
    whole = num_filled(spec)
    of_val = (
        2 * min(whole, 2 * per_step) if "overfit_batches" in flags else num_val * whole
    )
    assert found.num("val") == of_val
    trained = [at for at in found.seen if at.split == "train"]
    if "overfit_batches" in flags:
        assert trained[: 2 * per_step] == trained[2 * per_step :]
    elif num_steps == 12:
        assert equal(found, fit(loader(spec), limit_val_batches=0))


SKIPS = [["1..2", 9], ["5..8"], [12], ["7..11"]]
"""Of twelve steps in two epochs."""


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize(("hook", "number"), [HOOKS[5], HOOKS[9]])
def test_skipped_steps_never_come_and_a_resume_goes_around_them(
    skip: list[int | str],
    hook: str,
    number: int,
    tmp_path: Path,
) -> None:
    spec = spec_of(4, skip=skip)
    expected = [
        place_of(at)
        for at in spec.plan.micro_batches(spec.plan.start())
        if (spec.plan.indices(at) >= 0).any()
    ]
    module = fit(loader(spec))
    assert module.seen == expected
    path = tmp_path / "last.ckpt"
    before = fit(loader(spec), callbacks=[At(hook, number, path)])
    again = fit(loader(spec), path)
    assert equal(again, module)
    assert before.seen[0] == expected[0] and again.seen[-1] == expected[-1]
    with pytest.raises(ConfigError, match="reload_dataloaders_every_n_epochs"):
        fit(loader(spec), reload_dataloaders_every_n_epochs=0)


@pytest.mark.parametrize(("fast", "num"), [(True, 1), (3, 3)])
def test_a_fast_dev_run_makes_the_batches_that_it_uses(fast: Any, num: int) -> None:
    found = fit(loader(spec_of(4)), fast_dev_run=fast)
    assert (found.num("train"), found.num("val")) == (num, num)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"max_epochs": 3},
            r"max_epochs must be at most 2, got 3: the plan has no more \(plan\.epochs\)",
        ),
        (
            {"max_epochs": -1},
            "max_epochs must be set, to at most 2, or max_steps to at most 12",
        ),
        (
            {"max_epochs": -1, "max_steps": 13},
            "max_epochs must be set, to at most 2, or max_steps to at most 12",
        ),
        ({"accumulate_grad_batches": 1}, "accumulate_grad_batches must be 4, got 1"),
    ],
)
def test_a_flag_that_contradicts_the_plan_is_refused_by_name(
    flags: Flags, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(loader(spec_of(4)), **flags)


def test_lightning_evaluates_before_and_after_a_fit() -> None:
    stream, module = loader(spec_of(4)), Module()
    num = num_filled(spec_of(4))
    data, trainer = (
        StreamDataModule(stream, formed),
        trainer_of(stream, {"limit_train_batches": 4}),
    )
    trainer.validate(module, datamodule=data, verbose=False)
    trainer.fit(module, datamodule=data)
    assert module.num("val") == 3 * num
    rows = module.seen[-num:]
    evaluations: list[Callable[[], Any]] = [
        lambda: trainer.validate(module, datamodule=data, verbose=False),
        lambda: trainer.test(module, dataloaders=data.val_dataloader(), verbose=False),
        lambda: trainer.predict(module, dataloaders=data.val_dataloader()),
    ]
    for evaluate in evaluations:
        module.seen.clear()
        evaluate()
        assert [(at.step, at.micro) for at in module.seen] == [
            (at.step, at.micro) for at in rows
        ]


class ByHand(Module):
    """The same training by Lightning's manual optimization, as one with several optimizers does it."""

    def __init__(self, per_step: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.per_step = per_step

    def training_step(self, batch: Any, number: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.manual_backward(super().training_step(batch) / self.per_step)
        if (number + 1) % self.per_step == 0:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("per_step", [1, 4])
def test_a_module_may_step_by_hand_and_resume(per_step: int, tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"

    def fitted(*callbacks: Any, resume: Path | None = None) -> Module:
        stream, module = loader(spec_of(per_step)), ByHand(per_step)
        flags = {"accumulate_grad_batches": 1, "callbacks": list(callbacks)}
        data = StreamDataModule(stream, formed)
        with contextlib.suppress(DiedError):
            trainer_of(stream, flags).fit(module, datamodule=data, ckpt_path=resume)
        return module

    whole = fitted()
    assert equal(whole, fit(loader(spec_of(per_step))))
    fitted(At("on_train_batch_end", 9 * per_step, path))
    resumed = fitted(resume=path)
    assert equal(resumed, whole) and resumed.num("train") == 3 * per_step


class OfBatches(Module):
    def training_step(self, batch: Any) -> torch.Tensor:
        self.seen.append(place_of(batch.position))
        self.log("images", float(len(batch.index)))
        return self.layer(batch.image.flatten(1).float()).mean()

    def validation_step(self, batch: Any) -> None:
        self.seen.append(place_of(batch.position))


def test_a_module_can_take_whole_batches() -> None:
    stream, module = loader(spec_of(4)), OfBatches()
    trainer_of(stream, {"limit_train_batches": 4}).fit(
        module, datamodule=StreamDataModule(stream, "batch")
    )
    assert (module.num("train"), module.num("val")) == (
        8,
        2 * num_filled(spec_of(4)),
    )
    stream = loader(spec_of(4))
    with pytest.raises(
        ConfigError, match=r"precision='bf16-true' converts what batches hold"
    ):
        trainer_of(stream, {"precision": "bf16-true"}).fit(
            module, datamodule=StreamDataModule(stream, "batch")
        )


def test_a_stream_without_validation_has_no_loader_of_one() -> None:
    stream = loader(spec_of(4, val=None))
    assert StreamDataModule(stream).val_dataloader() == []
