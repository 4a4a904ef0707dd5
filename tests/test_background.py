"""Background threads: their errors, their ends, and what goes on meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import wait

import pytest

from raypipe.background import Repeating, attended, in_background


def fail() -> None:
    raise ValueError("no")


def test_an_error_in_the_background_comes_with_the_result() -> None:
    failed = in_background("raypipe-test", fail)
    wait([failed])
    with pytest.raises(ValueError, match="no"):
        failed.result()
    with pytest.raises(ValueError, match="no"):
        attended("raypipe-test", fail, lambda: None)
    name = attended("raypipe-test", lambda: threading.current_thread().name, fail)
    assert name == "raypipe-test"


def test_a_call_that_never_ends_is_left_by_what_is_called_meanwhile() -> None:
    ended = threading.Event()
    with pytest.raises(ValueError, match="no"):
        attended("raypipe-test", ended.wait, fail)
    ended.set()


def test_a_thread_goes_on_after_an_error_and_ends_when_it_is_stopped() -> None:
    turns = threading.Semaphore(0)

    def turn() -> None:
        turns.release()
        fail()

    thread = Repeating(turn, 0.01, "raypipe-test")
    thread.start()
    for _ in range(3):
        turns.acquire()
    thread.stop()
    assert not thread.is_alive()
