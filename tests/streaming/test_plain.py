"""Training and validation as plain loaders, over a stream that is made in this process."""

from __future__ import annotations

import dataclasses
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from small_streams import spec_of
from torch.nn.functional import cross_entropy

from raypipe.config import AugmentConfig, PlanConfig
from raypipe.device.mixing import soft_targets
from raypipe.errors import ConfigError
from raypipe.plan.places import Cursor
from raypipe.streaming.handover import loader
from raypipe.streaming.plain import PlainLoader, plain_loaders
from raypipe.streaming.spec import StreamSpec


@pytest.fixture(scope="module")
def spec(stores: dict[str, Path]) -> StreamSpec:
    plan = PlanConfig(epochs=3, micro_batch_size=6, global_batch_size=24)
    return spec_of(stores["train"], stores["val"], plan=plan)


def test_each_iteration_is_the_next_epoch_and_the_validation_after_it(
    spec: StreamSpec,
) -> None:
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
        assert torch.equal(named["image"], batch.image) and torch.equal(
            named["weight"], batch.weight
        )
        counts, target = batch.weight > 0, named["target"]
        assert (
            torch.equal(target[counts], batch.target[counts])
            and (target[~counts] == -100).all()
        )
        losses = cross_entropy(torch.randn(len(target), 10), target, reduction="none")
        assert not losses[~counts].any()
        num += int(counts.sum())
    assert num == spec.plan.num_val


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


def test_a_resume_before_a_validation_has_it_and_may_leave_it_out(
    spec: StreamSpec,
) -> None:
    val = validation_of(spec, "batch")
    assert {batch.position.epoch for batch in val} == {0}
    one = loader(spec, cursor=pending(spec))
    train, _ = plain_loaders(one, "batch")
    epochs = range(one.cursor.epoch, one.num_epochs)
    assert [{batch.position.epoch for batch in train} for _ in epochs] == [
        set(),
        {1},
        {2},
    ]


def test_a_loop_that_wants_more_epochs_than_the_plan_is_told_the_setting(
    spec: StreamSpec,
) -> None:
    train, _ = plain_loaders(loader(spec), "batch")
    for _ in range(3):
        assert len(list(train)) == 16
    with pytest.raises(
        ConfigError, match=r"more than the 3 epochs of the plan: set plan\.epochs"
    ):
        list(train)


def test_a_loop_validates_whenever_it_likes_and_trains_the_same(
    spec: StreamSpec,
) -> None:
    # none after the first epoch
    config = dataclasses.replace(spec.plan.config, val_interval=2)
    one = loader(
        dataclasses.replace(spec, plan=dataclasses.replace(spec.plan, config=config))
    )
    train, val = plain_loaders(one, "batch")
    seen = [batch.position for batch in islice(val, 2)]  # a sanity check
    assert one.cursor == spec.plan.start()
    for epoch in range(3):
        for number, batch in enumerate(train):
            seen.append(batch.position)
            if number == 5:
                cursor = one.cursor
                seen += [batch.position for batch in val]
                assert one.cursor == cursor  # the epoch goes on
        for _ in range(2):
            seen += [batch.position for batch in val]
        assert one.cursor == Cursor(epoch + 1, 0, spec.plan.fingerprint)
    seen += [batch.position for batch in val]  # after the end
    assert [at for at in seen if at.split == "train"] == [
        at for at in spec.plan.micro_batches(spec.plan.start()) if at.split == "train"
    ]
    validation = [(step, micro) for step in range(1) for micro in range(4)]
    assert [(at.step, at.micro) for at in seen if at.split == "val"] == [
        *validation[:2],
        *validation * 10,
    ]


def test_a_stream_without_validation_has_an_empty_one_after_each_epoch(
    spec: StreamSpec,
) -> None:
    plan = PlanConfig(epochs=2, micro_batch_size=6)
    own = spec_of(spec.stores["train"], plan=plan)
    train, val = plain_loaders(loader(own))
    assert [(len(list(val)), len(list(train))) for _ in range(2)] == [
        (0, len(train))
    ] * 2
    with pytest.raises(
        ConfigError,
        match="format must be 'dict', 'batch' or a function of the Batch, got 'tuple'",
    ):
        plain_loaders(loader(own), "tuple")  # type: ignore[arg-type]


def test_mixed_targets_need_a_function(spec: StreamSpec) -> None:
    mixing = AugmentConfig(mixup_alpha=0.4)
    with pytest.raises(
        ConfigError,
        match="MixUp and CutMix make two targets of one, and 'dict' has room for one",
    ):
        plain_loaders(loader(spec, augment=mixing))

    def form(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return batch.image, soft_targets(batch.target, batch.mix, 10)

    train, _ = plain_loaders(loader(spec, augment=mixing), form)
    image, target = next(iter(train))
    assert image.dtype == torch.float32 and target.shape == (6, 10)
    assert torch.allclose(target.sum(1), torch.ones(6))
