"""Training and validation as plain loaders, over a stream that is made in this process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from pictures import CLASSES, samples
from torch.nn.functional import cross_entropy

from raypipe.config import AugmentConfig, PlanConfig, PoolConfig, TransformConfig
from raypipe.device.mixing import soft_targets
from raypipe.errors import ConfigError, RaypipeError, SampleError
from raypipe.plan.places import Cursor
from raypipe.stores.destination import write_atomically
from raypipe.streaming.arrival import Feed
from raypipe.streaming.handover import loader
from raypipe.streaming.inline import inline_batches
from raypipe.streaming.loader import Loader
from raypipe.streaming.opening import open_stream
from raypipe.streaming.plain import PlainLoader, plain_loaders
from raypipe.streaming.spec import StreamSpec


@pytest.fixture(scope="module")
def spec(stores: dict[str, Path]) -> StreamSpec:
    return open_stream(
        stores["train"],
        stores["val"],
        plan=PlanConfig(epochs=3, micro_batch_size=6, global_batch_size=24),
        transform=TransformConfig(train="small", val="resize", size=12),
        pool=PoolConfig(engine="inline"),
    )


def test_each_iteration_is_the_next_epoch_and_the_validation_after_it(spec: StreamSpec) -> None:
    train, val = plain_loaders(loader(spec), "batch")
    assert (len(train), len(val), train.batch_size, val.batch_size) == (16, 4, 6, 6)
    seen = []
    for _ in range(3):
        iter(train)  # that is never asked for a batch
        seen += [batch.position for batch in train]
        seen += [batch.position for batch in val]
    assert seen == list(spec.plan.micro_batches(spec.plan.start()))


def validation_of(spec: StreamSpec, form: Any) -> PlainLoader:
    """Of the first epoch, which is all that is left of it."""
    return plain_loaders(loader(spec, cursor=pending(spec)), form)[1]


def pending(spec: StreamSpec) -> Cursor:
    return dataclasses.replace(spec.plan.start(), step=spec.plan.steps_per_epoch)


def test_dicts_have_targets_that_losses_ignore_for_padding(spec: StreamSpec) -> None:
    dicts, batches = (validation_of(spec, form) for form in ("dict", "batch"))
    num = 0
    for named, batch in zip(dicts, batches, strict=True):
        assert torch.equal(named["image"], batch.image) and torch.equal(named["weight"], batch.weight)
        counts, target = batch.weight > 0, named["target"]
        assert torch.equal(target[counts], batch.target[counts]) and (target[~counts] == -100).all()
        losses = cross_entropy(torch.randn(len(target), 10), target, reduction="none")
        assert not losses[~counts].any()
        num += int(counts.sum())
    assert num == spec.plan.num_val


def ranks_of(train: Path, val: Path, per_step: int, num_ranks: int) -> list[Loader]:
    """Each rank's loader, with a validation of 22 samples before it: six micro-batches, the last of 2 samples."""
    spec = open_stream(
        train,
        val,
        plan=PlanConfig(epochs=1, micro_batch_size=4, global_batch_size=4 * per_step),
        transform=TransformConfig(train="small", val="resize", size=12),
        pool=PoolConfig(engine="inline"),
    )

    def of(rank: int) -> Loader:
        made = inline_batches(spec, pending(spec), rank, num_ranks)
        return Loader(spec, lambda _: Feed(made), rank, num_ranks, cursor=pending(spec))

    return [of(rank) for rank in range(num_ranks)]


@pytest.mark.parametrize(("per_step", "num_ranks"), [(3, 1), (3, 3), (4, 1), (4, 2), (8, 1), (8, 2)])
def test_tuples_of_a_validation_hold_its_samples_and_nothing_else(
    per_step: int, num_ranks: int, stores: dict[str, Path]
) -> None:
    sizes, targets = [], []
    for one in ranks_of(stores["train"], stores["val"], per_step, num_ranks):
        _, val = plain_loaders(one, "tuple")
        made = list(val)
        assert len(made) == len(val) and all(len(image) == len(target) > 0 for image, target in made)
        sizes.append(len(made))
        targets += [int(each) for _, target in made for each in target]
    assert len(set(sizes)) == 1  # what the ranks do together, they do equally often
    assert sorted(targets) == sorted(number % 5 for number in range(22))


@pytest.mark.parametrize(("per_step", "num_ranks"), [(4, 4), (8, 4)])
def test_tuples_that_ranks_would_not_have_equally_many_of_are_refused(
    per_step: int, num_ranks: int, stores: dict[str, Path]
) -> None:
    message = f"2 .* are padding, .* {num_ranks} workers .*use format='dict'"
    for one in ranks_of(stores["train"], stores["val"], per_step, num_ranks):
        with pytest.raises(ConfigError, match=message):
            plain_loaders(one, "tuple")
        plain_loaders(one, "dict")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tuples_have_no_row_of_a_bad_sample_nor_a_batch_of_them(
    num_ranks: int, stores: dict[str, Path], tmp_path: Path
) -> None:
    damaged = [
        sample | ({"image": b"damaged"} if at in (1, 20, 21) else {}) for at, sample in enumerate(samples(22))
    ]
    write_atomically(str(tmp_path / "val.lmdb"), damaged, CLASSES)
    loaders = ranks_of(stores["train"], tmp_path / "val.lmdb", 4, num_ranks)
    each = [iter(plain_loaders(one, "tuple")[1]) for one in loaders]
    first, last = each[0], each[-1]
    image, target = next(first)
    assert len(image) == 3 and target.tolist() == [0, 2, 3]
    if num_ranks == 1:
        assert [len(target) for _, target in first] == [4] * 4
    else:
        with pytest.raises(SampleError, match=r"val-e0000-s000001-m001.* use format='dict'"):
            list(last)


def test_tuples_of_a_training_have_no_row_that_only_the_device_found_bad(spec: StreamSpec) -> None:
    usable = next(iter(plain_loaders(loader(spec), "batch")[0]))

    def with_bad_rows(rows: list[int]) -> list[Any]:
        weight = usable.weight.clone()
        weight[rows] = 0
        batch = dataclasses.replace(
            usable, weight=weight, num_bad=len(rows), failed=dict.fromkeys(rows, "damaged")
        )
        made, _ = plain_loaders(loader(spec), "tuple")
        return list(made._tuples([batch]))

    ((image, target),) = with_bad_rows([1, 5])
    assert torch.equal(image, usable.image[[0, 2, 3, 4]]) and torch.equal(target, usable.target[[0, 2, 3, 4]])
    with pytest.raises(SampleError, match="train-e0000-s000000-m000"):
        with_bad_rows([0, 1, 2, 3, 4, 5])


def test_a_state_that_either_of_them_saves_goes_on_in_both(spec: StreamSpec) -> None:
    train, val = plain_loaders(loader(spec), "batch")
    seen = iter(train)
    for _ in range(8):
        next(seen)
    state = val.state_dict()
    rest = [batch.position for batch in seen]
    train, val = plain_loaders(loader(spec), "batch")
    next(iter(train))
    val.load_state_dict(state)
    assert train.state_dict() == state
    assert [batch.position for batch in train] == rest and len(list(val)) == 4


def test_a_resume_before_a_validation_has_it_and_may_leave_it_out(spec: StreamSpec) -> None:
    val = validation_of(spec, "batch")
    assert {batch.position.epoch for batch in val} == {0}
    train, _ = plain_loaders(loader(spec, cursor=pending(spec)), "batch")
    assert {batch.position.epoch for batch in train} == {1}


def ask(spec: StreamSpec, *turns: str) -> None:
    train, val = plain_loaders(loader(spec), "batch")
    by_name = {"train": train, "val": val}
    for turn in turns:
        for _ in by_name[turn]:
            pass


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        (("val",), "before epoch 0 was trained.*num_sanity_val_steps=0"),
        (("train", "val", "val"), r"no further validation after epoch 0: plan\.val_interval is 1"),
        (("train",) * 4, r"more than the 3 epochs of the plan: set plan\.epochs"),
    ],
)
def test_a_loop_whose_order_is_not_the_plans_is_told_the_setting(
    spec: StreamSpec, turns: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ask(spec, *turns)


def test_a_validation_in_the_midst_of_an_epoch_does_not_end_it_in_silence(spec: StreamSpec) -> None:
    train, val = plain_loaders(loader(spec), "batch")
    seen = iter(train)
    next(seen)
    next(iter(val))
    with pytest.raises(RaypipeError, match="epoch 0's train batches was skipped"):
        next(seen)


def test_mixed_targets_need_a_function(spec: StreamSpec) -> None:
    mixing = AugmentConfig(mixup_alpha=0.4)
    with pytest.raises(ConfigError, match="MixUp and CutMix make two targets of one, and 'dict' has room for one"):
        plain_loaders(loader(spec, augment=mixing))

    def form(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return batch.image, soft_targets(batch.target, batch.mix, 10)

    train, _ = plain_loaders(loader(spec, augment=mixing), form)
    image, target = next(iter(train))
    assert image.dtype == torch.float32 and target.shape == (6, 10)
    assert torch.allclose(target.sum(1), torch.ones(6))
