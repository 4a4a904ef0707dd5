"""A fork is the worker that its command would start: its arguments, environment, folder and outputs."""

from __future__ import annotations

import json
import sys

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
