from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from raypipe import logs
from raypipe.logs import configure_logs, log_place
from raypipe.progress import print_progress

logger = logging.getLogger("raypipe.somewhere")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    configure_logs("text")
    logs._place.clear()


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_log_line_is_one_object_with_its_place_in_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logs("json", run="mine", rank=1)
    log_place(split="train", epoch=2, step=7)
    logger.warning("%d samples\nare bad", 3, extra={"values": {"bad": 3}})
    (line,) = lines(capsys.readouterr().err)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "WARNING",
        "logger": "raypipe.somewhere",
        "message": "3 samples\nare bad",
        "run": "mine",
        "rank": 1,
        "split": "train",
        "epoch": 2,
        "step": 7,
        "bad": 3,
    }


def test_an_exception_is_part_of_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("json")
    try:
        raise ValueError("what happened")
    except ValueError:
        logger.exception("it failed")
    (line,) = lines(capsys.readouterr().err)
    assert line["exception"].endswith("ValueError: what happened")


def test_progress_is_text_or_an_object_on_standard_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_progress(logger, "step 3  loss 0.5", loss=0.5)
    configure_logs("json", run="mine")
    log_place(step=9)
    print_progress(logger, "step 3  loss 0.5", loss=0.5, step=3)
    out, err = capsys.readouterr()
    text, line = out.splitlines()
    assert text == "step 3  loss 0.5" and err == ""
    found = json.loads(line)
    assert (found["message"], found["run"], found["step"], found["loss"]) == (
        text,
        "mine",
        3,
        0.5,
    )


def test_configuring_twice_writes_once_and_text_leaves_no_trace(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = [*logging.getLogger("raypipe").handlers]
    configure_logs("json", run="mine")
    configure_logs("json", rank=0)
    logger.info("once")
    (line,) = lines(capsys.readouterr().err)
    assert (line["run"], line["rank"]) == ("mine", 0)
    configure_logs("text")
    root = logging.getLogger("raypipe")
    assert (root.handlers, root.level, root.propagate) == (
        before,
        logging.NOTSET,
        True,
    )


def test_lines_that_ray_data_writes_by_a_handler_of_its_own_are_json_too() -> None:
    stream = io.StringIO()
    handler, theirs = logging.StreamHandler(stream), logging.getLogger("ray.data")
    handler.addFilter(lambda record: not getattr(record, "hide", False))
    before = [*theirs.handlers]
    theirs.addHandler(handler)
    try:
        for _ in range(2):
            configure_logs("json", run="mine")
        theirs.error("it ended")
        theirs.error("not shown", extra={"hide": True})
        shown = lines(stream.getvalue())
    finally:
        theirs.handlers = before
    assert [(line["run"], line["logger"], line["message"]) for line in shown] == [
        ("mine", "ray.data", "it ended")
    ]
