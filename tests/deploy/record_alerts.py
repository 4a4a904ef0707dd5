"""Record what three real streams export, as tests/deploy/alerts_recorded.yaml: one that is in order, one whose
transform is slow, and one whose transform actors are stopped after a while.

    python tests/deploy/record_alerts.py

Each is recorded for a minute and told as if it had been 20 times slower in all: times between scrapes, seconds
counted, and Unix times, which begin at 0 as promtool's clock does. So seconds reach thresholds of minutes.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "tests/deploy")]
from local_head import RAY_ON_THIS_MACHINE  # noqa: E402

SCRAPE_S, SCRAPES, STOPPED_AFTER, SLOWER = 2.0, 28, 6, 20
os.environ |= {"RAY_metrics_report_interval_ms": "1000", **RAY_ON_THIS_MACHINE}

import raypipe  # noqa: E402  isort: skip  it sets what Ray reads at import
import numpy as np  # noqa: E402
import psutil  # noqa: E402
import ray  # noqa: E402
from alert_rules import selected  # noqa: E402
from pictures import CLASSES, picture  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

SELECTED = selected()
LABELS = ("run", "rank", "split", "state", "kind", "reason", "Location")


def slow(image: np.ndarray) -> np.ndarray:
    time.sleep(0.2)
    return image[:12, :12]


def quick(image: np.ndarray) -> np.ndarray:
    return image[:12, :12]


def scrape(run: str) -> dict[str, float]:
    """Series → value, of the metrics that alerts ask for."""
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=20) as answer:
        lines = [
            line
            for line in answer.read().decode().splitlines()
            if line.partition("{")[0] in SELECTED
        ]
    # of some lines alone: there are thousands
    families = text_string_to_metric_families("\n".join([*lines, ""]))
    found: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples):
        if sample.labels.get("run", run) == run:
            labels = ", ".join(
                f'{name}="{sample.labels[name]}"'
                for name in LABELS
                if name in sample.labels
            )
            series = f"{sample.name}{{{labels}}}"
            found[series] = found.get(series, 0) + sample.value
    return found


def slower(series: str, value: float, began: float) -> float:
    """A value of the run that is SLOWER times as slow."""
    since = value - began if "timestamp" in series else value
    return since * (SLOWER if "seconds" in series else 1)


def signal_actors(number: signal.Signals) -> None:
    """Send a signal to all transform actors."""
    found = [
        each
        for each in psutil.Process().children(recursive=True)
        if "MapWorker" in " ".join(each.cmdline()[:1])
    ]
    assert found, "no transform actor"
    for process in found:
        process.send_signal(number)


def record(run: str, transform: Any) -> list[dict[str, float]]:
    """What one stream exports, scrape by scrape."""
    spec = raypipe.open_stream(
        raypipe.stores.base.MemoryStore(
            [picture(i) for i in range(64)], [0] * 64, classes=CLASSES
        ),
        None,
        plan=raypipe.PlanConfig(epochs=1000, micro_batch_size=8, global_batch_size=8),
        train_transform=transform,
        pool=raypipe.PoolConfig(max_in_flight=6),
        run=run,
    )
    loader, scrapes, done = (
        raypipe.loader(spec, max_actors=1),
        list[dict[str, float]](),
        threading.Event(),
    )

    def watch() -> None:
        began = time.time()
        try:
            for number in range(SCRAPES):
                time.sleep(max(0.0, began + number * SCRAPE_S - time.time()))
                if run == "hung" and number == STOPPED_AFTER:
                    signal_actors(signal.SIGSTOP)
                scrapes.append(
                    {
                        series: slower(series, value, began)
                        for series, value in scrape(run).items()
                    }
                )
        finally:
            done.set()
            signal_actors(signal.SIGCONT)

    with tempfile.TemporaryDirectory() as folder:
        threading.Thread(target=watch, daemon=True).start()
        for number, batch in enumerate(
            batch for epoch in loader.epochs() for batch in epoch.train
        ):
            if number % 20 == 0:
                loader.save(folder)
            if done.is_set():
                break
            time.sleep(0.2)
            del batch
    loader.close()
    return scrapes


def written(run: str, scrapes: list[dict[str, float]], alert: str) -> str:
    """A test of promtool's."""
    lines = [
        f"  - name: {run}",
        f"    interval: {SCRAPE_S * SLOWER:g}s",
        "    input_series:",
    ]
    for series in sorted(set().union(*scrapes)):
        values = [each.get(series) for each in scrapes]
        texts = [
            f"{value:.6g}"
            if value is not None
            else "stale"
            if before is not None
            else "_"
            for before, value in itertools.pairwise([None, *values])
        ]
        lines += [f"      - series: {series}", f'        values: "{" ".join(texts)}"']
    lines += ["    promql_expr_test:", '      - expr: ALERTS{alertstate="firing"}']
    lines += [f"        eval_time: {(SCRAPES - 1) * SCRAPE_S * SLOWER:g}s"]
    if not alert:
        return "\n".join([*lines, "        exp_samples: []"])
    name, severity = alert.split()
    labels = (
        f'alertname="{name}", alertstate="firing", run="{run}", severity="{severity}"'
    )
    return "\n".join(
        [*lines, f"        exp_samples: [{{labels: 'ALERTS{{{labels}}}', value: 1}}]"]
    )


def main() -> None:
    ray.init(
        num_cpus=2,
        object_store_memory=100 << 20,
        logging_level="ERROR",
        include_dashboard=False,
    )
    runs = (
        ("healthy", quick, ""),
        ("starved", slow, "RaypipeStarved ticket"),
        ("hung", quick, "RaypipeHung page"),
    )
    text = "# Made by tests/deploy/record_alerts.py.\nrule_files: [../../deploy/alerts.yaml]\n"
    text += f"evaluation_interval: {SCRAPE_S * SLOWER:g}s\ntests:\n"
    for run, transform, alert in runs:
        text += written(run, record(run, transform), alert) + "\n"
        print(f"{run} is recorded", flush=True)
    (Path(__file__).parent / "alerts_recorded.yaml").write_text(text)


if __name__ == "__main__":
    main()
