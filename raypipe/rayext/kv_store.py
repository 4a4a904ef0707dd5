"""Memory of an actor, kept by the head of the cluster, so that it outlives the actor's process.

An actor that Ray restarts begins with nothing. With a memory, its new process reads what the last one wrote into
Ray's internal key-value store. Without that store, the actor begins with nothing.
"""

from __future__ import annotations

import logging
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import ray
from ray.experimental import internal_kv

from raypipe.rayext.ray_thread import RayThread

logger = logging.getLogger(__name__)

_NAMESPACE = b"raypipe-memory"
_LOOK_S = 0.2


def _ask(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call Ray's store; None = it does not answer."""
    try:
        return call(*args, namespace=_NAMESPACE, **options)
    except (
        Exception
    ):  # Ray raises other errors before it starts, while it ends, and without a head
        logger.debug("Ray's store does not answer", exc_info=True)
        return None


class Memory:
    """Memory of the calling actor.

    Attributes:
        lived_before: whether Ray has restarted the actor.
    """

    def __init__(self) -> None:
        self.lived_before = was_restarted()
        self._key = (ray.get_runtime_context().get_actor_id() or "").encode()
        self._newest = b""
        self._changed = threading.Event()
        # A thread writes, so that the actor hardly ever waits for the head.
        RayThread(self._write, 0.0, "raypipe-memory").start()

    def load(self) -> Any:
        """Return what the actor's earlier process has saved; None = nothing."""
        return published(self._key.decode())

    def save(self, state: Any) -> None:
        """Replace the memory, within moments."""
        self._newest = pickle.dumps(state)
        self._changed.set()

    def _write(self) -> None:
        if self._changed.wait(_LOOK_S):
            self._changed.clear()
            _put(self._key, self._newest)


def was_restarted() -> bool:
    """Return whether Ray has restarted the calling actor; False in other processes."""
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return False
    with warnings.catch_warnings():  # Ray itself uses a deprecated property
        warnings.simplefilter("ignore")
        return context.was_current_actor_reconstructed


def forget(actor: Any) -> None:
    """Remove the memory of an actor that was killed, and all that was published behind its id."""
    key = actor._actor_id.hex().encode()
    _ask(internal_kv._internal_kv_del, key, del_by_prefix=True)


def publish(key: str, value: Any) -> bool:
    """Publish a value for other processes of the cluster; return whether the head has it."""
    return _put(key.encode(), pickle.dumps(value)) is not None


def _put(key: bytes, content: bytes) -> Any:
    return _ask(internal_kv._internal_kv_put, key, content, overwrite=True)


def published_keys(prefix: str) -> list[str]:
    """Return the keys of published values that begin with a prefix; none if the head does not answer."""
    keys = _ask(internal_kv._internal_kv_list, prefix.encode())
    return [key.decode() for key in keys or ()]


def published(key: str) -> Any:
    """Return a published value; None = there is none."""
    content = _ask(internal_kv._internal_kv_get, key.encode())
    return pickle.loads(content) if content else None


def withdraw(key: str) -> None:
    """Remove a published value."""
    _ask(internal_kv._internal_kv_del, key.encode())
