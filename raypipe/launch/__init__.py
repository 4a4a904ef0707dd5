"""Launch of a run from its configuration: checks, folder, Ray Train, signals, result."""
