"""Bytes at a path or URI: file systems, whole files, locks and leases, and the node's cache."""
