"""A fork is the worker that its command would start: its arguments, environment, folder and outputs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from raypipe.rayext import fork_server
from raypipe.rayext.fork_server import worker_arguments
from raypipe.rayext.forked_worker import is_forked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


def _context(**settings: object) -> str:
    return f"--serialized-runtime-env-context={json.dumps(settings)}"


_WORKER = ["default_worker.py", "--node-id=ab", "--worker-id=cd"]


@pytest.mark.parametrize(
    ("options", "is_plain"),
    [
        (["--language=PYTHON"], True),
        (["--language=PYTHON", "--serialized-runtime-env-context={}"], True),
        (["--language=PYTHON", "--serialized-runtime-env-context="], True),
        (["--language=PYTHON", _context(env_vars={"A": "1"})], True),
        (["--language=PYTHON", _context(py_executable=sys.executable)], True),
        (["--serialized-runtime-env-context={}"], False),
        (["--language=PYTHON", _context(env_vars={"A": "2"})], False),
        (["--language=PYTHON", _context(env_vars={"B": "1"})], False),
        (["--language=PYTHON", _context(py_executable="/a/venv/python")], False),
        (["--language=PYTHON", _context(command_prefix=["cd", "/x", "&&"])], False),
        (["--language=JAVA"], False),
    ],
)
def test_only_a_worker_of_the_raylets_own_environment_is_forked(
    options: list[str], is_plain: bool
) -> None:
    expected = _WORKER if is_plain else None
    environment = {"A": "1", "C": "3"}
    assert worker_arguments([*_WORKER, *options], environment) == expected
    assert worker_arguments(["-s", *_WORKER, *options], environment) is None


def test_without_a_server_a_worker_is_not_forked() -> None:
    fork_server.end()
    assert fork_server.take_address() == ""
    assert not is_forked("")
    assert not is_forked("/a/missing/socket")


PROGRAM = """
import os
from pathlib import Path

import raypipe
from ray._private.state import actors


class Parent:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return int("libtorch" in Path(f"/proc/{os.getppid()}/maps").read_text())


if __name__ == "__main__":
    loader = raypipe.DataLoader(Parent(), 4, num_workers=1, worker_init_fn=print)
    print(next(iter(loader)).tolist())
    print(*sorted({each["ActorClassName"] for each in actors().values()}))
"""


@pytest.mark.system
def test_actors_of_a_dataset_are_forks_with_torch_and_the_only_ones(
    tmp_path: Path,
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # Without a shell in between, this process is the parent of the program, and not of its actors.
    ended = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=300
    )
    expected = "[1, 1, 1, 1]\nMapWorker(MapBatches(TransformWorker)) Supervisor\n"
    assert ended.stdout.endswith(expected), ended.stdout + ended.stderr
