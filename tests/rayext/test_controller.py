"""The driver watches Ray Train's controller and the head of the cluster."""

from __future__ import annotations

import socket

import pytest

from raypipe.rayext import controller
from raypipe.rayext.controller import DriverWatch
from raypipe.rayext.head import Head


@pytest.fixture(autouse=True)
def no_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question to a lost head does not return: the thread that counts its silence asks none."""
    monkeypatch.setattr(controller, "process_of", pytest.fail)


def test_a_silent_head_is_told_ever_less_often_and_ends_the_run_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reasons: list[str] = []
    watch = DriverWatch(None, 100.0, reasons.append)
    watch._answered_at = 0.0
    for now in range(100):
        watch.turn(float(now))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(";")[0].split()[-2] for line in lines] == [
        "10",
        "20",
        "40",
        "80",
    ] and not reasons
    assert lines[0].endswith("the run ends in 90 s (pool.stall_timeout_s)")
    watch.turn(100.0)
    assert reasons == ["the head of the Ray cluster has not answered for 100 s"]


def test_a_dead_head_ends_the_run_before_ray_ends_its_driver(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        head = f"127.0.0.1:{listening.getsockname()[1]}"
        assert not Head(head).refuses(1.0)
    assert Head(head).refuses(1.0)
    reasons: list[str] = []
    watch = DriverWatch(None, 900.0, reasons.append)
    watch._answered_at, watch._is_gone = 0.0, True
    for now in range(31):
        watch.turn(float(now))
    assert reasons == [
        "the head of the Ray cluster is gone, and refuses connections, for 30 s"
    ]
    assert "the run ends in 20 s (Ray's limit)" in capsys.readouterr().out


def test_a_head_that_answers_again_is_told_anew_when_it_falls_silent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    watch = DriverWatch(None, 100.0, lambda reason: None)
    for answered_at in (0.0, 50.0):
        watch._answered_at = answered_at
        for second in range(15):
            watch.turn(answered_at + second)
    assert len(capsys.readouterr().out.splitlines()) == 2
