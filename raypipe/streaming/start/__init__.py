"""The start of a stream: ranks make the first micro-batches, while Ray places the pool."""
