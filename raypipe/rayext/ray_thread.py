"""Threads that call Ray: they end before their process does.

A thread that is in Ray's core while the core is taken apart ends its process with a segmentation fault. So each
such thread ends when Ray shuts down its actor, or at Python's exit, before Ray does.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import weakref
from typing import Any

import ray

from raypipe.background import Repeating

_SHUTDOWN = "__ray_shutdown__"  # Ray calls this method of an actor before it ends

_owners = weakref.WeakSet[Any]()


class RayThread(Repeating):
    """Thread that calls Ray at once, and again and again, until it is stopped or its process is about to end."""

    def start(self) -> None:
        """Start the thread."""
        stop_before_end(self)
        super().start()

    def run(self) -> None:
        """Call `turn` at once, and then again and again."""
        if self._goes_on():
            self._call()
        super().run()

    def _goes_on(self) -> bool:
        # a call to Ray after its end would start it again
        return ray.is_initialized()


def stop_before_end(owner: Any) -> None:
    """Call `owner.stop()` before this process ends, and before Ray does; owners are not kept alive."""
    _prepare_end()
    _owners.add(owner)


def _stop_all() -> None:
    for owner in list(_owners):
        owner.stop()


@functools.cache  # once per process
def _prepare_end() -> None:
    atexit.register(_stop_all)
    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return
    for actor in ray.get_runtime_context().worker.actors.values():  # one
        ends = contextlib.ExitStack()  # the last one that was added comes first
        ends.callback(getattr(actor, _SHUTDOWN, lambda: None))
        ends.callback(_stop_all)
        setattr(actor, _SHUTDOWN, ends.close)
