"""Nodes that do not answer: frozen, cut off or dead, some time before Ray calls them dead.

A greeting of HTTP/2 goes to the port of each node's raylet. One that lives sends its own at once, or closes the
connection; for a frozen one the kernel takes the connection, and nothing comes.
"""

from __future__ import annotations

import functools
import socket
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from raypipe.background import in_background

_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_ANSWER_S = 1.0
# Greetings in a row without an answer, after which a node is silent.
_TIMES = 2


class SilentNodes:
    """Asks nodes for a sign of life, in threads."""

    def __init__(self) -> None:
        self._unanswered = Counter[str]()
        self._asked: dict[str, Future[None]] = {}

    def ask(self, nodes: Iterable[dict[str, Any]]) -> None:
        """Ask nodes, as dicts from `ray.nodes`, that have answered, or have not within the limit; never waits."""
        for node in nodes:
            asked = self._asked.get(node["NodeID"])
            if asked is None or asked.done():
                ask = functools.partial(self._ask, node)
                self._asked[node["NodeID"]] = in_background("raypipe-ask", ask)

    def found(self) -> set[str]:
        """Return the ids of the nodes that were silent when they were asked last."""
        return {
            node for node, times in list(self._unanswered.items()) if times >= _TIMES
        }

    def _ask(self, node: dict[str, Any]) -> None:
        node_id = node["NodeID"]
        if answers(node["NodeManagerAddress"], node["NodeManagerPort"]):
            self._unanswered[node_id] = 0
        else:
            self._unanswered[node_id] += 1


def answers(address: str, port: int) -> bool:
    """Return whether a process at an address sends anything, or closes the connection, within the limit."""
    try:
        with socket.create_connection((address, port), _ANSWER_S) as connection:
            connection.sendall(_GREETING)
            connection.recv(1)
    except ConnectionResetError:
        return True
    except OSError:
        return False
    return True
