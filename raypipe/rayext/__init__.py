"""Code that depends on Ray's internals: executions and their pools, trainers, clusters."""
