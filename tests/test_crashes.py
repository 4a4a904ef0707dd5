"""The long proof that no crash costs a run more than what came after its last whole checkpoint."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import pytest
from full_disk import fill, make_room, small_disk
from small_runs import assert_equal_weights, small_run

from raypipe.config import RunConfig
from raypipe.errors import ConfigError
from raypipe.launch.run import launch
from raypipe.metrics.records import read_records

pytestmark = [pytest.mark.cluster, pytest.mark.soak]


@pytest.fixture(scope="module")
def whole(
    stores: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, ray_cluster: None
) -> tuple[RunConfig, Path]:
    """A run, and its folder when it has been trained to its end."""
    runs = tmp_path_factory.mktemp("runs")
    run = small_run(runs, stores["train"], stores["val"], 2, 2, checkpoint_interval=1)
    launch(dataclasses.replace(run, name="whole"))
    return run, runs / "whole"


def test_a_run_goes_on_to_equal_weights_after_its_disk_was_full(
    whole: tuple[RunConfig, Path], tmp_path: Path
) -> None:
    run, unbroken = whole
    with small_disk(tmp_path / "disk", kib=32768) as disk:
        folder = disk / "run"

        def fill_up() -> None:
            while len(list(folder.glob("checkpoint_*/checkpoint.json"))) < 2:
                time.sleep(0.005)
            fill(disk)

        filling = threading.Thread(target=fill_up)
        filling.start()
        with pytest.raises(
            ConfigError,
            match=r"checkpoint .* cannot be written .*No space left on device",
        ):
            launch(dataclasses.replace(run, storage_path=str(disk), name="run"))
        filling.join()
        make_room(disk)
        found = read_records(folder.as_uri())
        assert len([r for r in found if r["kind"] == "start"]) == 1  # not tried again
        launch(dataclasses.replace(run, resume=str(folder)))
        assert_equal_weights(unbroken, folder)
