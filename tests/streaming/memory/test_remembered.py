"""The ledger of the cluster's memory, by a clock of the test; the actors are in test_recalled_streams.py."""

from __future__ import annotations

import numpy as np
import pytest

from raypipe.streaming.memory.remembered import Found, Ledger, Parcel, Reply, User
from raypipe.streaming.memory.stored import Stored

A = b"a"
B = b"b"
C = b"c"
ROOM = 100
OUTLINE = Stored(np.zeros(1, np.int64), np.ones(1, np.float32), {}, [], 10)


class Cluster:
    """A ledger, its clock, and users on two nodes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ledger = Ledger(lambda: self.now)

    def user(
        self,
        name: str,
        node: str = "n1",
        actor: str = "",
        stream: str = "",
        training: str = "",
    ) -> User:
        stream = stream or f"stream of {name}"
        user = User(name, actor or name, stream, node, training)
        self.ledger.check_in(user, ROOM)
        return user

    def put(
        self,
        user: User,
        key: bytes,
        num_bytes: int = 10,
        comes_back: bool = False,
    ) -> bool:
        if not self.ledger.ask(user, [key], 1, num_bytes, comes_back).is_kept:
            return False
        parcel = Parcel([key], num_bytes, comes_back, {key: OUTLINE})
        self.ledger.put(user, parcel, f"object {key!r}")
        return key in self.ledger.ask(user, [key], 0, 0, False).finished

    def ask(self, user: User, *keys: bytes, most: int = 9) -> Reply:
        return self.ledger.ask(user, keys, most, 0, comes_back=False)

    def is_mine(self, user: User, key: bytes) -> bool:
        return self.ask(user, key).to_make == [key]

    def has(self, user: User, key: bytes) -> bool:
        found = self.ask(user, key).finished
        self.ledger.give_up(user, [key])
        return key in found


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_one_makes_what_others_wait_for_and_all_find_it(cluster: Cluster) -> None:
    first, second = cluster.user("first"), cluster.user("second", "n2")
    assert cluster.ask(first, A, B).to_make == [A, B]
    assert cluster.ask(second, A, C) == Reply({}, [C], is_kept=True)
    assert cluster.ask(second, A) == Reply({}, [], is_kept=True)
    assert cluster.is_mine(first, A)  # its own claim
    cluster.ledger.put(first, Parcel([A, B], 20), "object")
    found = {A: Found("object", 0), B: Found("object", 1)}
    assert cluster.ask(second, B, A) == Reply(found, [], is_kept=True)
    assert cluster.ledger.used == {"n1": 20}


def test_two_actors_share_a_block_and_make_each_micro_batch_once(
    cluster: Cluster,
) -> None:
    first, second = cluster.user("first"), cluster.user("second")
    keys = [bytes([number]) for number in range(7)]
    turns = [
        cluster.ask(user, *keys, most=most).to_make
        for user, most in ((first, 2), (second, 1), (second, 9), (first, 2))
    ]
    # the first asks again without having put anything: its claims are still its own
    assert turns == [keys[:2], keys[2:3], keys[2:], keys[:2]]


def test_a_claim_ends_with_its_holder(cluster: Cluster) -> None:
    first, second = cluster.user("first", actor="x"), cluster.user("second")

    def claim() -> None:
        cluster.ledger.check_in(first, ROOM)
        assert cluster.is_mine(first, A) and not cluster.is_mine(second, A)

    claim()
    cluster.ledger.give_up(first, [A])
    assert cluster.is_mine(second, A)
    cluster.ledger.give_up(second, [A])

    claim()
    cluster.ledger.die(["first", "unknown"])  # its node has seen it
    assert cluster.is_mine(second, A)
    cluster.ledger.give_up(second, [A])

    claim()
    cluster.user("first again", actor="x")  # Ray has restarted it
    assert cluster.is_mine(second, A)
    cluster.ledger.give_up(second, [A])

    claim()
    cluster.now += 25  # it is silent
    assert cluster.is_mine(second, A)


def test_a_claim_ends_with_the_node_of_its_holder(cluster: Cluster) -> None:
    here, there = cluster.user("here"), cluster.user("there", "n2")
    assert cluster.is_mine(here, A) and cluster.is_mine(there, B)
    assert cluster.put(there, C)
    cluster.ledger.lose_node("n2")
    assert cluster.is_mine(here, B) and cluster.is_mine(here, C)
    assert not cluster.is_mine(there, A)


def test_a_claim_ends_though_its_holder_lives(cluster: Cluster) -> None:
    first, second = cluster.user("first"), cluster.user("second")
    cluster.is_mine(first, A)
    for _ in range(6):
        assert not cluster.is_mine(second, A)
        cluster.now += 5
        cluster.ledger.check_in(first, ROOM)
    assert cluster.is_mine(second, A)


def test_what_is_in_the_making_has_its_room(cluster: Cluster) -> None:
    first, second = cluster.user("first"), cluster.user("second")
    assert cluster.ledger.ask(first, [A, B], 9, 40, False).is_kept
    # no room beside these: it makes C, and others do not wait for it
    refused = cluster.ledger.ask(second, [A, C], 9, 40, False)
    assert refused == Reply({}, [C], is_kept=False)
    assert cluster.is_mine(first, C)
    cluster.ledger.give_up(first, [B, C])
    assert cluster.ledger.ask(second, [A, C], 9, 40, False).is_kept


def test_half_of_the_room_is_for_a_stream_alike_that_is_behind(
    cluster: Cluster,
) -> None:
    ahead = cluster.user("ahead", training="t")
    behind = cluster.user("behind", training="t")
    keys = [bytes([number]) for number in range(9)]
    for key in keys:
        assert cluster.put(ahead, key, 10)
    for key in (A, B, C):
        assert cluster.put(ahead, key, 10)
    # the first half is held, and of the rest the least recently used goes
    assert list(cluster.ask(behind, *keys, most=0).finished) == [*keys[:5], *keys[7:]]
    for key in (b"d", b"e", b"f", b"g", b"h"):
        # both have taken these: they make room, and the next ones are held
        assert cluster.put(ahead, key, 10)
    assert not cluster.ask(behind, *keys[:5], most=0).finished
    assert len(cluster.ask(behind, A, B, C, b"d", b"h", most=0).finished) == 5


def test_what_is_held_for_a_stream_that_never_comes_goes(cluster: Cluster) -> None:
    ahead = cluster.user("ahead", training="t")
    behind = cluster.user("behind", training="t")
    assert cluster.put(ahead, A, 50) and cluster.put(ahead, B, 50)
    assert cluster.put(ahead, C, 50) and cluster.has(behind, C)
    for _ in range(13):
        cluster.now += 10
        cluster.ledger.check_in(ahead, ROOM)
        cluster.ledger.check_in(behind, ROOM)
    assert cluster.put(ahead, b"d", 50) and cluster.put(ahead, b"e", 50)
    assert cluster.ask(behind, A, C, most=0).finished == {}


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
    assert cluster.is_mine(second, A)


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
    assert not cluster.ledger.leave("t")
    assert not cluster.ledger.is_needed
    assert second.stream == "t"


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_killed_stream_finds_all_when_it_is_resumed(
    cluster: Cluster, is_silent: bool
) -> None:
    killed = cluster.user("killed", stream="s")
    assert cluster.put(killed, A, comes_back=True)
    if is_silent:
        cluster.now += 19
        assert cluster.ledger.expire() == []
        cluster.now += 1
        assert cluster.ledger.expire() == []
    else:
        cluster.ledger.die(["killed"])
    cluster.now += 39  # as long as the objects of a node without users stay
    assert cluster.ledger.is_needed
    resumed = cluster.user("resumed", stream="t")
    assert cluster.has(resumed, A)
    cluster.now += 60
    cluster.ledger.check_in(resumed, ROOM)
    assert not cluster.ledger.leave("t")


@pytest.mark.parametrize("comes", [True, False])
def test_the_memory_waits_for_a_stream_that_is_about_to_start(
    cluster: Cluster, comes: bool
) -> None:
    cluster.ledger.expect("s", "n1")
    assert cluster.ledger.is_needed and cluster.ledger.nodes == ["n1"]
    if comes:
        cluster.now += 59
        user = cluster.user("first", stream="s")
        assert cluster.ledger.is_needed and cluster.put(user, A)
        assert not cluster.ledger.leave("s")
        cluster.ledger.expect("s", "n1")  # a message that was late
    else:
        cluster.now += 61
    assert not cluster.ledger.is_needed


def test_a_killed_stream_is_gone_when_nobody_resumes_it(cluster: Cluster) -> None:
    cluster.user("killed", stream="s")
    cluster.now += 20
    cluster.ledger.expire()
    other = cluster.user("other", stream="t")
    assert cluster.ledger.leave("t")  # it may be resumed yet
    cluster.ledger.check_in(other, ROOM)  # its actor has not ended yet
    cluster.now += 60
    assert not cluster.ledger.is_needed


def test_a_restarted_actor_is_of_the_same_stream(cluster: Cluster) -> None:
    cluster.user("first", actor="a", stream="s")
    cluster.user("second", actor="a", stream="s")
    assert not cluster.ledger.leave("s")


def test_a_validation_that_only_ended_streams_used_goes_first(cluster: Cluster) -> None:
    ended, other = cluster.user("ended"), cluster.user("other")
    assert cluster.put(ended, A, 90, comes_back=True)
    assert not cluster.put(other, B, 20)
    cluster.ledger.leave("stream of ended")
    assert cluster.put(other, B, 20) and not cluster.has(other, A)


def test_a_lost_object_is_forgotten_with_all_of_its_node(cluster: Cluster) -> None:
    here, there = cluster.user("here"), cluster.user("there", "n2")
    cluster.ledger.put(here, Parcel([A, B], 20), "object")
    assert cluster.put(here, b"d", comes_back=True) and cluster.put(there, C)
    cluster.ledger.lost([B, b"unknown"])
    assert cluster.ask(here, A, B, b"d").to_make == [A, B, b"d"]
    assert cluster.ledger.used == {"n2": 10}


def test_the_second_of_two_that_made_the_same_is_not_kept(cluster: Cluster) -> None:
    first, second = cluster.user("first"), cluster.user("second")
    assert cluster.put(first, A)
    cluster.ledger.put(second, Parcel([A], 10), "another object")
    assert cluster.ask(second, A).finished == {A: Found("object b'a'", 0)}
    assert cluster.ledger.used == {"n1": 10}


def test_what_is_on_its_way_to_a_rank_stays_until_that_has_it(cluster: Cluster) -> None:
    maker = cluster.user("maker")
    trial = cluster.user("trial")._replace(hands_over=True)
    for user in (maker, trial):
        cluster.ledger.check_in(user, 20)
    for key in (A, B):
        assert cluster.put(maker, key)
    # the actor gets what it needs, and no reference
    assert cluster.ask(trial, A).finished == {A: Found(None, 0, OUTLINE)}
    # it does not count for the limit, and only the other one makes room
    assert cluster.ledger.used == {"n1": 10}
    for key in (C, b"d"):
        assert cluster.put(maker, key)
    assert cluster.has(maker, A) and not cluster.has(maker, B)
    assert cluster.ledger.used == {"n1": 20}
    assert cluster.ledger.collect(trial.stream, [A, B]) == {A: Found("object b'a'", 0)}
    # now it counts, and the one that was used longest ago makes room
    assert cluster.ledger.used == {"n1": 20}
    for key in (B, C):
        assert cluster.put(maker, key)
    assert not cluster.has(maker, A)


@pytest.mark.parametrize("is_known", [True, False])
def test_what_an_actor_made_stays_until_its_own_rank_has_it(
    cluster: Cluster, is_known: bool
) -> None:
    other = cluster.user("other")
    maker = cluster.user("maker")._replace(hands_over=True)
    assert cluster.ask(maker, A).to_make == [A]
    if is_known:  # another one was faster
        cluster.ledger.put(other, Parcel([A], 10, outlines={A: OUTLINE}), "object")
    assert cluster.ledger.is_in_the_making(A) and not cluster.ledger.is_in_the_making(B)
    parcel = Parcel([A], 10, outlines={A: OUTLINE}, handed_over=[A])
    cluster.ledger.put(maker, parcel, "object")
    assert not cluster.ledger.is_in_the_making(A)
    cluster.ledger.check_in(other, 10)
    assert cluster.put(other, B) and cluster.put(other, C)
    assert cluster.ledger.collect(maker.stream, [A]) == {A: Found("object", 0)}
    assert cluster.put(other, B) and not cluster.has(other, A)


@pytest.mark.parametrize("has_room", [True, False])
def test_what_a_rank_was_told_to_collect_is_kept_beside_what_is_known(
    cluster: Cluster, has_room: bool
) -> None:
    other = cluster.user("other")
    maker = cluster.user("maker")._replace(hands_over=True)
    assert cluster.ask(maker, A, B, C).to_make == [A, B, C]
    # another one was faster
    cluster.ledger.put(other, Parcel([A], 10, outlines={A: OUTLINE}), "fast")
    if not has_room:
        cluster.ledger.check_in(maker, 15)
    outlines = {A: OUTLINE, B: OUTLINE}
    parcel = Parcel([A, B, C], 30, outlines=outlines, handed_over=[A, B])
    cluster.ledger.put(maker, parcel, "slow")
    found = cluster.ledger.collect(maker.stream, [A, B])
    assert found == {A: Found("fast", 0), B: Found("slow", 1)}
    # what goes with one object leaves the other's places
    cluster.ledger.check_in(maker, 1000)
    if has_room:
        assert cluster.put(other, b"d", 25) and cluster.has(other, A)
    cluster.ledger.lose_node("n1")
    assert not cluster.ledger.collect(maker.stream, [A, B, C])


@pytest.mark.parametrize("ends", ["time", "stream", "node"])
def test_what_no_rank_collects_goes(cluster: Cluster, ends: str) -> None:
    maker = cluster.user("maker")
    trial = cluster.user("trial")._replace(hands_over=True)
    for user in (maker, trial):
        cluster.ledger.check_in(user, 10)
    assert cluster.put(maker, A)
    assert A in cluster.ask(trial, A).finished
    assert cluster.put(maker, B) and cluster.put(maker, C)
    assert cluster.has(maker, A)
    cluster.now += 1
    if ends == "time":
        cluster.now += 3600
    elif ends == "stream":
        cluster.ledger.leave(trial.stream)
    else:
        cluster.ledger.lose_node("n1")
        assert not cluster.ledger.used
    cluster.ledger.check_in(maker, 10)
    assert cluster.put(maker, B)
    assert not cluster.ledger.collect(trial.stream, [A])
