"""Bytes at a path or a URI: file systems, whole files, locks and leases, the node's cache."""
