"""MixUp and CutMix of whole micro-batches, and the loss of mixed targets. Knows torch, not Ray.

    MixUp    Zhang et al. 2018, arXiv:1710.09412: x ← λx + (1 - λ)x', λ ~ Beta(α, α)
    CutMix   Yun et al. 2019, arXiv:1905.04899: a box of x' in x, of the area 1 - λ before it is clipped

Each row's partner is the next row that counts, so that rows without weight never mix. One λ per micro-batch:
the target is λ·onehot(target) + (1 - λ)·onehot(partner's target), kept as its two parts. Floats and vectors of
0 and 1 (bool, uint8) become λ·target + (1 - λ)·partner's target. Other integers cannot be mixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.nn.functional import cross_entropy, one_hot

from raypipe.config import AugmentConfig

MixPlan = tuple[float, tuple[int, int, int, int] | None]
"""What is drawn for one micro-batch: the share of a row's own target, in [0, 1]; and the box (top, bottom, left,
right), in pixels, that comes from the partner (CutMix); None = MixUp."""


@dataclass(frozen=True)
class Mix:
    """The other half of the targets of a mixed micro-batch.

    Attributes:
        target: the partners' targets, as the batch's are; a row that did not mix has its own.
        lam: share of a row's own target, in [0, 1]: a number for all rows, or, from a module of Kornia's,
            float32 (B,).
        is_cutmix: CutMix, else MixUp.
        box: CutMix's box, see `MixPlan`; None = MixUp, or a module mixed.
    """

    target: torch.Tensor
    lam: float | torch.Tensor
    is_cutmix: bool
    box: tuple[int, int, int, int] | None = None


def mixing_setting(config: AugmentConfig) -> str:
    """Return the setting by which images are mixed; empty: they are not."""
    names = ("mixup_alpha", "cutmix_alpha")
    return next((f"augment.{name}" for name in names if getattr(config, name)), "")


def draw_mix(
    config: AugmentConfig,
    rng: np.random.Generator,
    height: int,
    width: int,
    strength: float = 1.0,
) -> MixPlan | None:
    """Draw whether and how a micro-batch is mixed; None = not at all.

    Args:
        config: alphas and shares.
        rng: the micro-batch's own generator.
        height, width: size of the images, pixels.
        strength: scales the probability, in [0, 1].
    """
    chosen, kind, y, x = rng.random(4)
    mixup, cutmix = config.mix_shares
    mixed = mixup + cutmix
    if not mixed or chosen >= mixed * strength:
        return None
    cut = kind < cutmix / mixed
    alpha = config.mix_alphas[int(cut)]
    lam = float(rng.beta(alpha, alpha))
    if not cut:
        return lam, None
    half = math.sqrt(1 - lam) / 2
    top, bottom = _span(y, half, height)
    left, right = _span(x, half, width)
    share = 1 - (bottom - top) * (right - left) / (height * width)
    return share, (top, bottom, left, right)


def _span(center: float, half: float, side: int) -> tuple[int, int]:
    """Return where a box begins and ends on a side of so many pixels; center and half are shares of the side."""
    begin, end = (
        int(np.clip(round(center * side + sign * half * side), 0, side))
        for sign in (-1, 1)
    )
    return begin, end


def mix(
    image: torch.Tensor, target: torch.Tensor, counts: np.ndarray, plan: MixPlan
) -> tuple[torch.Tensor, Mix]:
    """Mix a micro-batch as drawn; returns the images and the other half of the targets. Waits for no device.

    Args:
        image: floating point (B, C, H, W); CutMix writes into it.
        target: (B, …) on the same device.
        counts: bool (B,), on the host: the rows that may mix.
        plan: from `draw_mix`.
    """
    partners = torch.from_numpy(partner_rows(counts))
    partner = partners.to(image.device, non_blocking=True)
    lam, box = plan
    if box is None:
        # A row that is its own partner stays as it is, bit by bit: lerp of x with x adds λ·0. The rows that are
        # selected have lost the order of channels_last, which the result keeps.
        # torch takes none through `out`
        has_gradient = torch.is_grad_enabled() and image.requires_grad
        out = None if has_gradient else torch.empty_like(image)
        image = torch.lerp(image.index_select(0, partner), image, lam, out=out)
    else:
        top, bottom, left, right = box
        region = image[:, :, top:bottom, left:right]
        region.copy_(region.index_select(0, partner))
    return image, Mix(target.index_select(0, partner), lam, box is not None, box)


def partner_rows(counts: np.ndarray) -> np.ndarray:
    """Return the row that each row is mixed with, int64 (B,), of bool (B,), the rows that may mix."""
    partners = np.arange(len(counts))
    rows = np.flatnonzero(counts)
    # a row without weight, or the only one with weight, is its own partner
    partners[rows] = np.roll(rows, -1)
    return partners


def soft_targets(
    target: torch.Tensor, mix: Mix | None, num_classes: int, smoothing: float = 0.0
) -> torch.Tensor:
    """Targets as probabilities, float32 (B, num_classes), for losses that take them so.

    Args:
        target: int64 (B,); or targets other than classes, which keep their shape and are not smoothed.
        mix: the other half; None = not mixed.
        smoothing: label smoothing in [0, 1): (1 - s)·target + s / num_classes.
    """
    halves = [target] if mix is None else [target, mix.target]
    are_classes = target.dtype == torch.int64 and target.ndim == 1
    if are_classes:
        halves = [one_hot(half, num_classes) for half in halves]
    soft = halves[0]
    if not soft.is_floating_point():
        soft = soft.float()
    if mix is not None:
        soft = torch.lerp(halves[1].to(soft.dtype), soft, _share(mix, soft))
    if are_classes:
        soft = soft * (1 - smoothing) + smoothing / num_classes
    return soft


def _share(mix: Mix, like: torch.Tensor) -> float | torch.Tensor:
    """The share of the own target, for a target of this shape."""
    if isinstance(mix.lam, float | int):
        return mix.lam
    return mix.lam.to(like.dtype).view(-1, *[1] * (like.ndim - 1))


def mixed_losses(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    logits: torch.Tensor,
    target: torch.Tensor,
    mix: Mix | None = None,
) -> torch.Tensor:
    """Return the loss of mixed targets per row, (B,): λ times that of one half plus 1 - λ times that of the
    other.

    This is mixup's formula (Zhang et al. 2018). A loss that is linear in the target, such as cross-entropy,
    equals that of the soft target. The squared error has the same gradient as with the mixed target.

    Args:
        loss: function of logits and targets that returns one loss per row.
    """
    if mix is None:
        return loss(logits, target)
    return mix.lam * loss(logits, target) + (1 - mix.lam) * loss(logits, mix.target)


def mixed_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    mix: Mix | None = None,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Cross-entropy per row, (B,), against the soft target of each; without the matrix of them."""
    return mixed_losses(
        partial(cross_entropy, reduction="none", label_smoothing=label_smoothing),
        logits,
        target,
        mix,
    )
