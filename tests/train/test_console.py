from __future__ import annotations

import functools
import json
import logging
from typing import Any

import pytest
from ray._private import ray_logging, worker

from raypipe.logs import configure_logs
from raypipe.progress import print_progress, relay_progress
from raypipe.rayext import console as rays


def test_rays_progress_is_shown_its_noise_dropped_and_the_rest_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    relay_progress(True)
    try:
        print_progress(
            logging.getLogger("raypipe"), "two\nlines → of it", step=3, kind="train"
        )
        print_progress(logging.getLogger("raypipe"), "")
    finally:
        relay_progress(False)
    told = capsys.readouterr().out.splitlines()
    left: list[dict[str, Any]] = []
    monkeypatch.setattr(rays, "_rays_print", left.append)
    rays.begin_progress()
    noise = [
        "[2026-11-23 10:10:07,401 E 29387 29448] core_worker.cc:2465: Actor with class name: 'MapWorker(…)' and "
        "ID: '43f1' has constructor arguments in the object store and max_restarts > 0. If the arguments …",
        "Task MapWorker(MapBatches(TransformWorker)).submit failed. There are infinite retries remaining, so the "
        "task will be retried. Error: The actor is dead because it was killed by `ray.kill`.",
        "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1",
    ]
    rays._print({"pid": 3, "is_err": False, "lines": [*noise, *told, "a user's print"]})
    rays._print({"pid": 3, "is_err": False, "lines": noise})
    assert capsys.readouterr().out == "two\nlines → of it\n" and rays._ended.is_set()
    assert left == [{"pid": 3, "is_err": False, "lines": ["a user's print"]}]


def test_all_lines_of_rays_processes_are_json_where_this_processes_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # it is put back afterwards
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)
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
    assert [line["message"] for line in said] == [
        "test_console's\nown",
        "test_console's",
    ]
    assert said[0]["pid"] == "raylet" and said[0]["ip"] == "10.0.0.1"
    worker.print_to_stdstream(data | {"lines": ["another word"]}, ignore_prefix=False)
    assert "(raylet" in (shown := capsys.readouterr().out) and "another word" in shown


def test_a_console_is_taken_from_a_ray_that_is_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)
    dispatcher = ray_logging.WorkerStandardStreamDispatcher()
    monkeypatch.setattr(ray_logging, "global_worker_stdstream_dispatcher", dispatcher)
    left: list[dict[str, Any]] = []
    monkeypatch.setattr(
        rays, "_rays_print", lambda data, ignore_prefix: left.append(data)
    )
    dispatcher.add_handler(
        "ray_print_logs", functools.partial(rays._rays_print, ignore_prefix=True)
    )
    other = functools.partial(left.append)
    dispatcher.add_handler("a user's", other)
    rays.take_console()
    noise = "Actor with class name: 'MapWorker' has constructor arguments in the object store and max_restarts > 0"
    dispatcher.handlers[0][1](
        {"pid": 3, "is_err": True, "lines": [noise, "a user's print"]}
    )
    assert left == [{"pid": 3, "is_err": True, "lines": ["a user's print"]}]
    assert dispatcher.handlers[1] == ("a user's", other)
