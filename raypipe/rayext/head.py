"""The head of the cluster: whether it answers, and whether it is gone."""

from __future__ import annotations

import socket

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]

from raypipe.background import attended
from raypipe.errors import ResourceError
from raypipe.rayext.ray_private import find_private
from raypipe.rayext.startup import Wait

_CONNECT_S = 3.0  # timeout of a connection to a port
_WRONG_TOKEN = "InvalidAuthToken"  # Ray's error has no type for it, only this word
_LOST_S = 5.0  # a living head answers at once
_AGAIN_S = 1.0

UNREACHABLE = (OSError, ValueError, RuntimeError, ray.exceptions.RayError)
"""Errors of host names, sockets and Ray for a head that does not answer."""


class Head:
    """Questions to the head at an address, `host:port`, as Ray's workers ask it."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._client: GcsClient | None = None

    def ask(self, timeout_s: float | None = None) -> None:
        """Return once the head has answered; raise one of `UNREACHABLE` if it does not."""
        try:
            self._client = self._client or GcsClient(address=self._address)
            self._client.internal_kv_get(b"raypipe", None, timeout=timeout_s)
        except UNREACHABLE:
            self._client = None
            raise

    def connect(self, timeout_s: float) -> None:
        """Return if the head accepts a connection; raise OSError or ValueError if not."""
        host, _, port = self._address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()

    def refuses(self, timeout_s: float) -> bool:
        """Return whether nobody listens at the address: the head's process has ended, its machine has not."""
        try:
            self.connect(timeout_s)
        except ConnectionRefusedError:
            return True
        except (OSError, ValueError):
            return False
        return False


def wait_for_head(address: str, wait: Wait) -> None:
    """Wait until the head of the cluster at an address answers.

    Ray itself would wait for minutes, without a message, and without reacting to signals.

    Raises:
        ResourceError: the head does not answer in time, or wants a token that this process does not send.
    """
    reason = "no answer"

    def ask() -> None:
        nonlocal reason
        host_and_port = _resolved(address)
        if host_and_port is not None:
            head = Head(host_and_port)
            head.connect(_CONNECT_S)
            reason = "it accepts connections, but does not answer"
            head.ask()

    def tick(pause_s: float = 0) -> None:
        wait.turn(f"the Ray cluster at {address} ({reason})", pause_s)

    while True:
        try:
            return attended("raypipe-head", ask, tick)
        except UNREACHABLE as error:
            reason = str(error) or type(error).__name__
        if _WRONG_TOKEN in reason:
            raise ResourceError(
                f"the Ray cluster at {address} does not accept this process's token: set RAY_AUTH_MODE=token, "
                "and copy ~/.ray/auth_token from the cluster's head (or set RAY_AUTH_TOKEN)"
            )
        tick(_AGAIN_S)


def _resolved(address: str) -> str | None:
    """Return an address as `host:port`; None = it cannot be tested.

    Ray's address may also be `auto`, or without a port.
    """
    resolve = find_private(
        "ray._private.services.canonicalize_bootstrap_address",
        "RAY_ADDRESS must be host:port",
    )
    resolved: str | None = resolve(address) if resolve else address
    return resolved


def is_head_lost() -> bool:
    """Return whether the head of the connected cluster no longer answers."""
    if not ray.is_initialized():
        return False
    try:
        wait_for_head(ray.get_runtime_context().gcs_address, Wait(_LOST_S))
    except ResourceError:
        return True
    return False
