"""What is exported is what happened, and the documents and the dashboard know the same names."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import ray
import without_ray
from prometheus_client.parser import text_string_to_metric_families
from ray.dashboard.modules.reporter.reporter_agent import METRICS_GAUGES
from ray.util import metrics as ray_metrics

from raypipe.config import AugmentConfig, PlanConfig, PoolConfig, TransformConfig
from raypipe.logs import configure_logs
from raypipe.metrics.prometheus import METRICS
from raypipe.storage.retries import take_counts
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.handover import loader
from raypipe.streaming.loader import Loader
from raypipe.streaming.opening import open_stream
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.supervisor import start_supervisor

from pictures import CLASSES, picture  # isort: skip

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "raypipe.json").read_text())
RUN = "exported"


class Scrape:
    """What the node serves: name → [(labels, value)]."""

    def __init__(self) -> None:
        (node,) = ray.nodes()
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(url, timeout=20) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        self.samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in families:
            for sample in family.samples:
                self.samples.setdefault(sample.name, []).append(
                    (sample.labels, sample.value)
                )

    def value(self, name: str, **labels: str) -> float | None:
        """The sum over a run's series with these labels; None where there are none."""
        wanted = {"run": RUN, **labels}.items()
        values = [
            value
            for found, value in self.samples.get(f"ray_{name}", [])
            if wanted <= found.items()
        ]
        return sum(values) if values else None


def eventually(holds: Callable[[Scrape], bool], seconds: float = 60) -> Scrape:
    """The first scrape of which something holds, or the last one. A new cluster exports nothing yet."""
    deadline = time.monotonic() + seconds
    while True:
        is_late = time.monotonic() > deadline
        try:
            scrape = Scrape()
            if is_late or holds(scrape):
                return scrape
        except OSError:
            if is_late:
                raise
        time.sleep(0.5)


def store(num: int, bad: set[int]) -> MemoryStore:
    return MemoryStore(
        [b"" if i in bad else picture(i) for i in range(num)],
        [0] * num,
        classes=CLASSES,
    )


@pytest.fixture(scope="module")
def spec(ray_cluster: None) -> StreamSpec:
    """2 epochs of 64 training samples, 2 of them bad, and 20 for validation, 1 of them bad."""
    return open_stream(
        store(64, {3, 17}),
        store(20, {5}),
        plan=PlanConfig(epochs=2, micro_batch_size=8, global_batch_size=16),
        transform=TransformConfig(train="small", val="resize", size=12),
        pool=PoolConfig(
            max_in_flight=6, head_start=0
        ),  # what the pool does is exported
        run=RUN,
        log_format="json",
    )


@pytest.fixture(scope="module")
def counted() -> Iterator[Counter[tuple[str, str]]]:
    """What this process gives to Ray: (counter, split) → sum. Ray's processes send their node's agent what was
    added since they last did, and what does not arrive is not sent again: what is exported may be less.
    """
    sums: Counter[tuple[str, str]] = Counter()
    inc = ray_metrics.Counter.inc

    def noted(counter: Any, value: float, tags: dict[str, str]) -> None:
        sums[counter.info["name"], tags.get("split", "")] += value  # type: ignore[assignment]
        inc(counter, value, tags)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_metrics.Counter, "inc", noted)
        yield sums


@pytest.fixture(scope="module")
def stopped(
    spec: StreamSpec, counted: Counter[tuple[str, str]]
) -> Iterator[tuple[Loader, Any, Scrape]]:
    """A stream whose consumer stands still after its first micro-batch, and what is exported then."""
    take_counts()  # of what earlier tests of this process did in storage
    probe = ray_metrics.Gauge("probe")

    def is_exported(scrape: Scrape) -> bool:
        probe.set(1.0)
        return "ray_probe" in scrape.samples

    eventually(is_exported)  # a local cluster's first seconds are not
    stream = loader(spec, max_actors=1, augment=AugmentConfig())
    stream.metrics.record("train", loss=0.5, lr=0.01)
    batches = without_ray.every_batch(stream)
    next(batches)
    scrape = eventually(
        lambda s: (
            s.value("raypipe_stream_waiting")
            == s.value("raypipe_stream_in_flight")
            == 6
        )
    )
    yield stream, batches, scrape
    stream.close()
    configure_logs("text")  # this process was the stream's rank


@pytest.fixture(scope="module")
def ended(stopped: tuple[Loader, Any, Scrape], spec: StreamSpec) -> Scrape:
    """What is exported after the end of the stream, and after some faults of its run."""
    _, batches, _ = stopped
    supervisor = start_supervisor(RUN, "json")
    ray.get([supervisor.note.remote("one died", "actor_died") for _ in range(2)])
    for _ in batches:
        pass
    total = spec.plan.num_micro_batches(spec.plan.start())
    return eventually(
        lambda s: (
            s.value("raypipe_stream_blocks_total")
            == (s.value("raypipe_actor_micro_batches_total") or 0)
            + (s.value("raypipe_actor_remembered_total") or 0)
            == total
            and s.value("raypipe_trainer_images_total") == 2 * (64 + 20)
            and s.value("raypipe_stream_faults_total") == 2
        )
    )


@pytest.mark.cluster
def test_gauges_tell_where_a_stream_stands(stopped: tuple[Loader, Any, Scrape]) -> None:
    _, _, scrape = stopped
    assert (
        scrape.value("raypipe_stream_in_flight")
        == scrape.value("raypipe_stream_waiting")
        == 6
    )
    states = {
        s: scrape.value("raypipe_stream_actors", state=s)
        for s in ("running", "restarting", "pending")
    }
    assert states == {"running": 1, "restarting": 0, "pending": 0}


@pytest.mark.cluster
def test_counters_tell_what_has_happened(
    ended: Scrape, counted: Counter[tuple[str, str]], spec: StreamSpec
) -> None:
    assert counted["raypipe_trainer_images_total", "train"] == 2 * 64
    assert counted["raypipe_trainer_images_total", "val"] == 2 * 20
    # All but the very first, before which there was no work; and of a CPU it cannot be told that it has drained.
    assert counted["raypipe_trainer_micro_batches_total", "train"] == 2 * 8 - 1
    assert counted["raypipe_trainer_drained_total", "train"] == 0
    assert counted["raypipe_trainer_steps_total", ""] == 8
    assert counted["raypipe_stream_blocks_total", ""] == 2 * (8 + 4)


@pytest.mark.cluster
def test_no_more_than_what_has_happened_is_exported(
    ended: Scrape, counted: Counter[tuple[str, str]]
) -> None:
    for (name, split), total in counted.items():
        labels = {"split": split} if split else {}
        exported = ended.value(name, **labels)
        assert exported is None or exported <= total * (1 + 1e-6), name
    most = {
        ("raypipe_actor_micro_batches_total", "train"): 2 * 8,
        # the last is padding
        ("raypipe_actor_micro_batches_total", "val"): 2 * 4,
        ("raypipe_bad_samples_total", "train"): 2 * 2,
        ("raypipe_substituted_samples_total", "train"): 2 * 2,
        ("raypipe_bad_samples_total", "val"): 2 * 1,
    }
    for (name, split), total in most.items():
        exported = ended.value(name, split=split)
        assert exported is not None and 0 < exported <= total, name
    assert ended.value("raypipe_substituted_samples_total", split="val") is None
    assert 0 < (ended.value("raypipe_stream_faults_total", kind="actor_died") or 0) <= 2


@pytest.mark.cluster
def test_every_metric_has_the_labels_and_the_kind_of_the_documents(
    ended: Scrape, stopped: tuple[Loader, Any, Scrape]
) -> None:
    seen = {**stopped[2].samples, **ended.samples}
    # A plain loader validates nothing, and copies nothing to another device. (Other runs of this cluster may.)
    missing = {
        name
        for name in METRICS
        if ended.value(name) is None and stopped[2].value(name) is None
    }
    # The memory of a validation may start later than its second one.
    assert missing - {"raypipe_actor_remembered_total"} == {
        "raypipe_validation_loss",
        "raypipe_validation_accuracy",
        "raypipe_trainer_transfer_seconds_total",
        "raypipe_trainer_decode_seconds_total",
        "raypipe_trainer_gpu_utilization",
        "raypipe_trainer_checkpoint_seconds_total",
        "raypipe_trainer_drained_total",  # of a CPU that cannot be told
        *(
            name for name in METRICS if name.startswith("raypipe_storage_")
        ),  # its stores are on a disk
        "raypipe_trainer_last_checkpoint_timestamp_seconds",
        "raypipe_trainer_restarts_total",
        "raypipe_trainer_room_wait_seconds",  # the trainers of `raypipe train` alone
    }
    for name, samples in seen.items():
        if name.startswith("ray_raypipe_"):
            for labels, _ in samples:
                ours = {
                    k
                    for k in labels
                    if k
                    in {label for metric in METRICS.values() for label in metric.labels}
                }
                assert ours == set(METRICS[name.removeprefix("ray_")].labels), name


@pytest.mark.cluster
def test_what_the_dashboard_asks_of_ray_is_there(ended: Scrape) -> None:
    of_ray = {name for name in asked() if not name.startswith("ray_raypipe_")}
    # Those of nodes are made with the head's monitor, which a local cluster does without: Ray's list has them.
    of_nodes = {
        name for name in of_ray if name.startswith(("ray_cluster_", "ray_node_"))
    }
    assert of_nodes <= {f"ray_{name}" for name in METRICS_GAUGES}
    of_ray -= of_nodes
    # Ray serves the state of its nodes a little later than that of its processes.
    scrape = eventually(lambda s: of_ray <= s.samples.keys(), seconds=15)
    assert of_ray <= scrape.samples.keys()


# The dashboard


def queries() -> list[str]:
    found = [
        target["expr"]
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", [])
    ]
    return [query.replace("$__rate_interval", "1m") for query in found]


def asked() -> set[str]:
    """Names of the metrics that the dashboard's queries select."""
    names: set[str] = set()

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            names.add(node.name)

    for query in queries():
        promql_parser.walk(promql_parser.parse(query), visit)
    return names


def test_the_dashboard_asks_for_metrics_that_there_are_and_leaves_few_out() -> None:
    ours = {
        name.removeprefix("ray_") for name in asked() if name.startswith("ray_raypipe_")
    }
    assert ours <= METRICS.keys()
    left_out = {
        "trainer_steps_total",
        "trainer_first_batch_seconds",
        "stream_blocks_total",
    }
    left_out |= {"run_info"}
    assert METRICS.keys() - ours == {f"raypipe_{name}" for name in left_out}


def test_the_dashboards_selectors_use_labels_that_the_metrics_have() -> None:
    for query in queries():
        for name, selector in re.findall(r"ray_(raypipe_\w+)\{([^}]*)\}", query):
            assert set(re.findall(r"(\w+)=", selector)) <= set(METRICS[name].labels), (
                query
            )
        for by in re.findall(r"by \(([^)]*)\)", query):
            own = {
                label
                for name in re.findall(r"ray_(raypipe_\w+)", query)
                for label in METRICS[name].labels
            }
            assert not own or set(by.split(", ")) <= own, query
