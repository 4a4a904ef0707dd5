"""Arrays → what the model sees: ring, prefetch, Kornia, mixing. Knows torch, not Ray."""

from raypipe.device.mixing import (
    Mix,
    mixed_cross_entropy,
    mixed_losses,
    soft_targets,
)

__all__ = ["Mix", "mixed_cross_entropy", "mixed_losses", "soft_targets"]
