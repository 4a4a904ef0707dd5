"""Alerts fire on recorded runs that hang or starve, and on no other; they ask for metrics that there are.

Runs, and the alerts that each raises, are in the format of Prometheus's `promtool`, which `.ci/run` gets.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from raypipe.metrics.prometheus import METRICS

HERE = Path(__file__).parent
RUNS = [HERE / "alerts_recorded.yaml", HERE / "alerts_test.yaml"]
ALERTS = HERE.parents[1] / "deploy" / "alerts.yaml"
RULES = [
    rule
    for group in yaml.safe_load(ALERTS.read_text())["groups"]
    for rule in group["rules"]
]


def test_of_each_run_those_alerts_fire_that_it_names() -> None:
    promtool = shutil.which("promtool")
    if not promtool:
        pytest.skip("promtool of Prometheus is not on PATH")
    for command in (["check", "rules", ALERTS], ["test", "rules", *RUNS]):
        done = subprocess.run([promtool, *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_recorded_runs_let_each_alert_fire_somewhere() -> None:
    named = "".join(path.read_text() for path in RUNS)
    fired = re.findall(r'ALERTS{alertname="(\w+)"', named)
    assert set(fired) == {rule["alert"] for rule in RULES}


def test_rules_ask_for_metrics_and_labels_that_are_exported() -> None:
    of_ray = {"ray_object_store_memory": {"Location", "SessionName"}}
    for rule in RULES:
        asked = re.findall(r"\b(ray_\w+)(?:{([^}]*)})?", rule["expr"])
        assert asked, rule["alert"]
        for name, matchers in asked:
            labels = of_ray.get(name) or METRICS[name.removeprefix("ray_")].labels
            assert set(re.findall(r"(\w+)=", matchers)) <= set(labels), name
