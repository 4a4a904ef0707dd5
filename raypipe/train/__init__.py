"""The training loop of a run, as it runs in each train function: model, optimizer, DDP, validation."""
