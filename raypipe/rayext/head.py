"""The head of the cluster: whether it answers, and whether it is gone."""

from __future__ import annotations

import contextlib
import socket
import threading

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.experimental import internal_kv

from raypipe.errors import ResourceError
from raypipe.rayext.ray_private import find_private
from raypipe.rayext.startup import Wait

_CONNECT_S = 3.0  # timeout of a connection to a port
_WRONG_TOKEN = "InvalidAuthToken"  # Ray's error has no type for it, only this word
_NOTE = b"raypipe"  # a key of Ray's store for a cluster
_LOST_S = 5.0  # a living head answers at once


class Head:
    """Questions to the head at an address, `host:port`, as Ray's workers ask it."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._client: GcsClient | None = None

    def ask(self, timeout_s: float | None = None) -> bytes:
        """Return what `leave_note` left at the head once it has answered; raise one of many types of errors if it
        does not.
        """
        try:
            self._client = self._client or GcsClient(address=self._address)
            note = self._client.internal_kv_get(_NOTE, None, timeout=timeout_s)
        except Exception:
            self._client = None
            raise
        return note or b""

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


def leave_note(note: bytes) -> None:
    """Leave a note at the head of the connected cluster, for all who connect to it; without Ray's store, none."""
    with contextlib.suppress(Exception):
        internal_kv._internal_kv_put(_NOTE, note, overwrite=True)


def wait_for_head(address: str, wait: Wait) -> bytes:
    """Wait until the head of the cluster at an address answers; return the note that was left there, if any.

    Ray itself would wait for minutes, without a message, and without reacting to signals.

    Raises:
        ResourceError: the head does not answer in time, or wants a token that this process does not send.
    """
    answered = threading.Event()
    ended = threading.Event()
    is_denied = threading.Event()
    reason = ["no answer"]
    note = [b""]

    # In a thread, since signals interrupt the main thread only in Python code.
    def ask() -> None:
        while not ended.wait(0 if reason[0] == "no answer" else 1):
            try:
                host_and_port = _resolved(address)
                if host_and_port is not None:
                    head = Head(host_and_port)
                    head.connect(_CONNECT_S)
                    reason[0] = "it accepts connections, but does not answer"
                    note[0] = head.ask()
                return answered.set()
            # Host names, sockets and Ray raise different types.
            except Exception as error:
                reason[0] = str(error) or type(error).__name__
                if _WRONG_TOKEN in reason[0]:
                    return is_denied.set()

    threading.Thread(target=ask, daemon=True, name="raypipe-head").start()
    try:
        while not answered.wait(0.2):
            if is_denied.is_set():
                raise ResourceError(
                    f"the Ray cluster at {address} does not accept this process's token: set RAY_AUTH_MODE=token, "
                    "and copy ~/.ray/auth_token from the cluster's head (or set RAY_AUTH_TOKEN)"
                )
            wait.turn(f"the Ray cluster at {address} ({reason[0]})", 0)
    finally:
        ended.set()
    return note[0]


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
    except Exception:
        return True
    return False
