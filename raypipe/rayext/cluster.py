"""Connections to a cluster, and local clusters that are started on this machine."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import logging
import os
import secrets
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray
from ray.util import client

from raypipe.background import in_background, process_state
from raypipe.cpus import num_cpus as usable_cpus
from raypipe.errors import ResourceError
from raypipe.logs import LogFormat
from raypipe.rayext import fork_server
from raypipe.rayext.cluster_state import LOCAL_CLUSTER, remember_own_node
from raypipe.rayext.head import Head, wait_for_head
from raypipe.rayext.ray_private import find_private, replace, replaced
from raypipe.rayext.startup import Wait
from raypipe.rayext.tweaks import AUTHENTICATION, are_on, small_head
from raypipe.rayext.worker_logs import WORKER, take_worker_logs
from raypipe.storage.local_file import locked, open_lock, try_lock
from raypipe.storage.shared_memory import remove_unused

logger = logging.getLogger(__name__)

_WORKER_ENV = {
    # With the patch, Ray Train prints every line of a train function twice.
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # Ray Train waits silently for resources; after this many seconds trainer.py logs what is missing.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",
    # A trainer that does not answer for so long is replaced; Ray's default is ten minutes. Nothing holds the
    # interpreter for two minutes. (If Ray makes its stream, a Supervisor detects a stopped trainer earlier.)
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "120",
    # The code that a worker runs: a cluster of another checkout has no forks for it.
    "RAYPIPE_CODE": str(Path(__file__).parents[1]),
}
# On one machine, Ray's bookkeeping takes CPU time from the transform: statistics of its event loops, and a record
# of every task for the dashboard, which does not run.
_LOCAL_ENV = {
    **_WORKER_ENV,
    LOCAL_CLUSTER: "1",
    "RAY_event_stats": "0",
    "RAY_task_events_report_interval_ms": "0",
    # Ray frees objects in batches, once a second: half a gigabyte of blocks would wait for it, in ever more pages.
    "RAY_free_objects_batch_size": "1",
    # Ray looks for new files of logs ten times a second while there are fewer than these, else twice a second.
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # the watcher is an actor that looks for preempted cloud nodes
    # Ray gives all of its workers a nice value of 15: while two other processes keep two cores busy, a trainer has
    # 3 % of a core. Only transform actors yield to others.
    "RAY_worker_niceness": "0",
    # Ray Train sets it for its controllers, which are forks if they have the environment of all.
    "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",
}

_SAFE_PATH = "PYTHONSAFEPATH"  # Python's switch for programs that do not import from the current folder

LOCAL_SIZE = "LOCAL_WORLD_SIZE"
"""Variable with which torchrun and its kin say how many processes of a run are on this machine."""

ANSWER_S = 60.0
"""Time that the start of a head may take."""
# Time for siblings to leave: longer than the start of a pool takes to leave a call to Ray.
_LEAVE_S = 90.0
_OWN_MACHINE_S = 2.0  # a head of this machine accepts a connection sooner


def connect(
    address: str = "",
    *,
    num_cpus: int | None = None,
    object_store_bytes: int | None = None,
    log_format: LogFormat = "text",
    wait: Wait | None = None,
    has_siblings: bool = False,
) -> None:
    """Connect to the cluster at `address` or RAY_ADDRESS, or that `ray start` runs here; else start Ray here.

    Does nothing if this process is already connected. Inside a submitted job RAY_ADDRESS is set.

    Args:
        address: address of the cluster; empty = RAY_ADDRESS.
        num_cpus: CPUs to offer, if Ray is started on this machine; None = all that this process may use.
        object_store_bytes: size of the object store, if Ray is started on this machine; None = Ray's default.
        log_format: "json" also turns the log lines of Ray, and of other libraries in its workers, into JSON.
        wait: the wait for the cluster's answer; None = a minute.
        has_siblings: whether processes with the same parent, such as torchrun's, use the cluster that one of them
            starts; they do if LOCAL_WORLD_SIZE is above 1, too.

    Raises:
        ResourceError: the cluster does not answer, cannot be joined, or does not start.
    """
    is_client = client.ray.is_connected()
    if ray.is_initialized() and not is_client:
        return
    address = address or os.environ.get("RAY_ADDRESS", "")
    address = address or _running_cluster(_address_path())
    if is_client or address.startswith("ray://"):
        raise ResourceError(
            "a stream does not run through Ray Client (ray://…): start the program on a machine of the cluster, "
            "such as by `ray job submit`"
        )
    take_worker_logs()
    remove_unused()
    # This also removes Ray's prefix "(Actor pid=…)" from the lines of workers.
    if log_format == "json":
        ray_log = ray.LoggingConfig(encoding="JSON", log_level="WARNING")
    else:
        ray_log = None
    job = ray.job_config.JobConfig()
    job._py_driver_sys_path = _SearchPath()
    options: dict[str, Any] = {
        "logging_level": logging.WARNING,
        "logging_config": ray_log,
        "job_config": job,
    }
    if address:
        _join(address, wait or Wait(ANSWER_S), options)
    else:
        of_start = {
            "num_cpus": num_cpus or _offered_cpus(),
            "object_store_memory": object_store_bytes,
        }
        start = functools.partial(_start, log_format, options | of_start)
        if has_siblings or os.environ.get(LOCAL_SIZE, "1") != "1":
            _start_for_siblings(start, wait or Wait(ANSWER_S), options)
        else:
            start()


def _start_for_siblings(
    start: Callable[[], None], wait: Wait, options: dict[str, Any]
) -> None:
    """Start the cluster of this process and its siblings, or join it, with these options, if one of them has."""
    parent = os.getppid()
    _, started = process_state(parent)
    name = f"siblings-{parent}-{started}"
    path = Path(_private_folder()).with_name(name)
    with locked(path.with_suffix(".lock")):
        address = _running_cluster(path)
        users = open_lock(path)
        if address:
            _join(address, wait, options)
            remember_own_node()
            try_lock(users, fcntl.LOCK_SH)
        else:
            start()
            path.write_text(ray.get_runtime_context().gcs_address)
            atexit.register(_await_siblings, users)


def _await_siblings(users: int) -> None:
    """Let siblings that use this process's cluster leave it, for a while: it ends with this process."""
    deadline = time.monotonic() + _LEAVE_S
    while not try_lock(users) and time.monotonic() < deadline:
        time.sleep(0.1)


def _join(address: str, wait: Wait, options: dict[str, Any]) -> None:
    """Connect to the cluster at an address, with these options of `ray.init`."""
    fork_server.end()  # workers of a cluster are its own
    wait_for_head(address, wait)
    environment = dict(_WORKER_ENV)
    if _SAFE_PATH in os.environ:
        environment[_SAFE_PATH] = os.environ[_SAFE_PATH]
    options["runtime_env"] = {"env_vars": environment}
    try:
        with _auto_start_waits(), _whole_start():
            ray.init(address=address, **options)
    except (RuntimeError, OSError, ray.exceptions.RayError) as error:
        raise ResourceError(
            f"cannot connect to the Ray cluster at {address}: {error}"
        ) from error


def _start(log_format: LogFormat, options: dict[str, Any]) -> None:
    """Start a cluster on this machine, with these options of `ray.init`."""
    _share_uv_environment()
    _keep_token_private()
    environment = _local_environment(log_format)
    if _forks_workers():
        fork_server.start(fork_server.BASE_MODULES, environment | os.environ)
    with (
        _inherited(environment),
        small_head(),
        _spared_signals(),
        _auto_start_waits(),
        _whole_start(),
    ):
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                _temp_dir=_private_folder(),
                **options,
            )
        except Exception as error:
            fork_server.end()
            # Ray raises nothing more special where its processes are too slow
            raise ResourceError(
                "Ray did not start on this machine: its CPUs or memory may be in use, or TMPDIR may be too long "
                f"or not ASCII: {error}"
            ) from error
    remember_own_node()


def prepare_workers(
    log_format: LogFormat, modules: tuple[str, ...] = fork_server.TRAIN_MODULES
) -> None:
    """Begin to import modules of workers, by default a run's, in another process, if `connect` will start a local
    cluster.

    Call it before the seconds that this process takes until then.
    """
    path = _address_path()
    joins = "RAY_ADDRESS" in os.environ or (path is not None and path.exists())
    joins |= os.environ.get(LOCAL_SIZE, "1") != "1"  # maybe a sibling's
    if _forks_workers() and not joins and not ray.is_initialized():
        environment = _local_environment(log_format)
        fork_server.start(modules, environment | os.environ)


def _forks_workers() -> bool:
    return are_on() and sys.platform == "linux"


def _local_environment(log_format: LogFormat) -> dict[str, str]:
    """Return variables for the processes of a local cluster, where this process has no others."""
    environment = dict(_LOCAL_ENV)
    if log_format == "json":
        environment["RAY_BACKEND_LOG_JSON"] = "1"
    return environment


def connect_by_thread(wait: Wait, has_siblings: bool = False) -> None:
    """Call `connect` in a thread that lives as long as this process.

    Linux ends Ray's processes with the thread that has started them.

    Args:
        wait, has_siblings: see `connect`.
    """
    if ray.is_initialized():
        connect()
        return
    connected = Future[None]()
    stay = functools.partial(_connect_and_stay, wait, has_siblings, connected)
    in_background("raypipe-ray", stay)
    connected.result()


def _connect_and_stay(wait: Wait, has_siblings: bool, connected: Future[None]) -> None:
    try:
        connect(wait=wait, has_siblings=has_siblings)
    except BaseException as error:
        connected.set_exception(error)
        return
    connected.set_result(None)
    threading.Event().wait()


def keep_sigterm() -> None:
    """End this process in an orderly way at SIGTERM, as Ray does where the main thread starts it.

    Call it before another thread calls `connect`.
    """
    if ray.is_initialized():
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))


@contextlib.contextmanager
def _auto_start_waits() -> Iterator[None]:
    """Context manager: the first call to Ray of another thread waits, and does not start Ray a second time.

    Ray warns that a thread cannot handle SIGTERM; `keep_sigterm` does.
    """
    lock = find_private(
        "ray._private.auto_init_hook.auto_init_lock",
        "call Ray only after the first batch of a loader",
    )
    log = logging.getLogger(WORKER)

    def without_sigterm(record: logging.LogRecord) -> bool:
        return "SIGTERM handler" not in record.getMessage()

    log.addFilter(without_sigterm)
    try:
        with lock or contextlib.nullcontext():
            yield
    finally:
        log.removeFilter(without_sigterm)


def _running_cluster(path: Path | None) -> str:
    """Return the address of a cluster that runs on this machine, by the file that has it, or "".

    One that has ended leaves its address behind; and another user's is not joined, which runs code as that user.
    """
    if path is None:
        return ""
    try:
        address = _own_text(path)
        Head(address).connect(_OWN_MACHINE_S)
    except (OSError, ValueError):
        return ""
    # Ray says that authentication is on, and how to switch it off.
    logging.getLogger(AUTHENTICATION).setLevel(logging.ERROR)
    enable_token = find_private(
        f"{AUTHENTICATION}.maybe_enable_token_auth_if_token_available",
        "set RAY_AUTH_MODE=token for a cluster that wants a token",
    )
    if enable_token:
        enable_token(warn_if_disabled=False)
    logger.info("joining the Ray cluster at %s, which runs on this machine", address)
    return address


def _own_text(path: Path) -> str:
    """Return the text of a file of this user in a folder of this user.

    Ray lets everybody write into its folder, so the file that is looked at is the open one, and no link.

    Raises:
        PermissionError: another user has made the file, the folder, or a link in its place.
    """
    folder = os.open(path.parent, os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        file = os.open(path.name, os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        with os.fdopen(file) as text:
            if {os.fstat(each).st_uid for each in (folder, file)} != {os.getuid()}:
                raise PermissionError(f"{path} is another user's")
            return text.read().strip()
    finally:
        os.close(folder)


def _private_folder() -> str:
    """Return the folder of a local cluster's sockets and logs; no other user can enter the one around it.

    Ray makes its own folders writable for everybody.
    """
    base = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    folder = base / f"ray-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.lstat()
    if state.st_uid != os.getuid() or state.st_mode != stat.S_IFDIR | 0o700:
        folder = Path(tempfile.mkdtemp(prefix="ray-", dir=base))
    return str(folder / "ray")


def _address_path() -> Path | None:
    """Return the file in which `ray start` leaves its cluster's address; None = Ray does not tell."""
    address_file = find_private(
        "ray._private.utils.get_ray_address_file",
        "a cluster that runs on this machine is joined only if RAY_ADDRESS names it",
    )
    return Path(address_file(None)) if address_file else None


def _offered_cpus() -> int:
    """Return the CPUs that this process may use: Ray does not see the limits of `taskset` and Slurm."""
    rays = find_private(
        "ray._private.utils.get_num_cpus",
        "the quota of a control group of version 1 is unknown",
    )
    # Ray finds 0 CPUs in a quota below one
    return min(usable_cpus(), max(1, int(rays())) if rays else usable_cpus())


def _share_uv_environment() -> None:
    """Let workers share this process's environment: under `uv run`, Ray would make another one for them."""
    if "RAY_ENABLE_UV_RUN_RUNTIME_ENV" not in os.environ:
        replace(
            "ray._private.ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV",
            lambda _: False,
            loss="under `uv run`, Ray makes an environment of its own for its workers",
        )


def _keep_token_private() -> None:
    """Let nobody else read the token of Ray's local clusters, whoever made it.

    Ray makes it at the first start, with the modes that the umask leaves, which are 0644 on most machines; its
    ports are open to the network, and the token is the key to run code.
    """
    token = Path.home() / ".ray" / "auth_token"
    with contextlib.suppress(OSError):  # no home, or another user's: Ray's start tells
        token.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not token.exists():
            file = os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(file, "w") as new:
                new.write(secrets.token_hex(32))  # Ray's own has the same form
        elif stat.S_IMODE(token.stat().st_mode) & 0o077:
            token.chmod(0o600)


class _SearchPath(list[str]):
    """First module search path of Ray's workers, limited to the folders in this process's path.

    Ray would add the current folder, which may be a dataset's with a file cv2.py.
    """

    def extend(self, folders: Iterable[str]) -> None:
        search_path = {os.path.realpath(folder) for folder in sys.path}
        super().extend(
            folder for folder in folders if os.path.realpath(folder) in search_path
        )


@contextlib.contextmanager
def _inherited(environment: dict[str, str]) -> Iterator[None]:
    """Context manager: set variables for started processes, unless this process has other values.

    The variables are removed afterwards, since this process may later connect to a cluster that must not have
    them.
    """
    added = {
        name: value for name, value in environment.items() if name not in os.environ
    }
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextlib.contextmanager
def _spared_signals() -> Iterator[None]:
    """Context manager: start Ray in separate process groups.

    Ctrl-C in a terminal and `timeout` signal the whole group of this process. In it, Ray would end at once, and a
    stopped run could not write its checkpoint. On Linux Ray still ends with this process; on other systems Ray
    needs the group to end its processes.
    """
    if sys.platform != "linux":
        yield
        return
    with replaced(
        "ray._private.services.ConsolePopen",
        lambda popen: functools.partial(popen, process_group=0),
        loss="a signal to the whole process group ends Ray before the last checkpoint",
    ):
        yield


@contextlib.contextmanager
def _whole_start() -> Iterator[None]:
    """Context manager: hold the KeyboardInterrupt of a first Ctrl-C until Ray has started.

    After an interrupted start of Ray's core, the next one, as by a notebook's cell, would end the process.
    """
    held = list[bool]()
    default = signal.default_int_handler

    def hold(*_: Any) -> None:
        held.append(True)
        signal.signal(signal.SIGINT, default)

    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) != default
    ):
        yield
        return
    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, default)
    if held:
        raise KeyboardInterrupt
