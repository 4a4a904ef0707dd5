"""Position → index and seed: the order of an epoch, the schedule of a run, the place in it. Numpy only."""
