"""Memory of an actor, kept by the head of the cluster, so that it outlives the actor's process.

An actor that Ray restarts begins with nothing. With a memory, its new process reads what the last one wrote into
Ray's internal key-value store. Without that store, the actor begins with nothing.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import warnings
from typing import Any

import ray
from ray.experimental import internal_kv

from raypipe.rayext.ray_thread import RayThread

logger = logging.getLogger(__name__)

_NAMESPACE = b"raypipe-memory"
_LOOK_S = 0.2


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
        try:
            content = internal_kv._internal_kv_get(self._key, namespace=_NAMESPACE)
            return pickle.loads(content) if content else None
        except Exception:
            logger.warning("the memory of an earlier process is lost", exc_info=True)
            return None

    def save(self, state: Any) -> None:
        """Replace the memory, within moments."""
        self._newest = pickle.dumps(state)
        self._changed.set()

    def _write(self) -> None:
        if not self._changed.wait(_LOOK_S):
            return
        self._changed.clear()
        try:
            internal_kv._internal_kv_put(
                self._key, self._newest, overwrite=True, namespace=_NAMESPACE
            )
        except Exception:
            logger.debug("the memory of an actor cannot be written", exc_info=True)


def was_restarted() -> bool:
    """Return whether Ray has restarted the calling actor; False in other processes."""
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return False
    with warnings.catch_warnings():  # Ray itself uses a deprecated property
        warnings.simplefilter("ignore")
        return context.was_current_actor_reconstructed


def forget(actor: Any) -> None:
    """Remove the memory of an actor that was killed."""
    withdraw(actor._actor_id.hex())


def publish(key: str, value: Any) -> bool:
    """Publish a value for other processes of the cluster; return whether the head has it."""
    with contextlib.suppress(Exception):
        internal_kv._internal_kv_put(
            key.encode(), pickle.dumps(value), overwrite=True, namespace=_NAMESPACE
        )
        return True
    return False


def published_keys(prefix: str) -> list[str]:
    """Return the keys of published values that begin with a prefix; none if the head does not answer."""
    with contextlib.suppress(Exception):
        keys = internal_kv._internal_kv_list(prefix.encode(), namespace=_NAMESPACE)
        return [key.decode() for key in keys]
    return []


def published(key: str) -> Any:
    """Return a published value; None = there is none."""
    with contextlib.suppress(Exception):
        content = internal_kv._internal_kv_get(key.encode(), namespace=_NAMESPACE)
        return pickle.loads(content) if content else None
    return None


def withdraw(key: str) -> None:
    """Remove a published value."""
    with contextlib.suppress(Exception):
        internal_kv._internal_kv_del(key.encode(), namespace=_NAMESPACE)
