"""Process that imports the modules of Ray's workers once, and forks the workers, on a cluster of this machine.

    python fork_server.py LISTENER MODULE,…

Otherwise each worker imports Ray, Ray Data, torch and raypipe, which is most of the CPU time of a start, and of a
restart after a failure. The raylet starts `forked_worker` instead of a worker, and that sends the worker's
arguments, environment, folder and outputs. A fork of this process gets them, and runs Ray's script for workers. It
differs from a worker that Ray starts in three ways:

    its parent is this process       Ray knows workers by what they say when they register
    its modules were imported        none is a user's, so what these read at their import is as in a new process
    threads of libraries             OpenBLAS has one, as for an actor with one CPU; torch gets Ray's number in the
                                     train function

The seed of hash() is the server's, the same for all forks and in each run, unless PYTHONHASHSEED is set.
Generators of random numbers are those of a new process: Python's and NumPy's are seeded again, and Ray's, of which
equal states would give different objects one id, is not used before; the server tries that out before it serves.

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
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

BASE_MODULES = (
    "ray.data",
    "raypipe.streaming.pipeline",
    "raypipe.streaming.supervisor",
    "raypipe.streaming.worker",
)
"""Modules of the workers of any stream."""

TRAIN_MODULES = (
    *BASE_MODULES,
    "ray.train.v2._internal.execution.controller.controller",
    "ray.train.v2._internal.execution.worker_group.worker",
    "raypipe.rayext.trainer",
    "raypipe.launch.train_function",
    "raypipe.streaming.ray_stream",
)
"""Modules of the workers of a run."""

_CREDENTIALS = "3i"  # Linux gives three integers: process, user, group
_THREADS_OF_BLAS = "OPENBLAS_NUM_THREADS"
# Ray reads these variables when it is imported. A worker without a job, as one that Ray starts in advance, gets
# that of its first work; and each ends with the process that is named as the raylet, which is this server's.
_JOB = "RAY_JOB_ID"
_NO_JOB = "ffffffff"
_RAYLET = "RAY_RAYLET_PID"
_OOM_SCORE = "RAY_worker_oom_score_adjustment"
_PR_SET_PDEATHSIG = 1


class _Server(NamedTuple):
    """The fork server of this process's cluster.

    Attributes:
        process: it ends when its standard input does.
        address: its abstract address.
    """

    process: subprocess.Popen[bytes]
    address: str


_servers = list[_Server]()  # at most one


def start(modules: tuple[str, ...], environment: dict[str, str]) -> None:
    """Start the server of the cluster that this process is about to start, unless it runs, with an environment."""
    if _servers and _servers[0].process.poll() is None:
        return
    end()
    # Forks share the seed of hash(): with this one, another run on this machine makes the same of a user's set.
    environment = {"PYTHONHASHSEED": "0", **environment}
    if "OMP_NUM_THREADS" not in environment:
        environment.setdefault(_THREADS_OF_BLAS, "1")
    with contextlib.suppress(OSError):  # workers then start by Ray's own command
        _servers.append(_started(modules, environment))


def _started(modules: tuple[str, ...], environment: dict[str, str]) -> _Server:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # any abstract address
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
        address = listener.getsockname().removeprefix(b"\0").decode()
    return _Server(process, address)


def address() -> str:
    """Return the address of the server that this process has started; empty = there is none."""
    return _servers[0].address if _servers else ""


def end() -> None:
    """End the server, if there is one, and the workers that it has forked."""
    while _servers:
        process = _servers.pop().process
        process.kill()
        process.communicate()


# The server's process


class _Request(NamedTuple):
    """A worker to fork.

    Attributes:
        arguments: Ray's script for workers, and its arguments.
        variables: the environment, as NAME=VALUE.
        folder: the current folder.
        outputs: files for standard output and standard error.
    """

    arguments: list[str]
    variables: list[str]
    folder: str
    outputs: list[int]


class _ClassIds:
    """Replacement of Ray's ids of actors' classes: random ones that do not use Ray's generator."""

    @staticmethod
    def from_random() -> Any:
        from ray._raylet import ActorClassID

        return ActorClassID(os.urandom(ActorClassID.size()))


def _import(modules: list[str]) -> None:
    """Import modules; the workers import those that fail here."""
    import ray.actor

    gc.disable()
    ids = ray.actor.ActorClassID
    vars(ray.actor)["ActorClassID"] = _ClassIds
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    vars(ray.actor)["ActorClassID"] = ids
    gc.freeze()  # forks share the memory of objects that no collection touches


def _ids_differ() -> bool:
    """Return whether two forks draw different ids of objects: Ray's generator is seeded at its first use."""
    from ray._raylet import ObjectID

    drawn = set[bytes]()
    for _ in range(2):
        (reads, writes) = os.pipe()
        fork = os.fork()
        if fork == 0:
            os.write(writes, ObjectID.from_random().binary())
            os._exit(0)
        os.close(writes)
        with os.fdopen(reads, "rb") as pipe:
            drawn.add(pipe.read())
        os.waitpid(fork, 0)
    return len(drawn) == 2 and b"" not in drawn


def _decoded(data: bytes) -> list[list[str]]:
    """Return the lists of words of a request, see `forked_worker`."""
    words = [os.fsdecode(word) for word in data.split(b"\0")[:-1]]
    lists = []
    while words:
        num = int(words[0])
        lists.append(words[1 : num + 1])
        words = words[num + 1 :]
    return lists


def _received(connection: socket.socket) -> _Request:
    size, outputs, _, _ = socket.recv_fds(connection, 8, 2)
    missing = int.from_bytes(size, "big")
    data = b""
    while missing > len(data):
        received = connection.recv(missing - len(data))
        if not received:
            raise ConnectionError
        data += received
    arguments, variables, (folder,) = _decoded(data)
    return _Request(arguments, variables, folder, outputs)


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end."""
    size = struct.calcsize(_CREDENTIALS)
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    process, user, _ = struct.unpack(_CREDENTIALS, data)
    return process, user


def _parent(process: int) -> int:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1])


def _can_fork() -> bool:
    """Return, in a fork, whether it can use CUDA like a new process."""
    torch = sys.modules.get("torch.cuda")
    return torch is None or not torch._is_in_bad_fork()


def serve(listener: socket.socket, driver: int) -> _Request | None:
    """Fork a worker for each request; returns its request in each worker, and None in the server, at its end.

    Args:
        driver: file that ends with the driver.
    """
    if threading.active_count() > 1 or not _ids_differ():
        # a module has started a thread or drawn an id
        return None
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
    ends = [driver]
    while True:
        ready, _, _ = select.select([listener.fileno(), *ends], [], [])
        if listener.fileno() not in ready:
            return None
        connection, _ = listener.accept()
        with connection:
            process, user = _peer(connection)
            if user != os.getuid():
                continue
            try:
                request = _received(connection)
                if len(ends) == 1:
                    ends.append(os.pidfd_open(_parent(process)))
                is_worker = os.fork() == 0
            except (OSError, ValueError):
                continue
            if is_worker:
                if not _can_fork():
                    os._exit(1)
                for file in (listener.detach(), *ends[1:]):
                    os.close(file)
                connection.sendall(b"1")
                return request
            for file in request.outputs:
                os.close(file)


def _become(request: _Request) -> None:
    """Make this process what Ray's command would have started."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if str(os.getppid()) != os.environ[_RAYLET]:  # the server has ended before
        os._exit(1)
    gc.enable()
    os.setpgid(0, 0)
    os.chdir(request.folder)
    null = os.open(os.devnull, os.O_RDONLY)
    for file, target in zip((null, *request.outputs), (0, 1, 2), strict=True):
        os.dup2(file, target)
        os.close(file)
    os.environ.clear()
    for variable in request.variables:
        name, _, value = variable.partition("=")
        os.environ[name] = value
    os.environ[_JOB] = _NO_JOB
    # the raylet does so for a process that it starts itself: without memory, the kernel ends workers first
    with contextlib.suppress(OSError):
        score = os.environ.get(_OOM_SCORE, "1000")
        Path("/proc/self/oom_score_adj").write_text(score)
    sys.argv = request.arguments
    sys.path.insert(0, str(Path(request.arguments[0]).parent))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # each process has its own
    sys.modules["ray._raylet"].Config.initialize("")  # the environment's settings


def main() -> None:
    """Serve until the driver or the raylet ends; in a fork, be the worker."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    os.environ |= {_JOB: _NO_JOB, _RAYLET: str(os.getpid())}
    _import(sys.argv[2].split(","))
    request = serve(listener, driver=0)
    if request:
        _become(request)
        runpy.run_path(request.arguments[0], run_name="__main__")


if __name__ == "__main__":
    # this folder has modules of common names
    sys.path = [
        folder for folder in sys.path if Path(folder or ".") != Path(__file__).parent
    ]
    main()
