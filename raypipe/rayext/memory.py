"""Memory of an actor, kept by the head of the cluster, so that it outlives the actor's process.

An actor that Ray restarts begins with nothing. With a memory, its new process reads what the last one wrote into
Ray's internal key-value store. Without that store, the actor begins with nothing.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
from typing import Any

import ray
from ray.experimental import internal_kv

logger = logging.getLogger(__name__)

_NAMESPACE = b"raypipe-memory"


class Memory:
    """Memory of the calling actor.

    Attributes:
        lived_before: whether Ray has restarted the actor.
    """

    def __init__(self) -> None:
        context = ray.get_runtime_context()
        self.lived_before: bool = context.was_current_actor_reconstructed
        self._key = (context.get_actor_id() or "").encode()
        self._newest = b""
        self._changed = threading.Event()
        # A thread writes, so that the actor never waits for the head.
        threading.Thread(target=self._write, name="raypipe-memory", daemon=True).start()

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
        while self._changed.wait():
            self._changed.clear()
            try:
                internal_kv._internal_kv_put(self._key, self._newest, overwrite=True, namespace=_NAMESPACE)
            except Exception:
                logger.debug("the memory of an actor cannot be written", exc_info=True)


def forget(actor: Any) -> None:
    """Remove the memory of an actor that was killed."""
    with contextlib.suppress(Exception):
        internal_kv._internal_kv_del(actor._actor_id.hex().encode(), namespace=_NAMESPACE)
