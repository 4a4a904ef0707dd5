from __future__ import annotations

import json
from typing import Any

import pytest
from ray._private import worker

from raypipe.logs import configure_logs, progress, relay_progress, relayed
from raypipe.rayext import console as rays
from raypipe.train.console import RunConsole


def step(number: int, epoch: int = 0) -> dict[str, Any]:
    return {"kind": "train", "step": number, "epoch": epoch, "images_per_s": 1234.0, "wait_fraction": 0.25}


def test_a_log_has_the_first_step_and_a_line_for_each_epoch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with RunConsole(3, lambda epoch: epoch == 0, relays=False) as console:
        for epoch in range(2):
            for number in range(1, 4):
                console.show(f"epoch {epoch + 1}/2  step {number}/3", step(number + 3 * epoch, epoch))
            if epoch == 0:
                console.show("epoch 1/2  validation accuracy 0.5", {"kind": "val"})
        console.show("pool: 1 → 2 actors", {"kind": "scale"})
    assert capsys.readouterr().out.splitlines() == [
        "epoch 1/2  step 1/3",
        "epoch 1/2  step 3/3  validation accuracy 0.5",
        "epoch 2/2  step 3/3",
        "pool: 1 → 2 actors",
    ]


def test_a_log_has_more_lines_of_an_epoch_that_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("raypipe.train.console.time.monotonic", lambda: now[0])
    console = RunConsole(100, bool, relays=False)
    for number in range(1, 8):
        console.show(f"step {number}", step(number))
        now[0] += 4
    assert capsys.readouterr().out.splitlines() == ["step 1", "step 4", "step 7"]


def test_what_a_process_relays_is_read_as_it_was_told(capsys: pytest.CaptureFixture[str]) -> None:
    import logging

    relay_progress(True)
    try:
        progress(logging.getLogger("raypipe"), "two\nlines → of it", step=3, kind="train")
    finally:
        relay_progress(False)
    (line,) = capsys.readouterr().out.splitlines()
    assert relayed(line) == ("two\nlines → of it", {"step": 3, "kind": "train"})
    assert relayed("a user's print") is None


def test_rays_progress_is_shown_its_noise_dropped_and_the_rest_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[str, dict[str, Any]]] = []
    left: list[dict[str, Any]] = []
    monkeypatch.setattr(rays, "_rays_print", left.append)
    monkeypatch.setattr(rays, "_shown", lambda text, values: told.append((text, values)))
    noise = [
        "[2026-11-23 10:10:07,401 E 29387 29448] core_worker.cc:2465: Actor with class name: 'MapWorker(…)' and "
        "ID: '43f1' has constructor arguments in the object store and max_restarts > 0. If the arguments …",
        "Task MapWorker(MapBatches(TransformWorker)).submit failed. There are infinite retries remaining, so the "
        "task will be retried. Error: The actor is dead because it was killed by `ray.kill`.",
        "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1",
    ]
    rays._print({"pid": 3, "is_err": False, "lines": [*noise, '\x02["epoch 1", {"step": 3}]', "a user's print"]})
    rays._print({"pid": 3, "is_err": False, "lines": noise})
    assert told == [("epoch 1", {"step": 3})]
    assert left == [{"pid": 3, "is_err": False, "lines": ["a user's print"]}]


def test_all_lines_of_rays_processes_are_json_where_this_processes_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)  # it is put back afterwards
    rays.take_console()
    data = {
        "pid": "raylet",
        "ip": "10.0.0.1",
        "is_err": False,
        "lines": ["test_console's\nown", '{"message": "test_console\'s"}'],
    }
    configure_logs("json")
    try:
        worker.print_to_stdstream(data, ignore_prefix=True)
        written = capsys.readouterr().out.splitlines()
    finally:
        configure_logs("text")
    # A cluster of other tests may have words of its own between these, as text: its console was taken before.
    said = [json.loads(line) for line in written if "test_console's" in line]
    assert [line["message"] for line in said] == ["test_console's\nown", "test_console's"]
    assert said[0]["pid"] == "raylet" and said[0]["ip"] == "10.0.0.1"
    worker.print_to_stdstream(data | {"lines": ["another word"]}, ignore_prefix=False)
    assert "(raylet" in (shown := capsys.readouterr().out) and "another word" in shown
