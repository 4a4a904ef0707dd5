"""Ray's workers start without its script that imports Ray once more, unless they need it."""

from __future__ import annotations

import pytest

from raypipe.rayext.tweaks import _with_light_starts
from raypipe.rayext.worker_start import worker_command

_WORKER = ["default_worker.py", "--node-id=ab", "--worker-id=cd"]


@pytest.mark.parametrize(
    ("options", "is_direct"),
    [
        (["--language=PYTHON"], True),
        (["--language=PYTHON", "--serialized-runtime-env-context={}"], True),
        (["--language=PYTHON", "--serialized-runtime-env-context="], True),
        (['--serialized-runtime-env-context={"env_vars": {"A": "1"}}'], False),
        (["--serialized-runtime-env-context", "{}"], False),
        (["--language=JAVA"], False),
    ],
)
def test_a_worker_without_a_runtime_environment_starts_directly(
    options: list[str], is_direct: bool
) -> None:
    command = worker_command("python", "setup_worker.py", [*_WORKER, *options])
    if is_direct:
        assert command == ["python", *_WORKER]
    else:
        assert command == ["python", "setup_worker.py", *_WORKER, *options]


def test_only_the_command_of_python_workers_is_changed() -> None:
    started = list[list[str]]()
    start = _with_light_starts(lambda command, **_: started.append(command))
    workers = "--python_worker_command=/bin/py /ray/setup_worker.py /ray/default_worker.py --a=b"
    others = [
        "raylet",
        "--cpp_worker_command=",
        "--java_worker_command=/ray/setup_worker.py java",
    ]
    start([*others, workers], fate_share=True)
    (command,) = started
    assert command[:-1] == others
    words = command[-1].split()
    assert words[:3] == ["--python_worker_command=/bin/py", "-I", "-S"]
    assert words[3].endswith("/worker_start.py")
    assert words[4:] == ["/ray/setup_worker.py", "/ray/default_worker.py", "--a=b"]
