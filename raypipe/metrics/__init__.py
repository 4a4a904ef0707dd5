"""Measurements of a run: times of stages, Prometheus metrics, records on disk, and advice."""
