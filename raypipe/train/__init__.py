"""raypipe's training loop: model, optimizer, checkpoints, and the folder of a run."""
