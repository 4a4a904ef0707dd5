"""An actor: its counts, and its time limit with a clock of the test; test_guard.py has real ones."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raypipe.plan.places import MicroBatchId
from raypipe.storage import retries
from raypipe.streaming import worker
from raypipe.streaming.worker import Guard

AT = MicroBatchId("train", 0, 0, 0)


class Process:
    """As much of Ray, the clock and faulthandler as a guard uses; what it asks of the last is in `calls`,
    and what it tells the Supervisor in `told`."""

    def __init__(self) -> None:
        self.now = 100.0
        self.calls: list[Any] = []
        self.told: list[Any] = []  # to the Supervisor

    def installed(self, monkeypatch: pytest.MonkeyPatch) -> Process:
        context = SimpleNamespace(get_actor_id=lambda: "an actor")
        handler = SimpleNamespace(
            dump_traceback_later=lambda seconds, exit, file: self.calls.append(
                (seconds, exit)
            ),
            cancel_dump_traceback_later=lambda: self.calls.append("ended"),
        )
        monkeypatch.setattr(
            worker,
            "ray",
            SimpleNamespace(get=lambda it: it, get_runtime_context=lambda: context),
        )
        monkeypatch.setattr(worker, "this_process", lambda role: SimpleNamespace(pid=1))
        monkeypatch.setattr(worker, "was_restarted", lambda: False)
        monkeypatch.setattr(worker, "faulthandler", handler)
        monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: self.now))
        return self

    def guard(self, time_limit_s: float) -> Guard:
        names = ("actor_started", "process_joined", "block_started")
        methods = {name: self._method(name) for name in names}
        return Guard(SimpleNamespace(**methods), time_limit_s)

    def _method(self, name: str) -> SimpleNamespace:
        def remote(*arguments: Any) -> bool:
            self.told.append((name, *arguments))
            return False

        return SimpleNamespace(remote=remote)

    def block(self, guard: Guard, *seconds: float) -> list[Any]:
        """What a block asks of faulthandler that attempts a micro-batch at each of these times."""
        self.calls.clear()
        with guard.block((AT,)):
            # a shard that is fetched starts the limit again, too
            assert retries.on_progress
            for self.now in seconds:
                retries.report_progress()
        assert not retries.on_progress
        return list(self.calls)


def test_a_process_is_watched_before_its_first_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Process().installed(monkeypatch)
    guard = process.guard(2.0)
    assert process.told[-1] == ("process_joined", "an actor", guard._process)


def test_a_time_limit_ends_with_its_block_also_by_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Process().installed(monkeypatch)
    guard = process.guard(2.0)
    with (
        pytest.raises(ValueError, match="of the transform"),
        guard.block((AT,)),
    ):
        retries.report_progress()
        raise ValueError("of the transform")
    assert process.calls == [(2.25, True), "ended"] and not retries.on_progress


def test_an_actor_counts_what_it_has_made_and_what_was_bad() -> None:
    counted: dict[str, float] = {}
    one: Any = worker.TransformWorker.__new__(worker.TransformWorker)
    one._metrics = SimpleNamespace(
        add=lambda amounts, split: counted.update(amounts, **{split: 1}),
        add_storage=lambda role: None,
    )
    made = SimpleNamespace(position=AT, num_remembered=0, read_s=0.5, work_s=2.0)
    known = SimpleNamespace(position=AT, num_remembered=1, read_s=0.0, work_s=0.25)
    bad = [SimpleNamespace(substitute=substitute) for substitute in (3, None, 0)]
    one._count([made, known, made], bad)
    assert counted == {
        "actor_micro_batches_total": 2,
        "actor_remembered_total": 1,
        "actor_read_seconds_total": 1.0,
        "actor_work_seconds_total": 4.25,
        "bad_samples_total": 3,
        "substituted_samples_total": 2,
        "train": 1,
    }


@pytest.mark.parametrize(
    ("queued_s", "seconds"), [((10.0, 10.0), 2.0), ((10.0, 13.0), 0.5), ((0.0, 9.0), 0)]
)
def test_the_size_of_blocks_does_not_follow_what_runs_beside(
    monkeypatch: pytest.MonkeyPatch, queued_s: tuple[float, float], seconds: float
) -> None:
    seen = iter(queued_s)
    monkeypatch.setattr(worker, "_queued_s", lambda: next(seen))
    row = {"image": np.zeros(8, np.uint8)}
    monkeypatch.setattr(worker, "block_row", lambda batches, arrays: row)
    batch = SimpleNamespace(
        position=AT, num_remembered=0, read_s=0.5, work_s=2.0, folder_bytes=0
    )
    measured: list[Any] = []
    one: Any = worker.TransformWorker.__new__(worker.TransformWorker)
    vars(one).update(
        _guard=SimpleNamespace(
            block=lambda block: contextlib.nullcontext(worker.NO_ORDERS)
        ),
        _recall=None,
        _maker=SimpleNamespace(
            block=lambda *_, **__: ([batch, batch], [], {}),
            settle=lambda *_: None,
        ),
        _metrics=SimpleNamespace(add=lambda *_, **__: None, add_storage=lambda _: None),
        _supervisor=SimpleNamespace(
            block_measured=SimpleNamespace(remote=lambda *args: measured.append(args))
        ),
        _num_blocks=1,
    )
    one._made(([AT, AT], None, 0.0, 0.0))
    assert measured == [("train", seconds, 4)]
