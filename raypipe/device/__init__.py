"""Arrays → what the model sees: ring, prefetch, Kornia, mixing, decoding on the GPU. Knows torch, not Ray."""
