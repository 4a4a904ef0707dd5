"""Process that imports the modules of Ray's workers once, and forks the workers, on a cluster of this machine.

    python fork_server.py LISTENER MODULE,…

Otherwise each worker imports Ray, Ray Data, torch and raypipe, which is most of the CPU time of a start, and of a
restart after a failure. The raylet starts `forked_worker` instead of a worker, and that connects to this process.
A fork of this process takes over the worker's arguments, environment, folder and outputs, and runs Ray's script
for workers. It differs from a worker that Ray starts in three ways:

    its parent is this process       Ray knows workers by what they say when they register
    its modules were imported        none is a user's, so what these read at their import is as in a new process
    threads of libraries             OpenBLAS has one, as for an actor with one CPU; torch gets Ray's number in the
                                     train function

The seed of hash() is the server's, the same for all forks and in each run, unless PYTHONHASHSEED is set.
Generators of random numbers are those of a new process: Python's and NumPy's are seeded again, and Ray's, of which
equal states would give different objects one id, is not used before.

A process can be forked while no thread holds a lock: this one has a single thread of Python's, and the libraries
that start threads when they are imported (OpenBLAS, Arrow's allocator) end or renew them in a fork.
It makes no use of CUDA, which a fork cannot continue. If anything fails, workers start by Ray's own command.

It ends with the driver or with the raylet.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

BASE_MODULES = (
    # Ray imports them in a worker's first task: 50 ms and 4 MiB of each
    "pydantic.types",
    "pydantic.v1",
    "ray.data",
    "raypipe.streaming.pipeline",
    "raypipe.streaming.supervisor",
    "raypipe.streaming.worker",
)
"""Modules of the workers of any stream."""

ITEM_MODULES = (*BASE_MODULES, "torch")
"""Modules of the workers of a Dataset's stream: torch is 2 CPU seconds and 270 MiB in each actor otherwise."""

TRAIN_MODULES = (
    *BASE_MODULES,
    "ray.train.v2._internal.execution.controller.controller",
    "ray.train.v2._internal.execution.worker_group.worker",
    "raypipe.rayext.trainer",
    "raypipe.launch.train_function",
    "raypipe.streaming.ray_stream",
)
"""Modules of the workers of a run."""

_THREADS_OF_BLAS = "OPENBLAS_NUM_THREADS"
# Ray reads these variables when it is imported. A worker without a job, as one that Ray starts in advance, gets
# that of its first work; and each ends with the process that is named as the raylet, which is this server's.
_JOB = "RAY_JOB_ID"
_NO_JOB = "ffffffff"
_RAYLET = "RAY_RAYLET_PID"
_OOM_SCORE = "RAY_worker_oom_score_adjustment"
_PR_SET_PDEATHSIG = 1
# Arguments of a worker that are for Ray's `setup_worker.py`.
_LANGUAGE = "--language"
_CONTEXT = "--serialized-runtime-env-context"


@dataclass
class _Server:
    """The fork server of this process's cluster.

    Attributes:
        process: it ends when its standard input does.
        address: path of its socket, in a folder that only this user can enter.
        is_taken: whether a cluster has it.
    """

    process: subprocess.Popen[bytes]
    address: Path
    is_taken: bool = False


_servers = list[_Server]()  # at most one


def start(modules: tuple[str, ...], environment: dict[str, str]) -> None:
    """Start the server of the cluster that this process is about to start, unless it runs, with an environment."""
    if _servers and not _servers[0].is_taken:
        return
    end()
    # Forks share the seed of hash(): with this one, another run on this machine makes the same of a user's set.
    environment = {"PYTHONHASHSEED": "0", **environment}
    if "OMP_NUM_THREADS" not in environment:
        environment.setdefault(_THREADS_OF_BLAS, "1")
    address = Path(tempfile.mkdtemp(prefix="raypipe-fork-"), "socket")
    # If the path is too long, workers start by Ray's own command.
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen(64)
        file = listener.fileno()
        process = subprocess.Popen(
            [sys.executable, __file__, str(file), ",".join(modules)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[file],
            env=environment,
            process_group=0,  # Ctrl-C is for the driver
        )
        _servers.append(_Server(process, address))


def take_address() -> str:
    """Return the address of the server for the cluster that now starts; empty = there is none."""
    if not _servers:
        return ""
    _servers[0].is_taken = True
    return str(_servers[0].address)


def end() -> None:
    """End the server, if there is one, and the workers that it has forked."""
    while _servers:
        server = _servers.pop()
        server.process.kill()
        server.process.communicate()
        shutil.rmtree(server.address.parent, ignore_errors=True)


# The server's process


def _import(modules: list[str]) -> None:
    """Import modules; the workers import those that fail here."""
    import ray.actor

    # Each class of an actor draws an id; these do not use Ray's generator.
    ids = ray.actor.ActorClassID
    drawn = SimpleNamespace(from_random=lambda: ids(os.urandom(ids.size())))
    vars(ray.actor)["ActorClassID"] = drawn
    gc.disable()  # there is little to collect
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    vars(ray.actor)["ActorClassID"] = ids
    gc.freeze()  # forks share the memory of objects that no collection touches
    gc.enable()


def serve(listener: socket.socket, driver: int) -> tuple[socket.socket, int] | None:
    """Fork for each process of `forked_worker` that connects; returns None in the server, at its end.

    Args:
        driver: file that ends with the driver.

    Returns:
        In a fork, the connection, and the id of the process.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
    ends = [driver]
    while True:
        ready, _, _ = select.select([listener.fileno(), *ends], [], [])
        if listener.fileno() not in ready:
            return None
        connection, _ = listener.accept()
        try:
            process, raylet = map(int, connection.recv(64).split())
            if len(ends) == 1:
                ends.append(os.pidfd_open(raylet))
            is_fork = os.fork() == 0
        except (OSError, ValueError):  # the process has ended
            is_fork = False
        if is_fork:
            return connection, process
        connection.close()


def worker_arguments(
    command: list[str], environment: dict[str, str]
) -> list[str] | None:
    """Return the arguments of Ray's script for a worker, without those for `setup_worker.py`. Pure.

    None = the worker needs that script: it has a runtime environment that its process does not have already.
    """
    settings = dict[str, str]()
    kept = []
    for argument in command:
        name, _, value = argument.partition("=")
        if name in (_LANGUAGE, _CONTEXT):
            settings[name] = value
        else:
            kept.append(argument)
    context = json.loads(settings.get(_CONTEXT) or "{}")
    variables: dict[str, str] = context.pop("env_vars", {})
    if context.pop("py_executable", sys.executable) != sys.executable:
        return None
    if any(context.values()) or variables.items() - environment.items():
        return None
    is_python = settings.get(_LANGUAGE) == "PYTHON" and kept[0].endswith(".py")
    return kept if is_python else None


def _words(path: Path) -> list[str]:
    """Return the words of a file of /proc, each of which ends with a zero byte."""
    return [os.fsdecode(word) for word in path.read_bytes().split(b"\0")[:-1]]


def _environment_of(about: Path) -> dict[str, str]:
    """Return the environment of a process by its folder in /proc."""
    environment = dict[str, str]()
    for variable in _words(about / "environ"):
        name, _, value = variable.partition("=")
        environment[name] = value
    return environment


def _become(process: int) -> None:
    """Make this fork what Ray's command would have started in a process of `forked_worker`; exit if it cannot."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if str(os.getppid()) != os.environ[_RAYLET]:  # the server has ended before
        sys.exit(1)
    about = Path(f"/proc/{process}")
    environment = _environment_of(about)
    _, _, *command = _words(about / "cmdline")
    arguments = worker_arguments(command, environment)
    if arguments is None:
        sys.exit(1)
    os.setpgid(0, 0)
    os.chdir(about / "cwd")
    null = os.open(os.devnull, os.O_RDONLY)
    outputs = [os.open(about / "fd" / n, os.O_WRONLY | os.O_APPEND) for n in ("1", "2")]
    for file, target in zip((null, *outputs), (0, 1, 2), strict=True):
        os.dup2(file, target)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.environ[_JOB] = _NO_JOB
    # the raylet does so for a process that it starts itself: without memory, the kernel ends workers first
    with contextlib.suppress(OSError):
        score = os.environ.get(_OOM_SCORE, "1000")
        Path("/proc/self/oom_score_adj").write_text(score)
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # each process has its own
    sys.modules["ray._raylet"].Config.initialize("")  # the environment's settings


def main() -> None:
    """Serve until the driver or the raylet ends; in a fork, be the worker."""
    os.environ |= {_JOB: _NO_JOB, _RAYLET: str(os.getpid())}
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        address = Path(listener.getsockname())
        _import(sys.argv[2].split(","))
        # a fork may hang if a module has started a thread
        asked = serve(listener, driver=0) if threading.active_count() == 1 else None
    if asked is None:
        shutil.rmtree(address.parent, ignore_errors=True)
        return
    connection, process = asked
    with connection:
        _become(process)
        connection.sendall(b"1")
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    # this folder has modules of common names
    sys.path = [
        folder for folder in sys.path if Path(folder or ".") != Path(__file__).parent
    ]
    main()
