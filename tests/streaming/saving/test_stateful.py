"""The states of a train function's checkpoint, with Ray Train's functions played by the test; and a real kill."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray.train
import torch
import without_ray
from small_runs import small_run
from small_streams import spec_of as inline_spec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from raypipe.config import PlanConfig, PoolConfig, RunConfig
from raypipe.errors import ConfigError
from raypipe.plan.places import Cursor
from raypipe.streaming.handover import loader
from raypipe.streaming.loader import Loader
from raypipe.streaming.opening import spec_of
from raypipe.streaming.saving.stateful import Stateful
from raypipe.train.models import build_model, build_optimizer

Stores = dict[str, Path]


class Reports:
    """What was reported: metrics, and the newest checkpoint; and how many reports were waited for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.metrics, self.num_awaited = folder, list[dict[str, Any]](), 0

    def report(self, metrics: dict[str, Any], checkpoint: Any = None) -> None:
        self.metrics.append(metrics)
        if checkpoint:
            shutil.copytree(checkpoint.path, self.folder, dirs_exist_ok=True)

    def wait(self, consistency_mode: ray.train.CheckpointConsistencyMode) -> None:
        assert consistency_mode is ray.train.CheckpointConsistencyMode.COMMITTED
        self.num_awaited = len(self.metrics)

    def newest(self) -> Any:
        return (
            ray.train.Checkpoint.from_directory(self.folder)
            if self.folder.exists()
            else None
        )


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reports:
    found = Reports(tmp_path / "checkpoint")
    monkeypatch.setattr("ray.train.report", found.report)
    monkeypatch.setattr("ray.train.get_checkpoint", found.newest)
    monkeypatch.setattr("ray.train.get_all_reported_checkpoints", found.wait)
    return found


@pytest.fixture
def stream(stores: Stores) -> Loader:
    """After three steps."""
    spec = inline_spec(stores["train"], plan=PlanConfig(epochs=2, micro_batch_size=8))
    return loader(spec, cursor=spec.plan.cursor_at(3))


def stepped(model: torch.nn.Linear) -> dict[str, Stateful]:
    """A model and its optimizer after one step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def parts(seed: int = 0) -> dict[str, Stateful]:
    torch.manual_seed(seed)
    return stepped(torch.nn.Linear(3, 2))


def equal(one: dict[str, Stateful], other: dict[str, Stateful]) -> bool:
    flat = [
        torch.utils._pytree.tree_leaves({n: p.state_dict() for n, p in each.items()})
        for each in (one, other)
    ]
    return len(flat[0]) == len(flat[1]) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(*flat, strict=True)
    )


def test_what_was_reported_is_restored_with_the_place_beside_it(
    stream: Loader, reports: Reports
) -> None:
    saved, others = parts(), parts(seed=1)
    stream.report({"accuracy": torch.tensor(0.5), "best": np.float32(0.5)}, **saved)
    assert reports.metrics == [{"accuracy": 0.5, "best": 0.5}]
    assert {type(value) for value in reports.metrics[0].values()} == {float}
    assert (
        Cursor.from_json((reports.folder / "cursor.json").read_text()) == stream.cursor
    )
    assert not equal(saved, others)
    stream.restore(**others)
    assert equal(saved, others)


def test_who_goes_on_without_the_weights_is_told_so_once(
    stream: Loader, reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> int:
        return caplog.text.count("loader.restore was not called")

    stream.report({}, **parts())
    assert warnings() == 0
    for restores, expected in ((True, 0), (False, 1)):
        again = loader(stream._spec)
        if restores:
            again.restore(**parts())
        again.report({}, **parts())
        again.report({}, **parts())
        assert warnings() == expected


def test_only_the_first_rank_makes_a_checkpoint_and_all_report(
    stream: Loader, reports: Reports
) -> None:
    stream._process = 1
    stream.report({"accuracy": 0.5}, **parts())
    assert reports.metrics == [{"accuracy": 0.5}] and reports.newest() is None
    assert reports.num_awaited == 1


@pytest.mark.usefixtures("one_process_group")
def test_a_model_in_ddp_has_the_checkpoint_of_one_without(
    stream: Loader, reports: Reports
) -> None:
    saved, alone = parts(), parts(seed=1)
    model: Any = saved["model"]
    stream.report({}, model=DistributedDataParallel(model))
    stream.restore(model=alone["model"])
    assert equal({"model": model}, {"model": alone["model"]})
    other: Any = parts(seed=2)["model"]
    stream.restore(model=DistributedDataParallel(other))
    assert equal({"model": model}, {"model": other})


@pytest.mark.usefixtures("one_process_group")
def test_a_sharded_model_is_refused_since_a_rank_has_but_a_part_of_it(
    stream: Loader, reports: Reports
) -> None:
    model = torch.nn.Linear(3, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    for part in stepped(model).values():
        with pytest.raises(
            ConfigError, match=r"net is sharded, .* docs/training-loop\.md"
        ):
            stream.report({}, net=part)
    assert not reports.metrics


def test_what_a_resume_could_not_load_is_refused_when_it_is_reported(
    stream: Loader, reports: Reports
) -> None:
    model = torch.nn.Linear(3, 2)
    # as a search or np.linspace gives it
    optimizer = torch.optim.SGD(model.parameters(), lr=np.float64(0.1))
    with pytest.raises(
        ConfigError, match=r"of optimizer has numpy.*, which no resume could load"
    ):
        stream.report({}, model=model, optimizer=optimizer)
    assert not reports.metrics


def test_a_checkpoint_without_a_part_or_of_another_make_is_named(
    stream: Loader, reports: Reports
) -> None:
    stream.report({}, **parts())
    with pytest.raises(
        ConfigError, match="checkpoint has model, optimizer, and no schedule"
    ):
        stream.restore(**parts(), schedule=parts()["optimizer"])
    other: Any = torch.nn.Linear(4, 2)
    with pytest.raises(
        ConfigError, match=r"(?s)model in .* does not fit this one: .*size mismatch"
    ):
        stream.restore(model=other)
    state = reports.folder / "state.pt"
    state.write_bytes(state.read_bytes()[:-1] + b"x")
    with pytest.raises(
        ConfigError, match=r"is damaged \(the content of its state\.pt has changed"
    ):
        stream.restore(**parts())
    (reports.folder / "checkpoint.json").unlink()
    with pytest.raises(ConfigError, match=r"was not made by loader\.report"):
        stream.restore(**parts())


# From one loop to the other


@pytest.fixture
def trained(stores: Stores, tmp_path: Path) -> tuple[RunConfig, Path]:
    """A run of jobs/train.py, and its folder."""
    run = small_run(
        tmp_path, stores["train"], stores["val"], 2, 4, checkpoint_interval=1
    )
    run = dataclasses.replace(run, name="trained", pool=PoolConfig(engine="inline"))
    without_ray.train(run)
    return run, tmp_path / "trained"


def model_and_optimizer(run: RunConfig) -> tuple[Any, Any]:
    model = build_model("small", 5)
    return model, build_optimizer(model, dataclasses.replace(run.train, lr=run.peak_lr))


def test_a_run_goes_on_from_an_own_loops_checkpoint_with_equal_bits(
    trained: tuple[RunConfig, Path], reports: Reports, tmp_path: Path
) -> None:
    run, folder = trained
    own = loader(
        spec_of(run, folder.as_uri()), start_from=str(min(folder.glob("checkpoint_*")))
    )
    model, optimizer = model_and_optimizer(run)
    own.restore(model=model, optimizer=optimizer)
    own.report({"accuracy": 0.5}, model=model, optimizer=optimizer)
    start = dataclasses.replace(run.train, start_from=str(reports.folder))
    figures = without_ray.train(dataclasses.replace(run, name="moved", train=start))
    assert figures["steps"] == 8 and figures["images"] == 24  # of its one step
    ends = [
        max(each.glob("checkpoint_*")) / "state.pt"
        for each in (folder, tmp_path / "moved")
    ]
    one, other = (torch.load(end, weights_only=True) for end in ends)
    torch.testing.assert_close(other, one, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("net", "optimizer"), "has net, optimizer, but no model"),
        (("model", "optimizer"), "groups of"),
    ],
)
def test_a_run_refuses_an_own_loops_parts_of_other_names_or_groups(
    trained: tuple[RunConfig, Path], reports: Reports, names: tuple[str, str], said: str
) -> None:
    run, folder = trained
    own = loader(spec_of(run, folder.as_uri()))
    model, _ = model_and_optimizer(run)
    own.report(
        {},
        **dict(zip(names, (model, torch.optim.AdamW(model.parameters())), strict=True)),
    )
    start = dataclasses.replace(run.train, start_from=str(reports.folder))
    with pytest.raises(ConfigError, match=said):
        without_ray.train(dataclasses.replace(run, name="moved", train=start))


@pytest.mark.system
@pytest.mark.cluster
@pytest.mark.usefixtures("two_cpus")
def test_a_rank_killed_when_report_returns_resumes_from_that_report(
    stores: Stores, tmp_path: Path
) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    plan = PlanConfig(epochs=1, micro_batch_size=8, global_batch_size=16)
    spec = inline_spec(stores["train"], plan=plan)

    def train_fn() -> None:
        made = loader(spec)
        model = torch.nn.Linear(1, 1)
        made.restore(model=model)
        began_at = made.global_step
        with (tmp_path / f"began-{made.rank}").open("a") as file:
            file.write(f"{began_at} {model.weight.item()}\n")
        for batch in next(made.epochs()).train:
            if batch.ends_step and made.global_step in (2, 4):
                torch.nn.init.constant_(model.weight, made.global_step)
                made.report({}, model=model)
                if made.rank == began_at == 0 and made.global_step == 4:
                    os.kill(os.getpid(), signal.SIGKILL)

    scaling = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5})
    failures = FailureConfig(max_failures=1)
    run = RunConfig(
        name="killed", storage_path=str(tmp_path / "runs"), failure_config=failures
    )
    TorchTrainer(train_fn, scaling_config=scaling, run_config=run).fit()
    for rank in range(2):
        _, resumed = (tmp_path / f"began-{rank}").read_text().splitlines()
        assert resumed == "4 4.0"
