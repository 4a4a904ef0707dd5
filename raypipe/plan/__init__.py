"""Position → draws and keys: samplers, the schedule of a run, the place in it. Numpy only."""
