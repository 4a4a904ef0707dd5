"""MixUp and CutMix: against hand calculations, and what never mixes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from raypipe.config import AugmentConfig
from raypipe.device.augment import check_mixable
from raypipe.device.mixing import (
    Mix,
    MixPlan,
    draw_mix,
    mix,
    mixed_cross_entropy,
    mixed_losses,
    soft_targets,
)
from raypipe.errors import ConfigError
from raypipe.transform.columns import ColumnType
from raypipe.transform.device_input import IMAGES

ALL = np.ones(4, bool)


def images(rows: int = 4) -> torch.Tensor:
    """Row i is i + 1 everywhere."""
    return torch.arange(1.0, rows + 1).view(-1, 1, 1, 1).expand(rows, 3, 4, 4).clone()


def draws(
    config: AugmentConfig, number: int = 2000, strength: float = 1.0
) -> list[MixPlan | None]:
    return [
        draw_mix(config, np.random.default_rng(seed), 32, 32, strength)
        for seed in range(number)
    ]


def test_mixup_by_hand() -> None:
    target = torch.tensor([0, 1, 2, 0])
    mixed_images, mixed = mix(images(), target, ALL, (0.75, None))
    # 0.75·1 + 0.25·2, 0.75·2 + 0.25·3, 0.75·3 + 0.25·4, 0.75·4 + 0.25·1
    assert mixed_images[:, 0, 0, 0].tolist() == [1.25, 2.25, 3.25, 3.25]
    assert (mixed_images == mixed_images[:, :1, :1, :1]).all()
    assert mixed.target.tolist() == [1, 2, 0, 0]
    soft = soft_targets(target, mixed, 3)
    assert soft.tolist() == [
        [0.75, 0.25, 0],
        [0, 0.75, 0.25],
        [0.25, 0, 0.75],
        [1, 0, 0],
    ]


def test_cutmix_by_hand() -> None:
    target = torch.tensor([0, 1, 2, 0])
    plan = (1 - 2 * 1 / 16, (1, 3, 2, 3))
    mixed_images, mixed = mix(images(), target, ALL, plan)
    expected = torch.ones(4, 4)
    expected[1:3, 2:3] = 2
    assert torch.equal(mixed_images[0, 0], expected)
    assert mixed_images[3, 0, 1:3, 2].tolist() == [1, 1] and mixed_images[
        3
    ].sum() == 3 * (16 * 4 - 2 * 3)
    assert mixed.is_cutmix
    assert soft_targets(target, mixed, 3)[0].tolist() == [0.875, 0.125, 0]


def test_soft_targets_with_label_smoothing_by_hand() -> None:
    target, mixed = torch.tensor([0]), Mix(torch.tensor([3]), 0.75, False)
    found = soft_targets(target, mixed, 4, smoothing=0.2)
    # 0.8 · (0.75, 0, 0, 0.25) + 0.05
    torch.testing.assert_close(found, torch.tensor([[0.65, 0.05, 0.05, 0.25]]))
    torch.testing.assert_close(
        soft_targets(target, None, 4, 0.2), torch.tensor([[0.85, 0.05, 0.05, 0.05]])
    )


@pytest.mark.parametrize("num_classes", [2, 10, 1000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_two_halves_is_that_of_the_soft_targets(
    num_classes: int, smoothing: float
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, num_classes, dtype=torch.float64)
    target = torch.randint(num_classes, (6,))
    mixed = Mix(torch.randint(num_classes, (6,)), 0.3, True)
    soft = soft_targets(target, mixed, num_classes, smoothing)
    expected = cross_entropy(logits, soft.double(), reduction="none")
    found = mixed_cross_entropy(logits, target, mixed, smoothing)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    plain = cross_entropy(logits, target, reduction="none", label_smoothing=smoothing)
    assert torch.equal(mixed_cross_entropy(logits, target, None, smoothing), plain)


def test_rows_without_weight_never_mix() -> None:
    counts = np.array([True, False, True, True, False])
    for plan in ((0.6, None), (0.75, (0, 2, 0, 2))):
        before = images(5)
        mixed_images, mixed = mix(before.clone(), torch.arange(5), counts, plan)
        for row in (1, 4):
            assert torch.equal(mixed_images[row], before[row])
            assert mixed.target[row] == row
        # And nothing of theirs is in the others: rows 0, 2, 3 hold 1, 3 and 4.
        whole = [0.6 * 1 + 0.4 * 3, 0.6 * 3 + 0.4 * 4, 0.6 * 4 + 0.4 * 1]
        corner = mixed_images[[0, 2, 3], 0, 0, 0]
        torch.testing.assert_close(
            corner, torch.tensor(whole if plan[1] is None else [3.0, 4.0, 1.0])
        )


def test_a_single_row_that_counts_stays_as_it_is() -> None:
    before = torch.rand(3, 3, 4, 4)
    counts = np.array([False, True, False])
    after, mixed = mix(before.clone(), torch.arange(3), counts, (0.37, None))
    assert torch.equal(after, before) and mixed.target.tolist() == [0, 1, 2]


def test_the_shares_of_mixup_cutmix_and_neither_are_those_that_were_set() -> None:
    config = AugmentConfig(mixup_alpha=(0.2, 0.2), cutmix_alpha=(1.0, 0.5))
    for strength in (1.0, 0.5):
        plans = draws(config, strength=strength)
        cut = sum(plan is not None and plan[1] is not None for plan in plans) / len(
            plans
        )
        mixed = sum(plan is not None for plan in plans) / len(plans)
        assert (mixed - cut, cut) == pytest.approx(
            (0.2 * strength, 0.5 * strength), abs=0.03
        )
    half = draws(config, strength=0.5)
    # What is mixed at half the strength is mixed in the same way at the whole.
    assert all(a == b for a, b in zip(half, draws(config), strict=True) if a)
    one_share = AugmentConfig(mixup_alpha=(0.2, 0.3), cutmix_alpha=1.0)
    assert draws(one_share) == draws(
        AugmentConfig(mixup_alpha=(0.2, 0.3), cutmix_alpha=(1.0, 0.7))
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mixup_alpha": (0.2, 0.5), "cutmix_alpha": (1, 0.6)}, "at most 1 with that"),
        ({"mixup_alpha": (0.5,)}, r"an alpha, or \[ALPHA, SHARE\]"),
        ({"cutmix_alpha": (0.0, 0.4)}, r"augment\.cutmix_alpha must be .* above 0"),
    ],
)
def test_shares_that_cannot_be_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        AugmentConfig(**{"mixup_alpha": 0.2, "cutmix_alpha": 1.0, **settings})


def test_nothing_is_mixed_by_default() -> None:
    assert draws(AugmentConfig(), 100) == [None] * 100


def test_lambda_of_mixup_is_beta_distributed() -> None:
    plans = [plan for plan in draws(AugmentConfig(mixup_alpha=0.5)) if plan]
    assert len(plans) == 2000 and {box for _, box in plans} == {None}
    lams = np.array([share for share, _ in plans])
    # Beta(α, α): mean 1/2, variance 1 / (4 (2α + 1))
    assert lams.mean() == pytest.approx(0.5, abs=0.03) and lams.var() == pytest.approx(
        1 / 8, abs=0.01
    )


def test_lambda_of_cutmix_is_the_share_that_the_box_leaves() -> None:
    for plan in draws(AugmentConfig(cutmix_alpha=1.0), 500):
        assert plan and plan[1]
        top, bottom, left, right = plan[1]
        assert 0 <= top <= bottom <= 32 and 0 <= left <= right <= 32
        assert plan[0] == 1 - (bottom - top) * (right - left) / 1024


# Targets that are no classes


def test_floats_and_vectors_of_0_and_1_are_mixed_by_hand() -> None:
    target = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0]], dtype=torch.uint8)
    _, mixed = mix(images(), target, ALL, (0.75, None))
    assert soft_targets(target, mixed, 2).tolist() == [
        [0.75, 0.25],
        [0.25, 1],
        [0.75, 0.75],
        [0.25, 0],
    ]
    assert soft_targets(target.double(), None, 2).dtype == torch.float64
    _, mixed = mix(images(), torch.tensor([0.0, 4, 8, 0]), ALL, (0.75, None))
    assert soft_targets(torch.tensor([0.0, 4, 8, 0]), mixed, 1).tolist() == [1, 5, 6, 0]


def test_squared_error_of_two_halves_has_the_mixed_targets_gradient() -> None:
    target, partner = torch.tensor([1.0, 3]), torch.tensor([2.0, -1])
    mixed = Mix(partner, 0.3, False)
    gradients = []
    for loss in (
        lambda outputs: mixed_losses(lambda x, y: (x - y) ** 2, outputs, target, mixed),
        lambda outputs: (outputs - soft_targets(target, mixed, 1)) ** 2,
    ):
        outputs = torch.tensor([0.5, 0.25], requires_grad=True)
        loss(outputs).sum().backward()
        gradients.append(outputs.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("dtype", "shape", "can"),
    [
        ("float64", (), True),
        ("float32", (2, 3), True),
        ("uint8", (4,), True),
        ("bool", (4,), True),
        ("uint8", (), False),
        ("int64", (4,), False),
        ("int64", (), False),
    ],
)
@pytest.mark.parametrize("setting", ["mixup_alpha", "cutmix_alpha"])
def test_targets_that_have_no_mixture_are_refused(
    setting: str, dtype: str, shape: tuple[int, ...], can: bool
) -> None:
    batches = IMAGES._replace(target=ColumnType("array", dtype, shape))
    check_mixable(AugmentConfig(), batches)
    config = AugmentConfig(**{setting: 0.5})  # type: ignore[arg-type]
    if can:
        check_mixable(config, batches)
        return
    with pytest.raises(ConfigError, match=f"augment.{setting} mixes targets"):
        check_mixable(config, batches)
