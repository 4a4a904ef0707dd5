"""The long proof that no crash costs a run more than what came after its last whole checkpoint."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from damaged_checkpoints import DAMAGE, newest
from full_disk import fill, make_room, small_disk
from local_head import LocalHead
from small_runs import small_run

from raypipe.config import RunConfig
from raypipe.errors import ConfigError
from raypipe.launch.run import launch
from raypipe.metrics.records import read_records
from raypipe.streaming.stop_file import request_stop

pytestmark = [pytest.mark.cluster, pytest.mark.soak]

KILLS = 30
# A run in a process of its own, which goes on with what is there.
RUN = """
import dataclasses, json, sys
from pathlib import Path
from small_runs import small_run
from raypipe.launch.run import launch

folder, train_store, val_store, epochs, failures = sys.argv[1:]
run = small_run(Path(folder), Path(train_store), Path(val_store), int(epochs), 2, checkpoint_interval=1)
run = dataclasses.replace(run, name="killed", train=dataclasses.replace(run.train, max_failures=int(failures)))
if (Path(folder) / "killed" / "config.yaml").exists():
    run = dataclasses.replace(run, resume=f"{folder}/killed")
print(json.dumps(launch(run)))
"""


def final_model(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(newest(folder) / "state.pt", weights_only=True)["model"]


def assert_equal_models(one: Path, other: Path) -> None:
    expected, found = final_model(one), final_model(other)
    assert expected.keys() == found.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


def trainers_of(head: LocalHead) -> list[int]:
    """Ray Train's workers of a cluster, those of drivers that were just killed included."""
    found, mark = [], f"RAY_TMPDIR={head.environment['RAY_TMPDIR']}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (
                (path / "cmdline").read_bytes(),
                (path / "environ").read_bytes(),
            )
        except OSError:
            continue
        if (
            command.startswith(b"ray::")
            and b"RayTrainWorker" in command
            and mark in environment.split(b"\0")
        ):
            found.append(int(path.name))
    return found


@pytest.mark.timeout(3600)
def test_a_run_killed_30_times_while_writing_ends_with_equal_weights(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    moments, killed, epochs = random.Random(3), {"driver": 0, "trainer": 0}, 50
    folder = tmp_path / "killed"

    def whole() -> int:
        return max(
            (
                int(p.parent.name.split("_")[1]) * 1000
                + int(p.parent.name.split("_")[2])
                for p in folder.glob("checkpoint_*/checkpoint.json")
            ),
            default=-1,
        )

    settings = {
        "RAYPIPE_CACHE": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parent / "support"),
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",  # every step reports
    }
    with LocalHead(3, settings) as head:
        environment = {**head.environment, "RAY_ADDRESS": f"{head.gcs_address}"}

        def start(failures: int = 0) -> subprocess.Popen[str]:
            arguments = [
                str(tmp_path),
                str(stores["train"]),
                str(stores["val"]),
                str(epochs),
                str(failures),
            ]
            return subprocess.Popen(
                [sys.executable, "-c", RUN, *arguments],
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )

        while sum(killed.values()) < KILLS:
            driver = start()
            output: list[str] = []
            reading = threading.Thread(
                target=lambda d=driver, o=output: o.extend(d.stdout), daemon=True
            )  # type: ignore[misc]
            reading.start()
            seen = whole()
            for _ in range(moments.choice((1, 1, 2))):
                while whole() == seen and driver.poll() is None:
                    time.sleep(0.001)
                seen = whole()
            assert driver.poll() is None, (
                sum(killed.values()),
                "".join(output)[-3000:],
            )
            # a step and its checkpoint take about so long
            time.sleep(moments.uniform(0, 0.15))
            victim = moments.choice(("driver", "trainer"))
            for pid in [driver.pid] if victim == "driver" else trainers_of(head):
                os.kill(pid, signal.SIGKILL)
            killed[victim] += 1
            driver.wait(120)
            reading.join(10)
            while trainers_of(head):  # of a killed driver: Ray ends them within seconds
                time.sleep(0.05)
            print(f"kill {sum(killed.values())}: {victim} at {seen}", flush=True)
        last = start()
        shown = last.communicate(timeout=1000)[0]
        assert last.returncode == 0, shown[-3000:]
        result = json.loads(shown.splitlines()[-1])
        unbroken = start_unbroken(environment, tmp_path, stores, epochs)
    assert min(killed.values()) > 3 and result["steps"] == unbroken["steps"]
    assert_equal_models(Path(unbroken["run_dir"]), folder)


def start_unbroken(
    environment: dict[str, str], tmp_path: Path, stores: dict[str, Path], epochs: int
) -> dict[str, Any]:
    arguments = [
        str(tmp_path / "unbroken"),
        str(stores["train"]),
        str(stores["val"]),
        str(epochs),
        "0",
    ]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        env=environment,
        text=True,
        capture_output=True,
        timeout=1000,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def halves(
    stores: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, ray_cluster: None
) -> tuple[RunConfig, Path, Path]:
    """A run, its folder when it has been trained to its end, and one when it was stopped half-way."""
    runs = tmp_path_factory.mktemp("runs")
    run = small_run(runs, stores["train"], stores["val"], 2, 2, checkpoint_interval=1)
    launch(dataclasses.replace(run, name="whole"))

    def stop() -> None:
        while len(list((runs / "half").glob("checkpoint_0000_*/checkpoint.json"))) < 2:
            time.sleep(0.01)
        request_stop((runs / "half").as_uri())

    stopping = threading.Thread(target=stop)
    stopping.start()
    assert launch(dataclasses.replace(run, name="half"))["stopped"]
    stopping.join()
    return run, runs / "whole", runs / "half"


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_run_with_a_damaged_checkpoint_ends_with_equal_weights(
    damage: str, halves: tuple[RunConfig, Path, Path], tmp_path: Path
) -> None:
    run, whole, half = halves
    shutil.copytree(half, tmp_path / "half")
    DAMAGE[damage][0](newest(tmp_path / "half"))
    (tmp_path / "half" / "checkpoint_manager_snapshot.json").write_text(
        '{"checkpoint_resu'
    )
    launch(dataclasses.replace(run, resume=str(tmp_path / "half")))
    assert_equal_models(whole, tmp_path / "half")


def test_a_run_goes_on_to_equal_weights_after_its_disk_was_full(
    halves: tuple[RunConfig, Path, Path], tmp_path: Path
) -> None:
    run, whole, _ = halves
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
        assert_equal_models(whole, folder)
