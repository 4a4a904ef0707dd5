"""Checkpoints of runs and of own loops: their content, and the thread that writes them."""
