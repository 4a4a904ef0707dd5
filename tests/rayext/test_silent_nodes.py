"""Nodes that are asked for a sign of life: a real raylet answers, a frozen process and a closed port do not."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
import ray

from raypipe.rayext import silent_nodes
from raypipe.rayext.silent_nodes import SilentNodes, answers


@pytest.fixture
def listening() -> Any:
    """A port whose process takes no connection, as that of a frozen one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def asked(silent: SilentNodes, node: dict[str, Any]) -> set[str]:
    """The silent nodes after one was asked, and has answered or not."""
    silent.ask([node])
    for thread in threading.enumerate():
        if thread.name == "raypipe-ask":
            thread.join()
    return silent.found()


@pytest.mark.cluster
def test_the_raylet_of_a_living_node_answers(ray_cluster: None) -> None:
    for node in ray.nodes():
        assert answers(node["NodeManagerAddress"], node["NodeManagerPort"])


def test_a_node_is_silent_after_two_greetings_and_until_it_answers(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silent_nodes, "_ANSWER_S", 0.05)
    host, port = listening.getsockname()
    node = {"NodeID": "a", "NodeManagerAddress": host, "NodeManagerPort": port}
    silent = SilentNodes()
    assert [asked(silent, node), asked(silent, node)] == [set(), {"a"}]
    monkeypatch.setattr(silent_nodes, "_ANSWER_S", 60.0)
    closing = threading.Thread(
        target=lambda: [listening.accept()[0].close() for _ in range(3)]
    )
    closing.start()
    assert asked(silent, node) == set(), "who closes the connection lives"
    closing.join()


def test_a_closed_port_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
    assert not answers(host, port)
