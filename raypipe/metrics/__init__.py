"""Measurements of a run: times of stages, metrics for Prometheus, records on disk, and what they say."""
