"""Counts of what this process asks of file systems elsewhere."""

from __future__ import annotations

import threading
from collections import defaultdict

_counts: dict[tuple[str, str], float] = defaultdict(float)  # by operation and what is counted
_lock = threading.Lock()


def take_counts() -> dict[str, dict[str, float]]:
    """What this process has done since the last call: by operation its requests, seconds, bytes, retries, errors.

    Seconds include the waiting. A request counts once, with all its attempts; an error is one that was raised.
    """
    with _lock:
        taken: dict[str, dict[str, float]] = {}
        for (operation, name), value in _counts.items():
            taken.setdefault(operation, {})[name] = value
        _counts.clear()
    return taken


def count(operation: str, **amounts: float) -> None:
    with _lock:
        for name, amount in amounts.items():
            _counts[operation, name] += amount
