"""Tiers of tests, and the budget of the first: hooks of pytest, which tests/conftest.py takes over.

pytest                              the default tier
pytest --tier system                own clusters, jobs in processes of their own, faults
pytest --tier default --tier pages  several
pytest --tier world                 a folder of images, RAYPIPE_WORLD: one process for each file
pytest --tier soak                  everything in its long form: hours
pytest tests/test_jobs.py           a file that is named: all that is no soak
"""

from __future__ import annotations

import sys
from collections.abc import Generator

import pytest

TIERS = ("default", "system", "pages", "world", "soak")

SHARED_CLUSTER = "ray_cluster"
"""The fixture of the one cluster that tests of the default tier may use."""

MAX_RAY_TESTS = 160
MAX_PROCESSES = 200
"""How many tests of the default tier use Ray, and how many programs its tests start: a second or more for each.
Beyond these counts a run fails and names the slowest; beyond this time it warns, since a machine may be slow."""

MAX_SECONDS = 960
"""Of all tests of the default tier, one after the other: 8 minutes on two cores."""


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


def pytest_configure(config: pytest.Config) -> None:
    counter = Counter()
    config.pluginmanager.register(counter)
    sys.addaudithook(counter.count)
    if not hasattr(config, "workerinput"):  # as a worker of pytest-xdist has
        config.pluginmanager.register(Budget())


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark those that use the shared cluster, and leave the tests of the tiers that run."""
    for item in items:
        if SHARED_CLUSTER in getattr(item, "fixturenames", ()):
            item.add_marker("cluster")
    chosen = tiers(config)
    if others := [item for item in items if tier_of(item) not in chosen]:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if tier_of(item) in chosen]


class Counter:
    """Programs that tests start in one of pytest's processes; registered in each."""

    def __init__(self) -> None:
        self.started = self.before = 0
        self.starts_ray = False

    def count(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "subprocess.Popen":
            self.started += 1
            self.starts_ray |= "gcs_server" in str(arguments[1])

    def pytest_runtest_logstart(self) -> None:
        self.before, self.starts_ray = self.started, False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        if call.when == "teardown":
            uses_ray = item.get_closest_marker("cluster") is not None
            item.user_properties.append(
                ("counts", [tier_of(item), uses_ray, self.started - self.before])
            )
            item.user_properties.append(("hides_ray", self.starts_ray and not uses_ray))
        return (yield)


class Budget:
    """What the default tier's tests take, in all processes; registered where the summary is printed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.processes: dict[str, int] = {}
        self.ray: set[str] = set()
        self.hides_ray: set[str] = set()
        self.default: set[str] = set()
        self.skipped: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = (
            self.seconds.get(report.nodeid, 0.0) + report.duration
        )
        tier, uses_ray, processes = dict(report.user_properties).get(
            "counts", ("", False, 0)
        )
        self.hides_ray |= (
            {report.nodeid} if dict(report.user_properties).get("hides_ray") else set()
        )
        self.skipped |= {report.nodeid} if report.outcome == "skipped" else set()
        if tier == "default" and report.nodeid not in self.skipped:
            self.default.add(report.nodeid)
            self.processes[report.nodeid] = processes
            self.ray |= {report.nodeid} if uses_ray else set()

    def excesses(self) -> list[str]:
        """Lines about what there is too much of; empty if there is none."""
        lines, num_processes = [], sum(self.processes.values())
        lines += [
            f"Ray is started without the mark cluster, so beside another's: {n}"
            for n in self.hides_ray
        ]
        if len(self.ray) > MAX_RAY_TESTS:
            lines += [
                f"{len(self.ray)} tests of the default tier use Ray, over {MAX_RAY_TESTS}; the slowest:"
            ]
            lines += self._slowest(self.ray)
        if num_processes > MAX_PROCESSES:
            lines += [
                f"the default tier starts {num_processes} programs, over {MAX_PROCESSES}; most of them:"
            ]
            most = sorted(self.processes, key=self.processes.__getitem__, reverse=True)
            lines += [f"{self.processes[name]:6}    {name}" for name in most[:10]]
        return lines

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.excesses() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        lines, seconds = (
            self.excesses(),
            sum(self.seconds[name] for name in self.default),
        )
        if seconds > MAX_SECONDS:
            lines += [
                f"the default tier took {seconds:.0f} s of tests, over {MAX_SECONDS}; the slowest:"
            ]
            lines += self._slowest(self.default)
        if lines:
            terminalreporter.section(
                "budget of the default tier, tests/support/tiers.py"
            )
            terminalreporter.write("".join(f"{line}\n" for line in lines))

    def _slowest(self, names: set[str]) -> list[str]:
        ordered = sorted(names, key=self.seconds.__getitem__, reverse=True)
        return [f"{self.seconds[name]:6.1f} s  {name}" for name in ordered[:10]]
