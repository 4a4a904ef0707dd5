"""The training loop of raypipe: model, optimizer, checkpoints, the folder of a run."""
