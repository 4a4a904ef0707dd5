"""Fixtures: one local Ray cluster for all tests of a process, and small real stores."""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path

from local_head import RAY_ON_THIS_MACHINE

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell ignores Ctrl-C for what it starts by `&` or nohup, and every child inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Two processes of pytest share two cores, and torch would have a thread for each core in both. With layers as
# small as those of the tests, threads wait for each other longer than they work: minutes, where other programs run
# too. Ray sets it for its workers as well. It is read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A test may import Albumentations before raypipe sets this, and there may be no network.
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

if Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free > 8 << 30:
    # A disk is waited for at each commit of a store, for minutes where other programs write. With the retention
    # that pyproject.toml has, little is there at a time.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

# What hundreds of processes import is compiled once, and not in each of them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# All are read when Ray is imported. Metrics are exported every 10 s by default.
os.environ |= {"RAY_metrics_report_interval_ms": "2000", **RAY_ON_THIS_MACHINE}

import hypothesis
import pytest
import s3_server
from full_disk import small_disk
from pictures import CLASSES, samples
from tiers import pytest_addoption, pytest_configure, select  # noqa: F401  the first two are hooks

from raypipe.stores.destination import write_atomically

sys.dont_write_bytecode = False

# On a busy machine an example may take seconds. Each run of CI draws others: few of them find in time what many
# would find at once.
hypothesis.settings.register_profile("any pace", deadline=None, max_examples=30)
hypothesis.settings.load_profile("any pace")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Each process of pytest-xdist has one cluster at a time. Tests that start their own are two
    groups, and those of the shared cluster two others: each goes to the process that is free. They come first, as
    the longest. Tests that need none stay together by module.
    """
    select(config, items)
    if ours := [
        item
        for item in items
        if "cuda_or_pretended" in getattr(item, "fixturenames", ())
    ]:
        import eager_cuda

        eager_cuda.skip_what_cannot_run(ours)
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    order = (_OWN[0], *_SHARED, _OWN[1])
    items.sort(
        key=lambda item: (
            order.index(group) if (group := _group(item)) in order else len(order)
        )
    )


def pytest_make_parametrize_id(val: object) -> str | None:
    """A short name for a long value: pytest would keep all of it, 4 MB for one damaged file, in each report."""
    if isinstance(val, str | bytes) and len(val) > _LONG_ID:
        text = ascii(val[:_LONG_ID])
        return f"{text}… {hashlib.sha256(val.encode() if isinstance(val, str) else val).hexdigest()[:8]}"
    return None


_LONG_ID = 100


def pytest_collection() -> None:
    """While all is imported there is no garbage, and to look for it took a third of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What the tests are made of, 1.5 million objects, stays to the end. A collection of garbage, which the end of
    each stream makes, took seconds to go through it.
    """
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Extensions report as leaked what is still frozen at exit."""
    gc.unfreeze()


_OWN = ("own cluster of the faults", "own cluster")
_SHARED = ("cluster of the pages and commands", "cluster of the packages")


def _group(item: pytest.Item) -> str:
    """The tests that run in one process."""
    if "ray_cluster" in getattr(item, "fixturenames", ()):
        return _SHARED[Path(item.path).parent.name not in ("tests", "commands")]
    if item.get_closest_marker("cluster"):
        return _OWN[Path(item.path).parent.name != "faults"]
    return Path(item.path).stem


@pytest.fixture
def cuda_or_pretended() -> Iterator[None]:
    """A CUDA device; where there is none the pretended one, on which nothing may have been left unordered."""
    import eager_cuda
    from without_ray import one_thread

    if eager_cuda.HAS_CUDA:
        yield
        return
    cuda = eager_cuda.EagerCuda()
    with one_thread(), cuda.installed():
        yield
    assert not cuda.errors


@pytest.fixture(scope="module")
def ray_cluster() -> None:
    """A local cluster of 4 logical CPUs and a small object store: one for all modules that follow each other."""
    import ray

    from raypipe.rayext.cluster import connect

    if not ray.is_initialized():
        connect(num_cpus=4, object_store_bytes=300 << 20)


_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


def _end_streams() -> None:
    """The frames of a failed test hold its loaders, and these the CPUs that the next tests wait for."""
    from raypipe.streaming.lifetime import end_oldest

    while end_oldest():
        pass


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """The shared cluster ends with its last test: an idle one takes a tenth of a core. Ray that a test started for
    itself alone, as a command in this process does, is not the next test's.
    """
    try:
        yield
    finally:
        if item.stash.get(_FAILED, False) and "ray" in sys.modules:
            _end_streams()
        is_last = nextitem is None or _group(nextitem) not in _SHARED
        group = _group(item)
        has_ended = group in _OWN or (group in _SHARED and is_last)
        if has_ended and "ray" in sys.modules:
            import ray

            ray.shutdown()


@pytest.fixture
def idle_cluster(ray_cluster: None) -> None:
    """Nothing holds a CPU of the cluster, nor an execution that an earlier test has left behind."""
    import ray

    deadline = time.monotonic() + 300
    while ray.available_resources().get("CPU", 0) < 4:
        assert time.monotonic() < deadline, ray.available_resources()
        gc.collect()
        time.sleep(0.5)


def _cpus_held(num: int) -> Iterator[None]:
    """Another job holds CPUs of the shared cluster. Pools grow while they are waited for, and on a machine of two
    cores each further actor only makes the wait longer.
    """
    from ray.util import placement_group, remove_placement_group

    group = placement_group([{"CPU": num}])
    assert group.wait(600)
    yield
    remove_placement_group(group)


@pytest.fixture
def one_cpu(ray_cluster: None) -> Iterator[None]:
    """The shared cluster has one CPU to spare, for the one actor of a stream."""
    yield from _cpus_held(3)


@pytest.fixture
def two_cpus(ray_cluster: None) -> Iterator[None]:
    """The shared cluster has two CPUs to spare, for one trainer and the one actor of its stream."""
    yield from _cpus_held(2)


@pytest.fixture
def all_cpus_held(idle_cluster: None) -> Iterator[None]:
    """Another job's actor holds every CPU of the cluster."""
    import ray

    class Job:
        def ping(self) -> None: ...

    job = ray.remote(num_cpus=4)(Job).remote()
    ray.get(job.ping.remote(), timeout=600)
    deadline = time.monotonic() + 300
    while ray.available_resources().get("CPU", 0):  # Ray's state is late
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.1)
    yield
    ray.kill(job)


@pytest.fixture(autouse=True)
def cluster_outlives_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command ends its own local cluster; run in this process, it would end that of all tests."""
    monkeypatch.setattr("raypipe.commands.cli._shutdown", lambda: None)


@pytest.fixture
def one_process_group(tmp_path: Path) -> Iterator[None]:
    """A process group of gloo, of this process alone."""
    from torch import distributed

    ranks = f"file://{tmp_path}/ranks"
    distributed.init_process_group("gloo", init_method=ranks, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def ray_folder() -> Iterator[str]:
    """A folder for a Ray of a test's own."""
    with tempfile.TemporaryDirectory(prefix="rp-", dir="/tmp") as folder:
        # short: sockets are made below it
        yield folder


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 64 KiB, empty as yet: `full_disk.fill` fills it."""
    with small_disk(tmp_path / "disk") as folder:
        yield folder


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """A real S3 server in a process of its own."""
    with s3_server.s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def bucket(
    s3_endpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> str:
    """The address of a new bucket of that server, to which this process's environment leads; an empty cache."""
    for name, value in s3_server.environment(s3_endpoint).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    # The same in every session, since the faults depend on addresses.
    name = f"bucket-{hashlib.blake2b(request.node.name.encode(), digest_size=8).hexdigest()}"
    s3_server.make_bucket(s3_endpoint, name)
    return f"s3://{name}"


@pytest.fixture
def proxy(
    bucket: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[s3_server.FaultyProxy]:
    """A proxy before the server of the bucket, by which all requests go."""
    # pyarrow has pauses of its own between its attempts
    monkeypatch.setattr("raypipe.storage.retries._FIRST_S", 0.01)
    with s3_server.FaultyProxy(s3_endpoint) as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
        yield made


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`train` (100 samples) and `val` (22) as LMDB, and `parquet`, the training samples in groups of 10."""
    folder = tmp_path_factory.mktemp("stores")
    paths = {name: folder / f"{name}.lmdb" for name in ("train", "val")}
    write_atomically(str(paths["train"]), samples(100), CLASSES)
    write_atomically(str(paths["val"]), samples(22, first=1000), CLASSES)
    from raypipe.stores.writers import ParquetWriter

    paths["parquet"] = folder / "train.parquet"
    with ParquetWriter(paths["parquet"], classes=CLASSES, row_group_size=10) as writer:
        for sample in samples(100):
            writer.append(sample)
    return paths
