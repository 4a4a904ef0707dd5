from __future__ import annotations

import logging

import pytest
from ray._private import services

from raypipe.rayext.ray_private import find_private, replace, replaced


def test_a_name_that_ray_lacks_is_one_line_with_the_loss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    missing = [
        "ray._private.no_module.start",
        "ray._private.services.NoClass.start",
        "ray._private.services.no_function",
    ]
    with caplog.at_level(logging.WARNING):
        for path in missing:
            for _ in range(2):
                assert find_private(path, "the start takes longer") is None
                replace(path, lambda function: None, loss="the start takes longer")
                with replaced(path, lambda _: None, loss="the start takes longer"):
                    pass
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    for path, message in zip(missing, caplog.messages, strict=True):
        assert message.endswith(f" has no {path}: the start takes longer")


def test_a_replacement_wraps_rays_function_and_is_put_back() -> None:
    path = "ray._private.services.ConsolePopen"
    before = services.ConsolePopen
    assert find_private(path, "") is before
    with replaced(path, lambda popen, number: (popen, number), 3, loss=""):
        assert services.ConsolePopen == (before, 3)
    assert services.ConsolePopen is before
