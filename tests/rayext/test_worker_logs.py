from __future__ import annotations

import json
import logging
import sys
from typing import Any, TextIO

import pytest
from ray._private import worker

from raypipe.logs import configure_logs
from raypipe.progress import print_progress, relay_progress, spared_output
from raypipe.rayext import worker_logs


@pytest.fixture
def rays_lines(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The lines that Ray itself prints, of those that raypipe takes."""
    printed: list[dict[str, Any]] = []

    def print_logs(data: dict[str, Any], to: TextIO, ignore_prefix: bool) -> None:
        printed.append(data | {"is_err": to is sys.stderr})

    monkeypatch.setattr(worker, "print_worker_logs", worker_logs._printing(print_logs))
    return printed


def test_all_lines_of_rays_processes_are_json_where_this_processes_are(
    capsys: pytest.CaptureFixture[str], rays_lines: list[dict[str, Any]]
) -> None:
    data = {
        "pid": "raylet",
        "ip": "10.0.0.1",
        "is_err": False,
        "lines": ["test_logs's\nown", '{"message": "test_logs\'s"}'],
    }
    configure_logs("json")
    try:
        worker.print_to_stdstream(data, ignore_prefix=True)
        written = capsys.readouterr().out.splitlines()
    finally:
        configure_logs("text")
    # A cluster of other tests may print between these, as text: its lines were taken before.
    told = [json.loads(line) for line in written if "test_logs's" in line]
    assert [line["message"] for line in told] == ["test_logs's\nown"]
    assert told[0]["pid"] == "raylet" and told[0]["ip"] == "10.0.0.1"
    assert [data["lines"] for data in rays_lines] == [['{"message": "test_logs\'s"}']]
    worker.print_to_stdstream(data | {"lines": ["another word"]}, ignore_prefix=False)
    assert rays_lines[1]["lines"] == ["another word"]


def test_lines_that_look_like_faults_of_each_stream_are_not_printed(
    rays_lines: list[dict[str, Any]],
) -> None:
    noise = "core_worker.cc:2465: Actor … has constructor arguments in the object store"
    data = {"pid": 7, "is_err": True, "lines": [noise, "a fault"]}
    worker.print_to_stdstream(data, ignore_prefix=True)
    assert [data["lines"] for data in rays_lines] == [["a fault"]]


@pytest.mark.parametrize("pid", ["raylet", "autoscaler"])
def test_rays_own_messages_are_not_in_the_output_of_a_program(
    rays_lines: list[dict[str, Any]], pid: str
) -> None:
    message = {"pid": pid, "is_err": False, "lines": ["a warning"]}
    worker.print_to_stdstream(message, ignore_prefix=False)
    assert rays_lines == [message | {"is_err": True}]


def test_a_workers_print_is_in_a_programs_output_but_not_in_a_result(
    rays_lines: list[dict[str, Any]],
) -> None:
    line = {"pid": 3, "is_err": False, "lines": ["a user's print"]}
    worker.print_to_stdstream(line, ignore_prefix=False)
    with spared_output():
        worker.print_to_stdstream(line, ignore_prefix=False)
    assert [data["is_err"] for data in rays_lines] == [False, True]


def test_progress_is_printed_without_a_prefix_until_its_end(
    capsys: pytest.CaptureFixture[str], rays_lines: list[dict[str, Any]]
) -> None:
    relay_progress(True)
    try:
        logger = logging.getLogger("raypipe")
        print_progress(logger, "two\nlines → of it", step=3, kind="train")
        print_progress(logger, "")
    finally:
        relay_progress(False)
    told = capsys.readouterr().out.splitlines()
    worker_logs.begin_progress()
    data = {"pid": 3, "is_err": False, "lines": [*told, "a user's print"]}
    worker.print_to_stdstream(data, ignore_prefix=False)
    assert capsys.readouterr().out == "two\nlines → of it\n"
    assert [data["lines"] for data in rays_lines] == [["a user's print"]]
    assert worker_logs._progress_ended.is_set()
