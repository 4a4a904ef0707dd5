"""The waits of a start, for a cluster's head, for other runs that start, for room: each has a limit, and lines."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray import _raylet
from ray._private import services
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.errors import ResourceError
from raypipe.logs import progress

logger = logging.getLogger(__name__)

_FIRST_LINE_S, _LINE_EVERY_S = 1.0, 30.0
_CONNECT_S = 3.0  # to a port
_LOST_S = 5.0  # a head that is there answers at once

_STARTING = "raypipe-start"


class Wait:
    """One wait.

    Args:
        timeout_s: after which it ends with an error.
        check: called at each turn; raises what ends the wait.
        setting: that `timeout_s` is from.
    """

    def __init__(self, timeout_s: float, check: Callable[[], None] = lambda: None, setting: str = "") -> None:
        self._timeout_s, self._check, self._by = timeout_s, check, f" ({setting})" if setting else ""
        self._begun = time.monotonic()
        self._line_at = self._begun + _FIRST_LINE_S - _LINE_EVERY_S

    def turn(self, thing: str, pause_s: float = 0.5) -> None:
        """Wait a little longer for a thing; ResourceError once it was too long."""
        self._check()
        now = time.monotonic()
        left_s = self._begun + self._timeout_s - now
        if left_s <= 0:
            raise ResourceError(f"waited {self._timeout_s:g} s{self._by} for {thing}")
        if now - self._line_at >= _LINE_EVERY_S:
            self._line_at = now
            progress(logger, f"waiting {left_s:.0f} s more at most{self._by} for {thing}")
        time.sleep(min(pause_s, left_s))


def wait_for_head(address: str, wait: Wait) -> None:
    """Return once the head of the cluster at an address answers.

    Ray itself would wait for minutes, without a word, and deaf to signals.

    Raises:
        ResourceError: it has not answered in time.
    """
    answered, ended, why = threading.Event(), threading.Event(), ["no answer"]

    def ask() -> None:  # beside the main thread, which signals interrupt in Python alone
        while not ended.wait(0 if why[0] == "no answer" else 1):
            try:
                head = services.canonicalize_bootstrap_address(address)
                if head is not None:  # else Ray Client's, or none that can be asked
                    host, _, port = head.rpartition(":")
                    socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
                    why[0] = "it takes connections, and does not answer"
                    client: Any = _raylet
                    client.GcsClient(address=head).internal_kv_get(b"raypipe", None)
                return answered.set()
            except Exception as error:  # of names, sockets, and Ray's own
                why[0] = str(error) or type(error).__name__

    threading.Thread(target=ask, daemon=True, name="raypipe-head").start()
    try:
        while not answered.wait(0.2):
            wait.turn(f"the Ray cluster at {address} ({why[0]})", 0)
    finally:
        ended.set()


def is_head_lost() -> bool:
    """Whether the head of the cluster that this process has connected to answers no more."""
    if not ray.is_initialized():
        return False
    try:
        wait_for_head(ray.get_runtime_context().gcs_address, Wait(_LOST_S))
    except Exception:
        return True
    return False


class _Starting:
    """An actor that a run has while it starts, whose name there is once. It ends with the run's process."""


@contextlib.contextmanager
def only_start(wait: Wait) -> Iterator[Any]:
    """Within, no other run starts on the connected cluster. Yields an actor, which ends this once it is killed.

    Two runs that check at one time whether there is room would each take what the other counts on.
    """
    own = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options = {"num_cpus": 0, "name": _STARTING, "namespace": "raypipe", "scheduling_strategy": own}
    while True:
        try:
            actor: Any = ray.remote(_Starting).options(**options).remote()
            break
        except ValueError:  # there is one
            wait.turn("another run, until its trainers and its pool have started")
    try:
        yield actor
    finally:
        with contextlib.suppress(ray.exceptions.RayError, ConnectionError):
            ray.kill(actor)
