from __future__ import annotations

import logging

import pytest
from ray._private import node

from raypipe.rayext import tweaks
from raypipe.rayext.data_context import ours


def test_one_variable_leaves_ray_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    start = node.Node.start_api_server
    with tweaks.small_head():
        assert node.Node.start_api_server is not start
    assert node.Node.start_api_server is start
    monkeypatch.setenv("RAYPIPE_TWEAKS", "0")
    with tweaks.small_head():
        assert node.Node.start_api_server is start


def test_the_console_has_no_lines_of_raypipes_executions() -> None:
    record = logging.makeLogRecord({"msg": "execution finished"})
    assert tweaks._hide_ours(record) and not hasattr(record, "hide")
    with ours():
        assert tweaks._hide_ours(record) and record.hide
