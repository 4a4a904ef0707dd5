"""The contracts for scripts: commands as people type them, and the JSON on their last line."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import without_ray
from local_head import LocalHead
from signalled import assert_tells_how_to_go_on, ended_by, started
from small_runs import assert_equal_weights, parse_run
from tiers import is_soak

from raypipe.commands.status import status
from raypipe.errors import ConfigError

ROOT = Path(__file__).parent.parent
# A second actor would come late, and take its CPU from the trainer on a machine of two cores.
DIGITS = [
    "--plan.epochs=4",
    "--plan.val_interval=4",
    "--train.log_interval=5",
    "--name=digits",
]
DIGITS += ["--pool.max_actors=1"]
STEPS = 4 * 11


def refused(code: int, *words: str) -> subprocess.CompletedProcess[str]:
    """What a command says that ends with an exit code."""
    environment = {**os.environ}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-m", "raypipe.commands.cli", *words],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The figures of an unbroken run on the digits."""
    folder = tmp_path_factory.mktemp("digits")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAYPIPE_CACHE", str(folder))
        return without_ray.train(
            parse_run([f"--storage_path={folder}/runs", *DIGITS], None)
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digest", "/nowhere.lmdb"], "error: /nowhere.lmdb does not exist"),
        (
            ["digest", "STORE", "--train.num_workers", "2"],
            "error: 2 workers cannot share the 1 micro-batches",
        ),
    ],
)
def test_an_error_is_one_line_on_standard_error(
    arguments: list[str], message: str, stores: dict[str, Path]
) -> None:
    given = [str(stores["train"]) if a == "STORE" else a for a in arguments]
    done = refused(1, *given)
    assert (
        re.match(message, done.stderr.splitlines()[0])
        and "Traceback" not in done.stderr
    )
    assert done.stdout == ""


def test_wrong_usage_ends_with_code_2() -> None:
    assert "nonsense" in refused(2, "digest", "x.lmdb", "--nonsense", "1").stderr


# On a cluster's job server


TRAIN = [sys.executable, "jobs/train.py"]


@pytest.mark.cluster
def test_a_digits_run_ended_by_ctrl_c_goes_on_as_a_job_to_equal_weights(
    digits_run: dict[str, Any], ray_folder: str, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "digits"
    environment = {"RAYPIPE_CACHE": str(tmp_path)}
    slowly = ["--train.checkpoint_interval=1"]  # or it might be at its end first
    with started(
        [f"--storage_path={folder.parent}", *DIGITS, *slowly], ray_folder, environment
    ) as running:
        said = ended_by(signal.SIGINT, running, to_group=True)
    stopped = assert_tells_how_to_go_on(said, folder)
    assert not stopped or (
        {"images_per_s", "wait_fraction"} <= stopped.keys() and stopped["steps"] < STEPS
    )
    with LocalHead(3, environment) as head:
        done = resumed_by_a_job(head, folder)
        submit_a_folder_of_ones_own(head, tmp_path / "mine")
        join_as_ray_init_does(head)
    assert_as_unbroken(done, folder, digits_run)


def join_as_ray_init_does(head: LocalHead) -> None:
    """Connect without an address to the cluster of this machine; then by its address, without a token."""
    environment = dict(head.environment)
    del environment["RAY_AUTH_MODE"]
    program = "import ray, raypipe; raypipe.connect(); print(ray.get_runtime_context().gcs_address)"
    command = [sys.executable, "-c", program]
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
    joined = subprocess.run(command, env=environment, **options)
    assert joined.stdout.strip().endswith(head.gcs_address.rpartition(":")[2]), joined
    environment["RAY_ADDRESS"] = head.gcs_address
    denied = subprocess.run(command, env=environment, **options)
    assert "set RAY_AUTH_MODE=token, and copy" in denied.stderr, denied


@pytest.mark.cluster
def test_a_killed_trainer_is_in_record_and_status_and_lines_are_json(
    ray_folder: str, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "digits"
    command = [
        f"--storage_path={folder.parent}",
        *DIGITS,
        "--log-format=json",
        "--train.checkpoint_interval=5",
    ]
    command += ["--train.num_workers=2", "--train.cpus_per_worker=0.5"]
    environment = {"RAYPIPE_CACHE": str(tmp_path)}
    with started(command, ray_folder, environment, stderr=subprocess.STDOUT) as running:
        assert running.stdout
        lines = [
            *itertools.takewhile(
                lambda line: '"kind": "train"' not in line, running.stdout
            )
        ]
        found = {"step": 0}
        while not found["step"]:
            with contextlib.suppress(ConfigError):
                found = status(str(folder))
        assert (
            found["state"] == "running"
            and found["workers"] == 2
            and found["to_step"] == STEPS
        )
        children = psutil.Process(running.pid).children(recursive=True)
        # others may end meanwhile
        trainers = {
            process.pid
            for process in psutil.process_iter(["cmdline"])
            if process in children
            and "RayTrainWorker" in " ".join(process.info["cmdline"] or [])
        }
        (killed,) = trainers - {found["pid"]}
        os.kill(killed, signal.SIGKILL)
        rest, _ = running.communicate()
    said = [json.loads(line) for line in (*lines, *rest.splitlines())]
    assert said[-1]["steps"] == STEPS and not said[-1]["stopped"]
    found = status(str(folder))
    assert found["state"] == "ended" and found["step"] == STEPS and found["checkpoint"]
    (fault,) = found["faults"]
    assert fault.startswith(
        f"restarting the trainers: trainer 1 died: process {killed} on "
    )
    assert any(
        line.get("message") == fault and line["run"] == "digits" for line in said
    )


@pytest.mark.cluster
def test_a_command_killed_at_random_and_repeated_ends_with_equal_weights(
    digits_run: dict[str, Any],
    ray_folder: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    moments, folder = random.Random(4), tmp_path / "runs" / "digits"
    command = [
        f"--storage_path={folder.parent}",
        *DIGITS,
        "--resume=auto",
        "--train.checkpoint_interval=1",
    ]
    environment = {"RAYPIPE_CACHE": str(tmp_path)}

    def checkpoints() -> set[Path]:
        return set(folder.glob("checkpoint_*/checkpoint.json"))

    for number in (0, 1, 2) if is_soak(request.config) else (1,):
        with started(command, ray_folder, environment) as running:
            assert running.stdout
            for _ in itertools.islice(running.stdout, moments.randrange(1, 12)):
                # of about 15
                pass
            for _ in range(number * moments.randrange(1, 5)):
                before = checkpoints()
                while checkpoints() == before and running.poll() is None:
                    time.sleep(0.01)
            time.sleep(moments.uniform(0, 0.3))
            running.kill()
        assert running.returncode == -signal.SIGKILL
    with started(command, ray_folder, environment) as running:
        shown, _ = running.communicate()
    result = json.loads(shown.splitlines()[-1])
    assert running.returncode == 0 and "resumed from checkpoint_" in shown, shown
    assert not result["stopped"] and result["steps"] == STEPS
    assert result["val_accuracy"] == digits_run["val_accuracy"]
    assert_equal_weights(folder, Path(digits_run["run_dir"]))


HALF_WRITTEN = "checkpoint_0099_0000001_01234567"


def resumed_by_a_job(head: LocalHead, folder: Path) -> subprocess.CompletedProcess[str]:
    """What a job prints that resumes a run, in whose folder a checkpoint was being written."""
    (folder / HALF_WRITTEN).mkdir()
    resume = [*TRAIN, "--resume", str(folder), "--train.checkpoint_interval=20"]
    return head.run("job", "submit", "--working-dir", str(ROOT), "--", *resume)


def assert_as_unbroken(
    done: subprocess.CompletedProcess[str], folder: Path, digits_run: dict[str, Any]
) -> None:
    lines = done.stdout.splitlines()
    result = next(
        json.loads(line)
        for line in reversed(lines)
        if line.startswith('{"val_accuracy"')
    )
    assert (
        result["val_accuracy"] == digits_run["val_accuracy"] > 0.9
        and result["steps"] == STEPS
    )
    assert (
        f"not resumed from {HALF_WRITTEN}: it was cut off while it was written" in lines
    )
    assert (folder / HALF_WRITTEN).exists()
    assert_equal_weights(folder, Path(digits_run["run_dir"]))


def submit_a_folder_of_ones_own(head: LocalHead, folder: Path) -> None:
    """As docs/clusters.md has it: raypipe goes along, secrets do not, and the exit code is the job's."""
    folder.mkdir()
    shutil.copy(ROOT / ".rayignore", folder)
    for name in (".env", "id_rsa", "train.lmdb", "part.py"):
        (folder / name).touch()
    (folder / "my_train.py").write_text(
        "import os, raypipe, sys; print(sorted(os.listdir()), raypipe.__file__); sys.exit(int(sys.argv[1]))"
    )
    carried = json.dumps({"py_modules": [str(ROOT / "raypipe")]})
    program = [
        "--working-dir",
        str(folder),
        "--runtime-env-json",
        carried,
        "--",
        sys.executable,
        "my_train.py",
    ]
    done = head.run("job", "submit", *program, "3", check=False)
    assert (
        "['.rayignore', 'my_train.py', 'part.py']" in done.stdout
        and "py_modules_files" in done.stdout
    )
    assert done.returncode == 1 and "exit code 3" in done.stdout + done.stderr
