"""Background checkpoints, the lease and the request to stop, of a loop of the user's own, without Ray Train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
import torch

import raypipe
from raypipe.commands.status import stop
from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import ConfigError, RaypipeError
from raypipe.plan.places import Cursor
from raypipe.storage.filesystem import open_filesystem
from raypipe.streaming.handover import _later
from raypipe.streaming.loader import Loader
from raypipe.streaming.saving.checkpoints import find_newest, write_files
from raypipe.streaming.saving.stateful import saved
from raypipe.streaming.spec import StreamSpec


@pytest.fixture(scope="module")
def spec(stores: dict[str, Path]) -> StreamSpec:
    """Two epochs of six steps."""
    return raypipe.open_stream(
        stores["train"],
        stores["val"],
        plan=PlanConfig(epochs=2, micro_batch_size=16),
        transform=TransformConfig(size=8),
        pool=PoolConfig(engine="inline"),
    )


class Loop:
    """A loop of the user's own, which continues what it finds in a folder."""

    def __init__(self, spec: StreamSpec, run_dir: Path, **options: Any) -> None:
        self.loader: Loader = raypipe.loader(spec, run_dir=run_dir, **options)
        torch.manual_seed(spec.plan.model_seed)
        self.model = torch.nn.Linear(3 * 8 * 8, 5)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.found = self.loader.restore(model=self.model, optimizer=self.optimizer)
        self.began_at = self.loader.global_step

    def save(self) -> None:
        metrics = {"best": torch.tensor(0.25), "note": "good"}
        parts = {"model": self.model, "optimizer": self.optimizer}
        self.loader.checkpoint(metrics, **parts, ema=None)

    def train(self, until: int = 1000) -> Loop:
        for epoch in self.loader.epochs():
            for batch in epoch.train:
                pixels = batch.image.flatten(1).float() / 255
                self.model(pixels).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                if self.loader.should_checkpoint() or self.loader.global_step == 4:
                    self.save()
                if self.loader.stopping or self.loader.global_step == until:
                    return self
            list(epoch.val)
        self.save()
        return self


def test_a_loop_continues_with_the_newest_checkpoint_of_its_folder(
    spec: StreamSpec, tmp_path: Path
) -> None:
    whole = Loop(spec, tmp_path / "whole").train()
    assert whole.began_at == 0 and whole.found is None
    cut = Loop(spec, tmp_path / "cut").train(until=5)
    cut.loader.close()
    again = Loop(spec, tmp_path / "cut").train()
    assert again.began_at == 4 and again.found
    assert again.found.metrics == {"best": 0.25, "note": "good"}
    assert again.found.state["ema"] is None
    assert torch.equal(again.model.weight, whole.model.weight)
    # The last checkpoint is waited for: nothing else may be left that does.
    read = raypipe.read_checkpoint(tmp_path / "cut")
    assert torch.equal(read.state["model"]["weight"], whole.model.weight)
    assert (read.epoch, read.step) == (2, 0)
    assert Loop(spec, tmp_path / "cut").began_at == 12


def test_the_command_stops_a_loop_and_the_next_start_goes_on(
    spec: StreamSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raypipe.streaming.run_log._LOOK_S", 0.01)
    with pytest.raises(ConfigError, match="no run at"):
        stop(str(tmp_path))
    loop = Loop(spec, tmp_path)
    batches = next(loop.loader.epochs()).train
    next(batches)
    while not (tmp_path / "status.json").exists():
        pass
    stop(str(tmp_path))
    while not loop.loader.should_checkpoint():
        pass
    assert loop.loader.stopping and (tmp_path / "stop").read_text() == "seen"
    loop.save()  # whole on return, since the run stops here
    assert raypipe.read_checkpoint(tmp_path).step == 1
    loop.loader.close()
    assert not (tmp_path / "stop").exists()
    assert Loop(spec, tmp_path).train().began_at == 1


def test_no_checkpoint_is_written_once_another_process_has_the_folder(
    spec: StreamSpec, tmp_path: Path
) -> None:
    with raypipe.lease(tmp_path) as token:
        loop = Loop(spec, tmp_path, lease=token)
        with pytest.raises(ConfigError, match="is in use by process"):
            raypipe.lease(tmp_path).__enter__()
        loop.train(until=5)
        loop.loader._checkpoints.wait()  # type: ignore[union-attr]
    assert raypipe.read_checkpoint(tmp_path).step == 4
    loop.save()
    with pytest.raises(RaypipeError, match="no longer belongs to this run"):
        loop.loader.close()
    assert raypipe.read_checkpoint(tmp_path).step == 4
    with pytest.raises(RaypipeError, match="no longer belongs to this run"):
        Loop(spec, tmp_path, lease=token)


def test_an_error_of_the_loop_is_not_hidden_by_a_failed_checkpoint(
    spec: StreamSpec, tmp_path: Path
) -> None:
    with pytest.raises(ZeroDivisionError):
        with raypipe.lease(tmp_path) as token:
            loop = Loop(spec, tmp_path, lease=token)
        with loop.loader:
            loop.save()
            1 / 0  # noqa: B018


def test_a_background_checkpoint_needs_a_folder(spec: StreamSpec) -> None:
    with raypipe.loader(spec) as loader, pytest.raises(ConfigError, match=r"run_dir="):
        loader.checkpoint()


def test_the_later_of_ray_trains_and_the_folders_checkpoint_is_taken(
    spec: StreamSpec, tmp_path: Path
) -> None:
    Loop(spec, tmp_path / "own").train(until=5).loader.close()
    found, _ = find_newest((tmp_path / "own").as_uri(), spec.plan.check)
    for step in (3, 6):
        folder = open_filesystem(tmp_path / str(step))
        Path(folder[1]).mkdir()
        place = Cursor(0, step, spec.plan.fingerprint)
        write_files(folder, place, saved({}), {})
        assert _later(folder, found) == (found if step == 3 else folder)
    without_place = open_filesystem(tmp_path)
    assert _later(without_place, found) == without_place
    assert _later(None, found) == found and _later(without_place, None) == without_place


def test_a_request_to_stop_reaches_the_storage_of_ray_train(tmp_path: Path) -> None:
    """Its file systems are pyarrow's own."""
    from raypipe.streaming import stop_file

    inside = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    (tmp_path / "run").mkdir()
    run = (inside, "run")
    stop_file.request_stop(run)
    assert stop_file.stop_requested(run) and not stop_file.stop_answered(run)
    stop_file.answer_stop(run)
    assert stop_file.stop_answered(run) and (tmp_path / "run" / "stop").exists()
    stop_file.remove_stop(run)
    assert not stop_file.stop_requested(run)
