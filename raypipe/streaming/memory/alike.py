"""Streams of a cluster that make the same training micro-batches, such as the trials of a learning rate.

Each stream publishes its content at the head, with the time. It withdraws it at its end. An entry of
a killed one is soon too old.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from raypipe.rayext import kv_store

_PREFIX = "stream:"
_PUBLISH_S = 30.0
_OLD_S = 4 * _PUBLISH_S
# Each look lists the head's keys, so looks become rarer while nothing changes.
_FIRST_LOOK_S = 1.0
_LONGEST_LOOK_S = 30.0


class Alike:
    """Look of one process at the streams that make the same.

    Args:
        content: hash of the micro-batches that the stream makes.
        stream: its name.
        clock: seconds since 1970.
    """

    def __init__(
        self, content: str, stream: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._prefix = f"{_PREFIX}{content}:"
        self._stream = stream
        self._clock = clock
        self._published_at = 0.0
        self._is_there = False
        self._look_s = _FIRST_LOOK_S
        self._look_at = 0.0

    def look(self) -> bool:
        """Return whether there are others that make the same; publish the stream, and look for them, if due."""
        now = self._clock()
        if now < self._look_at:
            return self._is_there
        if now - self._published_at >= _PUBLISH_S:
            kv_store.publish(self._prefix + self._stream, now)
            self._published_at = now
        is_there = False
        for key in kv_store.published_keys(self._prefix):
            if key.removeprefix(self._prefix) == self._stream:
                continue
            published_at = kv_store.published(key) or 0.0
            if now - published_at < _OLD_S:
                is_there = True
            else:
                kv_store.withdraw(key)
        self._look_s = min(2 * self._look_s, _LONGEST_LOOK_S)
        if is_there != self._is_there:
            self._look_s = _FIRST_LOOK_S
        self._is_there = is_there
        self._look_at = now + self._look_s
        return is_there


def withdraw_stream(stream: str) -> None:
    """Withdraw a stream that has ended."""
    for key in kv_store.published_keys(_PREFIX):
        if key.endswith(f":{stream}"):
            kv_store.withdraw(key)
