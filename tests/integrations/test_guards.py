"""Every guard in every loop: own loops, Lightning, Accelerate and Transformers, on one process."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import raypipe
from raypipe.errors import ConfigError, CursorError
from raypipe.integrations.transformers import StreamTrainer
from raypipe.streaming import plain
from raypipe.streaming.spec import StreamSpec

sys.path.append(str(Path(__file__).parent))
from ranks import (
    EPOCHS,
    LOOPS,
    NUM_VAL,
    STEPS,
    Died,
    Net,
    Run,
    accelerate,
    arguments_of,
    forget_accelerate,
    lightning,
    own,
    rank_of,
    spec_of,
    store_of,
    transformers,
)

Loop = Callable[[Run], None]
each_loop = pytest.mark.parametrize("loop", LOOPS)


def done(loop: Loop, spec: StreamSpec, folder: Path, **options: Any) -> Run:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    folder.mkdir(exist_ok=True)
    loader = options.pop("loader", None) or raypipe.loader(spec)
    run = Run(loader, folder, **options)
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


@pytest.mark.parametrize(("saved", "resumed"), [(1, 2), (2, 1), (2, 4), (4, 1)])
@pytest.mark.parametrize("loop", [own, lightning, accelerate])
def test_a_checkpoint_resumes_in_step_on_another_number_of_ranks(
    loop: Loop, saved: int, resumed: int, tmp_path: Path
) -> None:
    """After an odd number of steps, so that one count of batches is no multiple of the other's."""
    spec = spec_of(4)
    done(loop, spec, tmp_path, loader=rank_of(spec, 0, saved), dies_at=3)
    after = done(loop, spec, tmp_path, loader=rank_of(spec, 0, resumed))
    assert after.trained == [
        row
        for row in samples(spec)
        if row[0] * STEPS + row[1] >= 3 and row[2] % resumed == 0
    ]


def test_accelerate_saves_no_state_inside_of_a_step(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    train, _ = accelerator.prepare(*raypipe.plain_loaders(raypipe.loader(spec_of(4))))
    accelerator.register_for_checkpointing(train)
    batches = iter(train)
    assert len(list(itertools.islice(batches, 2))) == 2
    inside = "inside an optimizer step, after 2 of this rank's 4 batches"
    with pytest.raises(ConfigError, match=inside):
        accelerator.save_state(str(tmp_path))


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


@pytest.mark.parametrize(("looks", "per_step"), [(1, 1), (3, 2)])
@each_loop
def test_a_look_at_the_first_batch_costs_no_sample(
    loop: Loop, per_step: int, looks: int, tmp_path: Path
) -> None:
    run = done(loop, spec_of(per_step), tmp_path, looks=looks)
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


WITHOUT_EFFECT = {
    own: [{"lease": "a"}, {"trace_s": 5.0}],
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


def test_a_second_loop_over_a_training_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    epoch = next(raypipe.loader(spec_of()).epochs())
    assert len(list(epoch.train)) == 12 and list(epoch.train) == []
    assert "a training comes once" in caplog.text
