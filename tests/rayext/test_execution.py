from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import ray.data
from ray import cloudpickle
from ray.data._internal.execution.bundle_queue import ReorderingBundleQueue
from ray.data._internal.execution.streaming_executor_state import OpBufferQueue
from tiers import is_soak

from raypipe.config import PoolConfig
from raypipe.rayext.execution import Settings, StreamAutoscaler, context_of


@pytest.mark.cluster
def test_a_store_of_ten_object_stores_streams_without_spilling(
    request: pytest.FixtureRequest,
) -> None:
    # A process and a cluster of its own, with an object store of 80 MiB. The short form has one stream, whose
    # trainer is slow at first.
    num_cases = 4 if is_soak(request.config) else 1
    script = Path(__file__).parents[2] / "benchmarks" / "flow.py"
    command = [sys.executable, str(script), f"--cases={num_cases}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(*found, sep="\n")
    assert (
        len(found) == num_cases
        and found[0]["streamed_mib"] >= 10 * found[0]["store_mib"]
    )
    for case in found:
        assert case["micro_batches"] == case["expected"]
        assert case["spilled_mib"] == 0
        # What lies above the micro-batches in flight was let go, and waits for Ray to free it, once a second.
        assert case["peak_mib"] <= case["store_mib"]
        assert case["grown_mib"] < 150


def test_rays_guards_against_stalls_spare_a_stream_whose_trainer_pauses() -> None:
    context = context_of(Settings(PoolConfig(), 2, 0, reads=False, supervisor=None), 1)
    # else half an hour, in Ray 2.60
    assert context.execution_no_progress_timeout_s == -1
    # else a block every ten seconds
    assert context.output_backpressure_guard_release_interval_s >= 1e9


def test_no_setting_of_a_users_context_decides_what_a_stream_delivers() -> None:
    settings, own, names = (
        Settings(PoolConfig(), 2, 0, reads=False, supervisor=None),
        object(),
        set[str](),
    )
    with (
        warnings.catch_warnings(),
        ray.data.DataContext.current(ray.data.DataContext()),
    ):
        warnings.simplefilter("ignore")
        expected = context_of(settings, 1)
        users = ray.data.DataContext.get_current()
        users.set_config("of the user", True)
        for field in dataclasses.fields(ray.data.DataContext):
            users.__dict__[field.name] = own
        found = context_of(settings, 1)
    for field in dataclasses.fields(ray.data.DataContext):
        value, default = getattr(found, field.name), getattr(expected, field.name)
        if value is own:
            names.add(field.name)
        else:
            assert value == default or type(value) is type(default), field.name
    assert names and all(
        "log" in name or "stats" in name or "metrics" in name for name in names
    )
    assert found.max_errored_blocks == 0 and found.get_config("of the user") is None


def test_a_process_that_gets_the_context_gets_our_autoscalers_with_it(
    tmp_path: Path,
) -> None:
    context = context_of(Settings(PoolConfig(), 2, 0, reads=False, supervisor=None), 1)
    (tmp_path / "context").write_bytes(cloudpickle.dumps(context))
    code = (
        "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'));"
        "made = sys.modules['ray.data._internal.execution.streaming_executor'].create_actor_autoscaler;"
        "print(made.__module__, hasattr(made, '__wrapped__'))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "context")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["ray.data._internal.actor_autoscaler", "True"]


class Operator(SimpleNamespace):
    """One of Ray Data's, which are keys of their topology."""

    __hash__ = object.__hash__


def test_the_reader_stays_on_its_executions_node_until_that_drains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = ray.NodeID.from_random().hex()
    context = SimpleNamespace(
        get_node_id=lambda: node, worker=SimpleNamespace(mode=ray.SCRIPT_MODE)
    )
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    actors = SimpleNamespace(
        per_actor_resource_usage=lambda: SimpleNamespace(cpu=1.0),
        refresh_actor_state=lambda: None,
    )
    reader = Operator(get_autoscaling_actor_pools=list, _ray_remote_args={})
    pool = Operator(
        get_autoscaling_actor_pools=lambda: [actors],
        input_dependencies=[reader],
        _output_queue=ReorderingBundleQueue(),
    )
    states = {
        op: SimpleNamespace(output_queue=OpBufferQueue(1)) for op in (reader, pool)
    }
    StreamAutoscaler(states, Settings(PoolConfig(), 2, 0, reads=False, supervisor=None))
    strategy = reader._ray_remote_args["scheduling_strategy"]
    # hard, Ray fails the task once the node drains
    assert strategy.node_id == node and strategy.soft
