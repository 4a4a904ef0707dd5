"""Finished micro-batches that a cluster remembers, so that each is made once."""
