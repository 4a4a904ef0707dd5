"""The ledger of the cluster's memory, by a clock of the test; the actors are in test_recalled_streams.py."""

from __future__ import annotations

from typing import Any

import pytest

from raypipe.streaming.remembered import Found, Ledger, User

A = b"a"
B = b"b"
C = b"c"
ROOM = 100


class Cluster:
    """A ledger, its clock, and users on two nodes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ledger = Ledger(lambda: self.now)

    def user(
        self, name: str, node: str = "n1", actor: str = "", stream: str = ""
    ) -> User:
        user = User(name, actor or name, stream or f"stream of {name}", node)
        self.ledger.check_in(user, ROOM)
        return user

    def put(
        self, user: User, key: bytes, num_bytes: int = 10, comes_back: bool = False
    ) -> bool:
        self.ledger.ask(user, [key])
        if not self.ledger.admit(user, [key], num_bytes, comes_back):
            return False
        self.ledger.put(user, [key], f"object {key!r}", num_bytes, comes_back)
        return True

    def has(self, user: User, key: bytes) -> bool:
        (answer,) = self.ledger.ask(user, [key])
        self.ledger.give_up(user, [key])
        return isinstance(answer, Found)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_one_makes_what_others_wait_for_and_all_find_it(cluster: Cluster) -> None:
    first, second = cluster.user("first"), cluster.user("second", "n2")
    assert cluster.ledger.ask(first, [A, B]) == ["make", "make"]
    assert cluster.ledger.ask(second, [A, C]) == ["wait", "make"]
    assert cluster.ledger.ask(first, [A]) == ["make"]  # its own claim
    assert cluster.ledger.admit(first, [A, B], 20, False)
    cluster.ledger.put(first, [A, B], "object", 20, False)
    assert cluster.ledger.ask(second, [B, A]) == [
        Found("object", 1),
        Found("object", 0),
    ]
    assert cluster.ledger.used == {"n1": 20}


def test_a_claim_ends_with_its_holder(cluster: Cluster) -> None:
    first, second = cluster.user("first", actor="x"), cluster.user("second")

    def claim() -> None:
        assert cluster.ledger.ask(first, [A]) == ["make"]
        assert cluster.ledger.ask(second, [A]) == ["wait"]

    claim()
    cluster.ledger.give_up(first, [A])
    assert cluster.ledger.ask(second, [A]) == ["make"]
    cluster.ledger.give_up(second, [A])

    claim()
    cluster.user("first again", actor="x")  # Ray has restarted it
    assert cluster.ledger.ask(second, [A]) == ["make"]
    cluster.ledger.give_up(second, [A])

    cluster.ledger.check_in(first, ROOM)
    claim()
    cluster.now += 25  # it is silent
    assert cluster.ledger.ask(second, [A]) == ["make"]


def test_a_claim_ends_though_its_holder_lives(cluster: Cluster) -> None:
    first, second = cluster.user("first"), cluster.user("second")
    cluster.ledger.ask(first, [A])
    for _ in range(6):
        assert cluster.ledger.ask(second, [A]) == ["wait"]
        cluster.now += 5
        cluster.ledger.check_in(first, ROOM)
    assert cluster.ledger.ask(second, [A]) == ["make"]


def test_the_least_recently_used_go_first_and_validations_last(
    cluster: Cluster,
) -> None:
    user = cluster.user("one")
    assert cluster.put(user, A, 40, comes_back=True)
    assert cluster.put(user, B, 30) and cluster.put(user, C, 30)
    assert cluster.has(user, B)
    assert cluster.put(user, b"d", 30)  # C was used before B
    assert [cluster.has(user, key) for key in (A, B, C, b"d")] == [
        True,
        True,
        False,
        True,
    ]
    # A training never takes the room of a validation.
    assert not cluster.put(user, b"e", 70) and cluster.has(user, A)
    assert cluster.put(user, b"f", 70, comes_back=True) and not cluster.has(user, A)
    assert not cluster.put(user, b"g", 101, comes_back=True)
    assert cluster.ledger.used == {"n1": 70}


def test_each_node_has_its_own_limit(cluster: Cluster) -> None:
    here, there = cluster.user("here"), cluster.user("there", "n2")
    assert cluster.put(here, A, 90) and cluster.put(there, B, 90)
    assert cluster.ledger.used == {"n1": 90, "n2": 90}
    cluster.ledger.check_in(there, ROOM, is_full=True)
    assert cluster.ledger.used == {"n1": 90}


def test_a_refused_put_leaves_its_key_to_others(cluster: Cluster) -> None:
    first, second = cluster.user("first"), cluster.user("second")
    assert not cluster.put(first, A, ROOM + 1)
    assert cluster.ledger.ask(second, [A]) == ["make"]


def test_a_node_without_users_gets_its_memory_back(cluster: Cluster) -> None:
    here, there = cluster.user("here"), cluster.user("there", "n2")
    assert cluster.put(here, A) and cluster.put(there, B)
    for _ in range(12):
        assert cluster.ledger.expire() == []
        cluster.now += 5
        cluster.ledger.check_in(here, ROOM)
    assert cluster.ledger.expire() == ["n2"]
    assert cluster.ledger.used == {"n1": 10} and cluster.ledger.nodes == ["n1"]


def test_the_last_stream_to_leave_is_known_and_comes_not_back(
    cluster: Cluster,
) -> None:
    first, second = (
        cluster.user("first", stream="s"),
        cluster.user("second", stream="t"),
    )
    assert cluster.ledger.leave("s")
    cluster.ledger.check_in(first, ROOM)  # its actor has not ended yet
    assert cluster.ledger.num_users == 1
    assert not cluster.ledger.leave("t")
    assert cluster.ledger.num_users == 0
    assert second.stream == "t"


def test_a_killed_stream_is_gone_when_it_is_silent(cluster: Cluster) -> None:
    cluster.user("killed")
    cluster.now += 19
    assert cluster.ledger.expire() == [] and cluster.ledger.num_users == 1
    cluster.now += 1
    cluster.ledger.expire()
    assert cluster.ledger.num_users == 0


def test_a_lost_object_is_forgotten_with_all_of_its_node(cluster: Cluster) -> None:
    here, there = cluster.user("here"), cluster.user("there", "n2")
    cluster.ledger.put(here, [A, B], "object", 20, False)
    assert cluster.put(here, b"d", comes_back=True) and cluster.put(there, C)
    cluster.ledger.lost([B, b"unknown"])
    assert cluster.ledger.ask(here, [A, B, b"d"]) == ["make"] * 3
    assert cluster.ledger.used == {"n2": 10}


def test_the_second_of_two_that_made_the_same_is_not_kept(cluster: Cluster) -> None:
    first, second = cluster.user("first"), cluster.user("second")
    answers: list[Any] = [cluster.put(first, A), cluster.put(second, A)]
    assert answers == [True, False] and cluster.ledger.used == {"n1": 10}
