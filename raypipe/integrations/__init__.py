"""Adapters that feed the stream to other libraries' training loops, one module per library."""
