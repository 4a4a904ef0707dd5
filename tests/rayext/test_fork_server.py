"""A fork is the worker that its command would start: its arguments, environment, folder and outputs."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import until

from raypipe.rayext import fork_server, forked_worker
from raypipe.rayext.fork_server import worker_arguments
from raypipe.rayext.forked_worker import ADDRESS, is_forked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


def _context(**settings: object) -> str:
    return f"--serialized-runtime-env-context={json.dumps(settings)}"


_WORKER = ["default_worker.py", "--node-id=ab", "--worker-id=cd"]
# What Ray's script for workers would be: it tells what it is.
_SCRIPT = """
import json, os, random, sys
import numpy
from ray._raylet import ObjectID
with open(sys.argv[1] + ".partial", "w") as file:
    json.dump({
        "name": __name__, "arguments": sys.argv, "folder": os.getcwd(),
        "parent": os.getppid(), "path": sys.path[0],
        "variable": os.environ.get("OF_THE_WORKER"), "of_server": "OPENBLAS_NUM_THREADS" in os.environ,
        "imported": {"fractions", "ray.data"} <= sys.modules.keys(), "output": os.readlink("/proc/self/fd/1"),
        "hash": hash("a name"),
        "oom_score": open("/proc/self/oom_score_adj").read().strip(),
        "drawn": [ObjectID.from_random().hex(), random.random(), numpy.random.rand()],
    }, file)
os.rename(sys.argv[1] + ".partial", sys.argv[1])
import time
assert not sys.stdin.read()
time.sleep(1000)
"""


@pytest.fixture
def server() -> Iterator[str]:
    modules = ("fractions", "a_missing_module", "ray.data")
    fork_server.start(modules, dict(os.environ))
    try:
        yield fork_server.take_address()
    finally:
        fork_server.end()


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


@pytest.mark.system
def test_a_fork_is_the_worker_and_ends_with_its_server(
    server: str, tmp_path: Path
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(_SCRIPT)
    folder = tmp_path / "folder ö"
    folder.mkdir()
    assert stat.S_IMODE(Path(server).parent.stat().st_mode) == 0o700
    environment = os.environ | {"OF_THE_WORKER": "a=b\nc", ADDRESS: server}
    environment.pop("OPENBLAS_NUM_THREADS", None)
    drawn = []
    for name in ("second", "first"):
        told = tmp_path / name
        arguments = [str(script), str(told), "--empty="]
        started = [sys.executable, forked_worker.__file__, *arguments]
        with (tmp_path / "output").open("w") as output:
            subprocess.run(
                [*started, "--language=PYTHON"],
                check=True,
                cwd=folder,
                env=environment,
                stdout=output,
            )
        facts = json.loads(_awaited(told))
        drawn += facts.pop("drawn")
    assert len(set(drawn)) == len(drawn) == 6
    (process,) = [of_server.process for of_server in fork_server._servers]
    assert facts == {
        "name": "__main__",
        "arguments": arguments,
        "folder": str(folder),
        "parent": process.pid,
        "path": str(tmp_path),
        "variable": "a=b\nc",
        "of_server": False,
        "imported": True,
        "hash": int(_printed("print(hash('a name'))", PYTHONHASHSEED="0")),
        "oom_score": "1000",  # as Ray has it for workers
        "output": str(tmp_path / "output"),
    }
    workers = _children(process.pid)
    assert len(workers) == 2
    fork_server.end()
    until(lambda: not any(Path(f"/proc/{pid}/cwd").is_symlink() for pid in workers))
    assert not is_forked(server) and not Path(server).parent.exists()


def _printed(program: str, **variables: str) -> str:
    command = [sys.executable, "-c", program]
    environment = {**os.environ, **variables}
    return subprocess.check_output(command, text=True, env=environment)


def _awaited(path: Path) -> str:
    until(path.exists)
    return path.read_text()


def _children(pid: int) -> list[int]:
    return [
        int(child)
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ]
