"""Tiers of tests: hooks of pytest, which tests/conftest.py takes over.

pytest                              the default tier
pytest --tier system                own clusters, jobs in processes of their own, faults
pytest --tier default --tier pages  several
pytest --tier world                 a folder of images, RAYPIPE_WORLD: one process for each file
pytest --tier soak                  everything in its long form: hours
pytest tests/test_jobs.py           a file that is named: all that is no soak
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import pytest

TIERS = ("default", "system", "pages", "world", "soak")

SHARED_CLUSTER = "ray_cluster"
"""The fixture of the one cluster that tests of the default tier may use."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        action="append",
        choices=TIERS,
        help="tests to run; may be repeated. Without: default, and of files that are named all but soak",
    )


def tiers(config: pytest.Config) -> set[str]:
    """The tiers that run: soak has the long forms of all others' tests, and so all of them."""
    chosen = set(config.getoption("--tier") or ["default"])
    if not config.getoption("--tier") and any(
        ".py" in argument for argument in config.args
    ):
        chosen = set(TIERS) - {"soak"}
    return set(TIERS) if "soak" in chosen else chosen


def is_soak(config: pytest.Config) -> bool:
    """Whether tests with a short and a long form run the long one."""
    return "soak" in tiers(config)


def tier_of(item: pytest.Item) -> str:
    """By its marks; a test with a cluster of its own is of the system, whether marked or not."""
    for tier in ("soak", "pages", "world", "system"):
        if item.get_closest_marker(tier):
            return tier
    has_own = item.get_closest_marker("cluster") and SHARED_CLUSTER not in getattr(
        item, "fixturenames", ()
    )
    return "system" if has_own else "default"


def in_system(values: Iterable[Any], *slow: Any) -> list[Any]:
    """Values to parametrize with, of which the slow ones are of the tier system."""
    return [
        pytest.param(value, marks=pytest.mark.system) if value in slow else value
        for value in values
    ]


def all_but_one_in_system(values: Iterable[Any]) -> list[Any]:
    """Values to parametrize with, of which the first is of the default tier, and the others of system."""
    first, *others = values
    return in_system([first, *others], *others)


def pytest_configure(config: pytest.Config) -> None:
    starts = RayStarts()
    config.pluginmanager.register(starts)
    sys.addaudithook(starts.see)


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark those that use the shared cluster, and leave the tests of the tiers that run."""
    for item in items:
        if SHARED_CLUSTER in getattr(item, "fixturenames", ()):
            item.add_marker("cluster")
    chosen = tiers(config)
    if others := [item for item in items if tier_of(item) not in chosen]:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if tier_of(item) in chosen]


class RayStarts:
    """Refuses to start Ray in a test without the mark cluster, which would run beside another's."""

    allowed = True

    def see(self, event: str, arguments: tuple[object, ...]) -> None:
        is_ray = event == "subprocess.Popen" and "gcs_server" in str(arguments[1])
        if is_ray and not self.allowed:
            raise RuntimeError("Ray is started in a test without the mark cluster")

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.allowed = item.get_closest_marker("cluster") is not None
