"""The hand-over to Ray Train: one call in the train function gives this rank's loader.

At every (re)start of the worker group the ranks read the cursor from the latest checkpoint, and continue there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import ray
import torch
from torch.distributed.device_mesh import DeviceMesh

from raypipe.config import AtLeast1, AugmentConfig, Seconds
from raypipe.device.modules import PLAIN
from raypipe.errors import ConfigError, CursorError
from raypipe.metrics.records import RunFolder, read_records
from raypipe.mistakes import checks_keywords
from raypipe.plan.places import Cursor
from raypipe.rayext.agreement import in_train_function, processes
from raypipe.rayext.worker_logs import take_worker_logs
from raypipe.section import MAX_INT, Limits, check
from raypipe.storage.files import check_place
from raypipe.storage.filesystem import as_uri, open_filesystem
from raypipe.streaming.digest import plain_settings
from raypipe.streaming.inline import inline_batches
from raypipe.streaming.loader import Loader
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.opening import join_train_run
from raypipe.streaming.rank_stream import HostSource
from raypipe.streaming.record.digest_log import DigestLog
from raypipe.streaming.record.opened import settings_record
from raypipe.streaming.saving.checkpoints import Checkpoint, cursor_of, find_start
from raypipe.streaming.saving.run_checkpoints import RunCheckpoints
from raypipe.streaming.saving.stateful import latest_of_train
from raypipe.streaming.shares import Share, share_of
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.ending import Ending

if TYPE_CHECKING:
    from ray.train import ScalingConfig


# Kinds of the arguments of `loader`; a path becomes text.
_KINDS: dict[str, Any] = {
    "spec": StreamSpec,
    "rank": Annotated[int, Limits(0, MAX_INT)] | None,
    "world_size": AtLeast1 | None,
    "mesh": DeviceMesh | None,
    "max_actors": AtLeast1 | None,
    "cursor": Cursor | None,
    "augment": AugmentConfig | Callable | None,
    "run_dir": str,
    "start_from": str,
    "lease": str,
    "log_digest": bool,
    "prefetch_factor": AtLeast1,
    "keep_batches": Annotated[int, Limits(0, MAX_INT)],
    "trace": str,
    "trace_s": Seconds,
}


@checks_keywords
def loader(
    spec: StreamSpec,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    mesh: DeviceMesh | None = None,
    max_actors: int | None = None,
    device: torch.device | str | None = None,
    cursor: Cursor | None = None,
    augment: AugmentConfig | Callable[..., Any] | None = None,
    dtype: torch.dtype | None = None,
    prefetch_factor: int = 2,
    keep_batches: int = 0,
    run_dir: str | Path = "",
    start_from: str | Path = "",
    lease: str = "",
    log_digest: bool = False,
    trace: str | Path = "",
    trace_s: float = 60.0,
) -> Loader:
    """Return this rank's loader. Call it once per rank, first in the train function, so the pool starts while
    you build the model.

    Without Ray Train, one process gets the whole stream, and connects to Ray as `connect` does. Several processes
    of torch.distributed, torchrun or `accelerate launch` get a share each, and make it by a pool each, on one
    local cluster of their machine.

    Args:
        spec: the stream.
        rank, world_size: this process's share, the micro-batches m of each step with m mod W = rank; None = as Ray
            Train, torch.distributed or the launcher's RANK and WORLD_SIZE have them. With `world_size=1` the
            process gets everything.
        mesh: a mesh of devices whose data-parallel axes say so instead: those named dp, ddp, fsdp, data,
            data_parallel, batch, dp_replicate, dp_shard, replicate or shard. Processes that differ only in other
            axes get the same batches.
        max_actors: transform actors that the pool may grow to; None = as many as the cluster has room for now.
        device: where batches go; None = the device that Ray Train gave this worker, or the CPU.
        cursor: start of the stream; None = the latest checkpoint's place, see `Loader.report`, `checkpoint` and
            `save`, or the beginning. If the checkpoint contains no place, the stream starts at `load_state_dict`.
        augment: augmentation on the device: training batches are augmented, mixed and normalized, validation
            batches only normalized. A mere module, such as an `nn.Sequential` of Kornia's operations, gets floats
            in [0, 1]. The Normalize at the end of the pipeline or of the module holds. None = batches stay uint8,
            or keep the arrays' dtype; a pipeline that ends with ToDtype, Normalize and the like makes floats.
        dtype: type of the images that `augment` or the pipeline's end makes; None = the pipeline's, or float32.
        prefetch_factor: transfers ahead of the consumer, on CUDA.
        keep_batches: batches that stay valid besides the newest, for a loop that looks ahead. On CUDA each takes
            the memory of one more batch there, and as much pinned memory; on CPU a batch is valid as long as
            you keep it.
        run_dir: folder in which rank 0 records the run, and which `Loader.checkpoint` writes to: a path or a URI.
            The stream continues from the newest checkpoint in it. Empty = records go to the folder of Ray Train's
            run, or without Ray Train nowhere.
        start_from: folder or URI of a run or a checkpoint. While the run has no checkpoint, the stream
            continues from there, and `Loader.restore` loads it.
        lease: what `raypipe.lease(run_dir)` gave: no checkpoint is written once another process has the folder.
        log_digest: record a hash of each batch that is handed out in `digests/` of the run's folder, which all
            ranks share: `raypipe audit` compares them with batches that it makes again.
        trace: file of Chrome trace events, which https://ui.perfetto.dev shows: a path or a URI. Rank 0 writes
            there what the stream's processes do, from now to `trace_s` after the first batch. Empty = no trace.
        trace_s: seconds.

    Raises:
        CursorError: the checkpoint belongs to another plan.
        ConfigError: W does not divide M, an argument has the wrong type, `start_from` has no checkpoint, the mesh
            has no data-parallel axis, or log_digest has no folder to write to.
        ResourceError: there are no CPUs for the pool.
    """
    arguments = dict(locals())
    join_train_run()  # first: also for errors of the lines below
    checked = _checked(arguments)
    trace_address = _trace_address(checked["trace"])
    if trace_address:
        spec = replace(spec, traces=True)
    in_train = in_train_function()
    share = share_of(checked["rank"], checked["world_size"], mesh)
    spec.plan.check_workers(share.world_size)
    device = _device_of(device, in_train)
    checkpoints = None
    folder = _folder_of_train() if in_train else None
    if checked["run_dir"]:
        checkpoints = RunCheckpoints(as_uri(checked["run_dir"]), lease)
        folder = open_filesystem(checkpoints.run_uri)
    augment = _augment_config(augment, spec.endings.get("train"))
    digest_log = None
    if log_digest:
        record = settings_record(spec, augment, dtype)
        log = DigestLog(folder, record, share.rank, share.world_size, device)
        digest_log = log if share.is_first else None
    try:
        start = _start_of(
            cursor,
            checked["start_from"],
            checkpoints,
            spec.plan.check,
            *(processes() or (0, 1)),
        )
    except CursorError as error:
        changed = changed_since(checked["run_dir"] or checked["start_from"], spec)
        raise CursorError(f"{error}{changed}") from error
    if cursor is None and start:
        cursor = cursor_of(start)
    is_apart = device.type == "cuda"
    source = _source_of(spec, share, in_train, max_actors, is_apart)
    return Loader(
        spec,
        source,
        share,
        device,
        cursor=cursor,
        begins=start is None or cursor is not None,
        augment=augment,
        dtype=dtype,
        prefetch_factor=prefetch_factor,
        keep_batches=keep_batches,
        folder=folder,
        start=start,
        checkpoints=checkpoints,
        digest_log=digest_log,
        trace=trace_address,
        trace_s=trace_s,
    )


def _checked(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `loader` that have a kind, of that kind; raises ConfigError."""
    checked = {
        name: check(f"raypipe.loader: {name}", arguments[name], kind)
        for name, kind in _KINDS.items()
    }
    for name, default, needed in (("lease", "", "run_dir"), ("trace_s", 60, "trace")):
        if checked[name] != default and not checked[needed]:
            raise ConfigError(f"raypipe.loader: {name} has no effect without {needed}")
    return checked


def _device_of(device: torch.device | str | None, in_train: bool) -> torch.device:
    """The device of a rank's batches; by default the one that Ray Train gave this worker, or the CPU."""
    if device is None:
        device = ray.train.torch.get_device() if in_train else "cpu"
    return torch.device(device)


def _trace_address(trace: str) -> str:
    """The URI of the file of a trace, which can be written; empty = none."""
    if not trace:
        return ""
    address = as_uri(trace)
    check_place(address)
    return address


def _source_of(
    spec: StreamSpec,
    share: Share,
    in_train: bool,
    max_actors: int | None,
    apart: bool,
) -> HostSource:
    """The stream of a rank, made on a device, in this process, or by Ray; see `RayStreams`."""
    rank, world_size = share[:2]
    siblings = 1
    if spec.resident is not None:
        return HostSource(functools.partial(spec.resident.open, rank, world_size))
    if spec.pool.engine == "inline":
        maker = MicroBatchMaker(spec)
        open_at = functools.partial(
            inline_batches, spec, rank=rank, world_size=world_size, maker=maker
        )
        return HostSource(open_at, draws_globally=maker.draws_globally)
    from raypipe.streaming.ray_stream import RayStreams  # this imports ray.data

    if share.is_given or not in_train:
        # each process has an execution
        spec = replace(spec, share=(rank, world_size))
        rank = 0
        world_size = 1
        in_train = False
        siblings = share.num_processes
    streams = RayStreams(spec, rank, world_size, in_train, max_actors, apart, siblings)
    return HostSource(streams.open, streams)


def _start_of(
    cursor: Cursor | None,
    start_from: str,
    checkpoints: RunCheckpoints | None,
    check: Callable[[Cursor], None],
    rank: int,
    world_size: int,
) -> RunFolder | Checkpoint | None:
    """The run's latest checkpoint, of Ray Train or in its folder, else that of `start_from`; None = none."""
    of_train = latest_of_train()
    if of_train:
        start_from = ""
    of_run = None
    if checkpoints and cursor is None:
        of_run = checkpoints.find(start_from, check, rank, world_size)
    elif start_from:
        of_run = find_start(start_from, check)
    return _later(of_train, of_run)


def changed_since(folder: str, spec: StreamSpec) -> str:
    """Return the settings of a stream's order that a run's record has with other values, as an error's end."""
    records = read_records(as_uri(folder)) if folder else []
    then: dict[str, Any] = {}
    for record in records:
        then |= record.get("settings", {}) if record.get("kind") == "start" else {}
    now = plain_settings(spec, workers=0, actors=0, from_step=0, to_step=0)
    names = [
        name
        for name in now
        if name.startswith(("plan.", "store", "left_out"))
        and then.get(name, now[name]) != now[name]
    ]
    listed = ", ".join(f"{name}={now[name]} (was {then[name]})" for name in names)
    return f". Changed: {listed}" if listed else ""


def _later(
    of_train: RunFolder | None, of_run: Checkpoint | None
) -> RunFolder | Checkpoint | None:
    """The later of Ray Train's checkpoint and that of the run's folder; Ray Train's if it has no place."""
    if of_train is None or of_run is None:
        return of_train or of_run
    cursor = cursor_of(of_train)
    if cursor and (cursor.epoch, cursor.step) < (
        of_run.cursor.epoch,
        of_run.cursor.step,
    ):
        return of_run
    return of_train


def _augment_config(
    augment: AugmentConfig | Callable[..., Any] | None, ending: Ending | None
) -> AugmentConfig | None:
    """The configuration of an augmentation, which may be a mere module, behind a pipeline with an ending."""
    if augment is None or isinstance(augment, AugmentConfig):
        return augment
    if ending and ending.normalizes:
        return AugmentConfig(module=augment)
    return replace(PLAIN, module=augment)


def _folder_of_train() -> RunFolder | None:
    """The folder of Ray Train's run; None where it has none, in a train function that its driver itself calls."""
    try:
        storage = ray.train.get_context().get_storage()
    except NotImplementedError:
        return None
    return storage.storage_filesystem, storage.experiment_fs_path


def check_resources(
    spec: StreamSpec, scaling_config: ScalingConfig, *, world_size: int | None = None
) -> None:
    """Raise within seconds the errors that would end a `TorchTrainer` of this stream; call it before `fit`.

    Starts or connects to Ray as `fit` does, unless this process is connected. Ends a stream that this process has
    left open, if the trainers need its CPUs: they would wait for them forever. An elastic trainer with this
    configuration then runs on numbers of workers that divide M, and waits no longer for room than
    `pool.stall_timeout_s`.

    Args:
        spec: the stream.
        scaling_config: the trainer's.
        world_size: W, where a mesh, or the loaders' own `world_size`, makes fewer shares than there are workers;
            None = each worker has one.

    Raises:
        ConfigError: W does not divide M, or the number of workers, or the trainer is elastic and W is given.
        ResourceError: the cluster lacks resources for the workers and the smallest pool, and cannot scale to
            them.
    """
    from raypipe.rayext.allocation import check_own, cluster_resources, worker_resources
    from raypipe.rayext.trainer import use_divisors
    from raypipe.streaming.start.room import make_room

    # an attribute of Ray Train's version 2 that its type lacks
    config: Any = scaling_config
    workers = config.num_workers
    is_elastic = not isinstance(workers, int)
    if world_size is not None and (
        is_elastic or world_size < 1 or workers % world_size
    ):
        raise ConfigError(
            f"check_resources: world_size={world_size} shares of the data do not go evenly to "
            f"num_workers={workers}: give a number of workers that it divides, or leave it out, and each worker "
            "has a share"
        )
    if is_elastic:
        numbers = range(max(1, min(workers)), max(workers) + 1)
        per_step = spec.plan.config.per_step
        workers = next((n for n in numbers if per_step % n == 0), max(workers))
        use_divisors(config, spec.pool.stall_timeout_s, per_step)
    # 0 = the train function runs in this process
    spec.plan.check_workers(world_size or workers or 1)
    if not ray.is_initialized():
        ray.init()
    take_worker_logs()
    pool = spec.pool
    per_worker = worker_resources(config)
    offer = cluster_resources()
    cpus = per_worker.get("CPU", 0.0)
    check_own(offer.cpus, workers, cpus, pool, offer.gpus, per_worker.get("GPU", 0.0))
    make_room(workers * cpus + pool.least_actors * pool.cpus_per_actor)
