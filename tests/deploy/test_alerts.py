"""Alerts fire on recorded runs that hang or starve, and on no other; they ask for metrics that there are.

The series and what is expected are in promtool's own format, so that `promtool test rules` judges the same.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from raypipe.metrics.prometheus import METRICS

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from alert_rules import RULES, firing, rules, seconds, selectors  # noqa: E402  isort: skip

FILES = [HERE / "alerts_recorded.yaml", HERE / "alerts_test.yaml"]
GIVEN = [yaml.safe_load(path.read_text()) for path in FILES]
TESTS = [
    (test, seconds(given["evaluation_interval"]))
    for given in GIVEN
    for test in given["tests"]
]


@pytest.mark.parametrize(
    ("test", "every_s"), TESTS, ids=[test["name"] for test, _ in TESTS]
)
def test_of_each_series_those_alerts_fire_that_it_names(
    test: dict[str, Any], every_s: float
) -> None:
    for asked in test["promql_expr_test"]:
        expected = [
            dict(re.findall(r'(\w+)="([^"]*)"', sample["labels"]))
            for sample in asked["exp_samples"]
        ]
        found = firing(test, every_s, seconds(asked["eval_time"]))
        assert [{**alert, "alertstate": "firing"} for alert in found] == expected


def test_recorded_runs_let_each_alert_fire_somewhere() -> None:
    assert [test["name"] for test in GIVEN[0]["tests"]] == [
        "healthy",
        "starved",
        "hung",
    ]
    fired = {
        name
        for path in FILES
        for name in re.findall(r'ALERTS{alertname="(\w+)"', path.read_text())
    }
    assert fired == {rule["alert"] for rule in rules()}


def test_no_alert_fires_at_any_time_of_the_healthy_run() -> None:
    healthy, every_s = TESTS[0]
    for turn in range(28):
        assert not firing(healthy, every_s, turn * every_s)


def test_rules_ask_for_metrics_and_labels_that_are_exported() -> None:
    of_ray = {"ray_object_store_memory": {"Location", "SessionName"}}
    for node in selectors():
        labels = of_ray.get(node.name) or METRICS[node.name.removeprefix("ray_")].labels
        assert {matcher.name for matcher in node.matchers.matchers} <= set(labels), (
            node.name
        )


def test_promtool_agrees() -> None:
    promtool = shutil.which("promtool")
    if not promtool:
        pytest.skip("promtool of Prometheus is not on PATH")
    for command in (["check", "rules", RULES], ["test", "rules", *FILES]):
        done = subprocess.run(
            [promtool, *command],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
