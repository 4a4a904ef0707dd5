"""The tests themselves: their names, what they import, and the budget of the default tier."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiers

FILES = {
    path: ast.parse(path.read_text())
    for path in sorted(Path(__file__).parent.rglob("*.py"))
}


def test_names_have_fewer_than_70_characters() -> None:
    functions = (
        node
        for tree in FILES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    )
    assert not [
        node.name
        for node in functions
        if node.name.startswith("test_") and len(node.name) >= 70
    ]


def test_no_module_imports_from_a_module_of_tests() -> None:
    tests = {path.stem for path in FILES if path.stem.startswith("test_")} | {
        "conftest"
    }
    for path, tree in FILES.items():
        for node in ast.walk(tree):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else []
            )
            names += (
                [node.module]
                if isinstance(node, ast.ImportFrom) and node.module
                else []
            )
            assert not tests & {name.split(".")[-1] for name in names}, path


def budget(*reports: tuple[str, float, str, bool, int]) -> tiers.Budget:
    """A budget that has had reports: name, seconds, tier, whether it uses Ray, programs that it started."""
    budget = tiers.Budget()
    for name, seconds, *counts in reports:
        report: Any = SimpleNamespace(
            nodeid=name,
            duration=seconds,
            outcome="passed",
            user_properties=[("counts", counts)],
        )
        budget.pytest_runtest_logreport(report)
    return budget


def test_the_budget_names_the_slowest_of_too_many_tests_with_ray() -> None:
    num = tiers.MAX_RAY_TESTS
    others = [("other", 99.0, "system", True, 9), ("plain", 99.0, "default", False, 0)]
    assert not budget(
        *others, *((str(i), float(i), "default", True, 0) for i in range(num))
    ).excesses()
    lines = budget(
        *others, *((str(i), float(i), "default", True, 0) for i in range(num + 1))
    ).excesses()
    assert lines[0].startswith(f"{num + 1} tests of the default tier use Ray")
    assert [line.split()[-1] for line in lines[1:]] == [str(num - i) for i in range(10)]


def test_the_budget_names_those_that_start_most_programs() -> None:
    half = tiers.MAX_PROCESSES // 2
    assert not budget(
        ("a", 1, "default", False, half), ("b", 1, "default", False, half)
    ).excesses()
    lines = budget(
        ("a", 1, "default", False, half), ("b", 1, "default", False, half + 2)
    ).excesses()
    assert [line.split()[-1] for line in lines[1:]] == ["b", "a"]


def test_a_test_that_starts_ray_unseen_fails_the_run() -> None:
    counter = tiers.Counter()
    for command, starts_ray in (
        (["/usr/bin/true", "raylet"], False),
        (["/a/gcs_server", "--port=1"], True),
    ):
        counter.pytest_runtest_logstart()
        counter.count("subprocess.Popen", (command[0], command, None, None))
        assert (counter.started - counter.before, counter.starts_ray) == (1, starts_ray)
    hidden = budget()
    properties = [("counts", ["default", False, 1]), ("hides_ray", True)]
    report: Any = SimpleNamespace(
        nodeid="a", duration=1.0, outcome="passed", user_properties=properties
    )
    hidden.pytest_runtest_logreport(report)
    assert hidden.excesses() == [
        "Ray is started without the mark cluster, so beside another's: a"
    ]


def test_a_slow_machine_fails_no_run() -> None:
    slow, session = (
        budget(("a", 1e6, "default", True, 1)),
        SimpleNamespace(exitstatus=pytest.ExitCode.OK),
    )
    slow.pytest_sessionfinish(session)  # type: ignore[arg-type]
    assert session.exitstatus == pytest.ExitCode.OK
    many = budget(("a", 1.0, "default", True, 10**6))
    many.pytest_sessionfinish(session)  # type: ignore[arg-type]
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED


@pytest.mark.system
def test_programs_of_tests_end_at_ctrl_c_in_a_background_run_too() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n0",
        "-q",
        "tests/storage/test_retries.py",
        "-k",
        "ctrl_c",
    ]
    run = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert run.returncode == 0 and "2 passed" in run.stdout, run.stdout
