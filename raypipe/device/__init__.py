"""Arrays → what the model sees: ring, prefetch, Kornia, mixing, decoding on the GPU. Knows torch, not Ray."""

from raypipe.device.mixing import Mixed, mixed_cross_entropy, soft_targets
from raypipe.device.numa import bind_to_numa_node

__all__ = ["Mixed", "bind_to_numa_node", "mixed_cross_entropy", "soft_targets"]
