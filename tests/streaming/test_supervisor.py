from __future__ import annotations

import pytest

from raypipe.rayext.processes import Process
from raypipe.streaming.faults import Orders
from raypipe.streaming.supervisor import Supervisor

AT = "train-e0000-s000003-m001"


def with_actor(max_attempts: int) -> Supervisor:
    """It knows of one actor, which has begun nothing."""
    supervisor = Supervisor(max_attempts)
    supervisor.actor_started("a", "process 1 on 10.0.0.1")
    return supervisor


def died(supervisor: Supervisor) -> bool:
    return supervisor.actor_started("a", "another process")


def test_an_actor_that_was_killed_in_its_start_is_a_fault() -> None:
    supervisor = Supervisor(max_attempts=3)
    assert supervisor.actor_started("a", "process 1", was_restarted=True)
    assert supervisor.events(0) == [
        (
            "fault",
            "a transform actor died in its start, and was restarted (process 1)",
        )
    ]
    # the first is known: the death is told once
    assert supervisor.actor_started("a", "process 2", was_restarted=True)
    assert len(supervisor.events(0)) == 2


@pytest.mark.parametrize("leaves_first", [True, False])
def test_a_validation_that_some_ranks_leave_out_is_told_once(
    leaves_first: bool,
) -> None:
    supervisor = Supervisor(max_attempts=3)
    for epoch in range(2):
        for takes in (not leaves_first, leaves_first):
            supervisor.validates(0 if takes else 1, epoch, takes)
        supervisor.validates(2, epoch, True)
    ((_, text),) = supervisor.events(0)
    assert "rank 0 iterates the validation of epoch 0, and rank 1 does not" in text
    for takes in (True, False):
        alike = Supervisor(3)
        for rank in range(3):
            alike.validates(rank, 0, takes)
        assert alike.events(0) == []


def test_other_packages_of_a_node_are_told_once() -> None:
    supervisor = Supervisor(max_attempts=3)
    for _ in range(2):
        supervisor.packages_differ(
            "10.0.0.1 has numpy 2.0.0 instead of 2.1.0: its pixels may differ"
        )
    assert len(supervisor.events(0)) == 1


def test_after_a_death_only_its_micro_batch_is_done_carefully() -> None:
    supervisor = with_actor(max_attempts=3)
    supervisor.block_started("a", [AT])
    assert died(supervisor)
    assert supervisor.block_started("a", [AT]) == Orders(careful=True)
    assert supervisor.block_started("a", ["train-e0000-s000003-m002"]) == Orders()
    ((kind, event),) = supervisor.events(0)
    assert kind == "fault"
    for part in (AT, "process 1 on 10.0.0.1", "another process"):
        assert part in event


def test_a_sample_that_kills_twice_is_bad_and_the_attempts_begin_anew() -> None:
    supervisor = with_actor(max_attempts=4)
    supervisor.block_started("a", [AT])
    died(supervisor)
    for sample in (5, 7, 5):
        assert supervisor.block_started("a", [AT]) == Orders(careful=True)
        supervisor.announce_sample("a", AT, sample)
        died(supervisor)
    assert supervisor.block_started("a", [AT]) == Orders(careful=True, bad=(5,))
    supervisor.announce_sample("a", AT, 7)
    died(supervisor)
    assert supervisor.block_started("a", [AT]) == Orders(careful=True, bad=(5, 7))


def test_a_bad_sample_is_known_in_every_micro_batch_of_its_split() -> None:
    supervisor = with_actor(max_attempts=4)
    for careful in (False, True, True):
        supervisor.block_started("a", [AT])
        if careful:
            supervisor.announce_sample("a", AT, 5)
        died(supervisor)
    assert supervisor.block_started("b", ["train-e0001-s000000-m000"]) == Orders(
        bad=(5,)
    )
    assert supervisor.block_started("b", ["val-e0001-s000000-m000"]) == Orders()


def test_deaths_without_a_culprit_end_the_run_with_what_to_do() -> None:
    supervisor = with_actor(max_attempts=2)
    for _ in range(2):
        assert not supervisor.block_started("a", [AT]).error
        died(supervisor)
    error = supervisor.block_started("a", [AT]).error
    assert (
        AT in error
        and "2 transform actors have died" in error
        and "lower plan.micro_batch_size" in error
    )


def test_a_transform_that_kills_on_every_sample_ends_the_run() -> None:
    supervisor = with_actor(max_attempts=3)
    deaths = 0
    while not (orders := supervisor.block_started("a", [AT])).error:
        if orders.careful:
            supervisor.announce_sample("a", AT, len(orders.bad))
        died(supervisor)
        deaths += 1
    assert (
        deaths == 1 + 2 * 4
        and "4 samples are to blame" in orders.error
        and f"{deaths} transform" in orders.error
    )


def test_the_ledger_names_a_blocks_micro_batches_a_careful_actor_the_one() -> None:
    block = [AT, "train-e0000-s000005-m001", "train-e0000-s000007-m001"]
    supervisor = with_actor(max_attempts=3)
    supervisor.block_started("a", block)
    died(supervisor)
    assert (
        supervisor.block_started("a", block).careful
        and not supervisor.block_started("b", block[:1]).careful
    )
    supervisor.announce_sample("a", block[1], 5)
    died(supervisor)
    first, second = (event for _, event in supervisor.events(0))
    assert f"died in {block[0]} to {block[2]} (" in first
    assert f"died in {block[1]}, at its sample 5 (" in second


def test_a_delivered_block_costs_nothing_when_its_actor_dies() -> None:
    supervisor = with_actor(max_attempts=1)
    supervisor.block_started("a", [AT])
    supervisor.block_finished("a")
    died(supervisor)
    assert supervisor.block_started("a", [AT]) == Orders()
    assert "between two blocks" in supervisor.events(0)[0][1]


def test_a_reader_that_begins_the_same_share_again_was_restarted() -> None:
    supervisor = Supervisor(max_attempts=1)
    assert [supervisor.reader_started(task, "x") for task in "aba"] == [
        False,
        False,
        True,
    ]
    assert supervisor.events(0) == [
        ("fault", "the reader of x died, and was restarted")
    ]
    assert supervisor.events(1) == []
    supervisor.reader_finished("b")  # and then its rows were lost
    assert not supervisor.reader_started("b", "x")


def test_a_reader_that_keeps_dying_of_one_thing_ends_the_run_there() -> None:
    supervisor = Supervisor(max_attempts=3)
    supervisor.reader_started("a", "all")
    for group in (5, 7, 5, 5):
        assert not supervisor.announce_read("a", f"row group {group} of a.parquet")
        assert supervisor.reader_started("a", "all")
    assert supervisor.events(3) == [
        (
            "fault",
            "the reader of all died while it read row group 5 of a.parquet, and was restarted",
        )
    ]
    assert not supervisor.announce_read("a", "row group 4 of a.parquet")
    error = supervisor.announce_read("a", "row group 5 of a.parquet")
    assert (
        "died 3 times while it read row group 5 of a.parquet: " in error
        and "smaller row groups" in error
    )


def test_a_reader_misses_no_event_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raypipe.streaming.supervisor._MAX_EVENTS", 20)
    supervisor = Supervisor(max_attempts=3)
    read: list[tuple[str, str]] = []
    for number in range(98):
        supervisor.pool_scaled(str(number))
        if number % 7 == 6:
            read += supervisor.events(len(read))
    assert read == [("scale", str(number)) for number in range(98)]
    assert len(supervisor.events(0)) <= 20


def test_a_trainer_that_stops_before_it_calls_is_known_from_the_start() -> None:
    trainer = Process("trainer 0", 17, 1, "10.0.0.1", "a node")
    one = Supervisor(3, trainer=trainer)
    assert one._watch.state() == ({"trainer 0": trainer}, ["rank 0"])
