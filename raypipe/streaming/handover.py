"""The hand-over to Ray Train: one call in the train function gives this rank's loader.

At every (re)start of the worker group the ranks read the cursor from the latest checkpoint; rank 0 builds the
stream from there, splits it over the current W ranks, and hands out the iterators.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import ray
import torch

from raypipe.config import AtLeast1, AugmentConfig, PoolConfig
from raypipe.device.modules import PLAIN
from raypipe.errors import ConfigError, RaypipeError
from raypipe.metrics.records import Folder
from raypipe.mistakes import checks_keywords
from raypipe.plan.places import Cursor
from raypipe.plan.schedule import Segment
from raypipe.rayext.console import quiet_broadcasts, take_console
from raypipe.rayext.controller import own_controller, process_of
from raypipe.rayext.iteration import begun, stop_execution
from raypipe.rayext.watch import in_worker, this_process
from raypipe.section import MAX_INT, Limits, check
from raypipe.storage.filesystem import as_uri, open_filesystem
from raypipe.streaming.checkpoints import cursor_of, find_start
from raypipe.streaming.inline import inline_batches
from raypipe.streaming.loader import Loader
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.moves import Move
from raypipe.streaming.row import host_batches
from raypipe.streaming.running import Feed, end_oldest, supervisors
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.stateful import latest_of_train
from raypipe.streaming.supervisor import end_actors, start_supervisor

if TYPE_CHECKING:
    from ray.data import DataIterator
    from ray.train import ScalingConfig


_logger = logging.getLogger(__name__)

_SETTLE_S = 2.0  # CPUs of a stream that has just ended come back
# Images that an actor makes while a stream starts: 5 s pass until its first batch, at 1 ms for a photo.
_START_IMAGES = 5_000
# A rank that would skip a long part waits so long for the others to say that they do, too.
_AGREE_S = 60.0
# Time for other pools to give way: they know within a second or two, and actors finish their blocks.
_GIVE_WAY_S = 6.0


@checks_keywords
def loader(
    spec: StreamSpec,
    *,
    max_actors: int | None = None,
    device: torch.device | str | None = None,
    cursor: Cursor | None = None,
    augment: AugmentConfig | Callable[..., Any] | None = None,
    dtype: torch.dtype | None = None,
    prefetch_factor: int = 2,
    keep_batches: int = 0,
    run_dir: str | Path = "",
    start_from: str | Path = "",
) -> Loader:
    """Return this rank's loader. Call it once per rank, first in the train function, so the pool starts while
    you build the model.

    Without Ray Train, one process gets the whole stream, and connects to Ray as `connect` does. Several
    processes of torch.distributed, as with torchrun, each get a share, which needs pool.engine "inline".

    Args:
        spec: the stream.
        max_actors: transform actors that the pool may grow to; None = as many as the cluster has room for now.
        device: where batches go; None = the device that Ray Train gave this worker, or the CPU.
        cursor: start of the stream; None = the latest checkpoint's place, see `Loader.save`, or the beginning.
            If the checkpoint contains no place, the stream starts at `load_state_dict`.
        augment: augmentation on the device: training batches are augmented, mixed and normalized, validation
            batches only normalized. A mere module, such as an `nn.Sequential` of Kornia's operations, gets floats
            in [0, 1]. The Normalize at the end of the pipeline or of the module holds. None = batches stay uint8,
            or keep the arrays' dtype; a pipeline that ends with ToDtype, Normalize and the like makes floats.
        dtype: type of the images that `augment` or the pipeline's end makes; None = the pipeline's, or float32.
        prefetch_factor: transfers ahead of the consumer, on CUDA.
        keep_batches: batches that stay valid besides the newest, for a loop that looks ahead. On CUDA each takes
            the memory of one more batch there, and as much pinned memory; on CPU a batch is valid as long as
            you keep it.
        run_dir: folder in which rank 0 records the run: a path or a URI; empty = the
            folder of Ray Train's run, or without Ray Train none.
        start_from: folder or URI of a run or a checkpoint. While Ray Train has no checkpoint, the stream
            continues from there, and `Loader.restore` loads it.

    Raises:
        CursorError: the checkpoint belongs to another plan.
        ConfigError: W does not divide M, an argument has the wrong type, `start_from` has no checkpoint, or
            torchrun's process group was not started.
        ResourceError: there are no CPUs for the pool.
    """
    check("raypipe.loader: spec", spec, StreamSpec)
    check("raypipe.loader: max_actors", max_actors, AtLeast1 | None)
    check("raypipe.loader: cursor", cursor, Cursor | None)
    check("raypipe.loader: augment", augment, AugmentConfig | Callable | None)
    if augment is not None and not isinstance(augment, AugmentConfig):
        ending = spec.endings.get("train")
        augment = replace(
            AugmentConfig() if ending and ending.normalizes else PLAIN, module=augment
        )
    own_dir: str = check("raypipe.loader: run_dir", run_dir, str)  # a Path becomes text
    start_address: str = check("raypipe.loader: start_from", start_from, str)
    for name, least, number in (
        ("prefetch_factor", 1, prefetch_factor),
        ("keep_batches", 0, keep_batches),
    ):
        check(f"raypipe.loader: {name}", number, Annotated[int, Limits(least, MAX_INT)])
    rank = 0
    world_size = 1
    in_train = _in_train_worker()
    if in_train:
        context = ray.train.get_context()
        rank = context.get_world_rank()
        world_size = context.get_world_size()
    elif torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = torch.distributed.get_rank()
        world_size = torch.distributed.get_world_size()
        if world_size > 1 and spec.pool.engine != "inline":
            raise ConfigError(
                f"{world_size} processes outside of Ray Train do not share a stream that Ray makes: start them by "
                "a TorchTrainer, or let each make its own share (pool.engine=inline)"
            )
    elif "RANK" in os.environ and (num := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ConfigError(
            f"a launcher started {num} processes, and each would get the whole stream: call "
            "torch.distributed.init_process_group() before raypipe.loader, for the share of its rank"
        )
    spec.plan.check_workers(world_size)
    device = torch.device(
        device or (ray.train.torch.get_device() if in_train else "cpu")
    )

    most = max_actors  # once it is known, it stays: a stream that starts again gets the CPUs that it had

    again = False

    def open_at(start: Cursor, only: Segment | None = None) -> Feed:
        nonlocal most, again
        if only:
            part = replace(spec, plan=spec.plan.only(only))
        else:
            part = spec
        if spec.pool.engine == "inline":
            maker = MicroBatchMaker(part)
            batches = inline_batches(part, start, rank, world_size, maker)
            return Feed(batches, draws_globally=maker.draws_globally)
        give_back = _ask_for_room(spec.pool) if rank == 0 else lambda: None
        iterators, supervisor, most = _handed_round(
            part,
            start,
            most,
            rank,
            world_size,
            in_train,
            apart=device.type == "cuda",
            again=again,
        )
        again = True

        def end() -> None:
            end_actors(supervisor, iterators, rank)
            give_back()

        return Feed(
            host_batches(begun(iterators[rank])),
            supervisor,
            actors=most,
            stop=functools.partial(stop_execution, supervisor),
            end=end,
            start_images=_START_IMAGES * most,
            moves=functools.partial(_moved, supervisor, rank, world_size)
            if world_size > 1
            else None,
        )

    first = latest_of_train()
    if start_address and not first:
        first = open_filesystem(find_start(start_address, spec.plan.check).address)
    return Loader(
        spec,
        open_at,
        rank,
        world_size,
        device,
        cursor=cursor or (cursor_of(first) if first else spec.plan.start()),
        augment=augment,
        dtype=dtype,
        prefetch_factor=prefetch_factor,
        keep_batches=keep_batches,
        folder=open_filesystem(as_uri(own_dir))
        if own_dir
        else _folder_of_train()
        if in_train
        else None,
        start_from=first,
    )


def _moved(supervisor: Any, rank: int, world_size: int, move: Move) -> bool:
    """Tell the other ranks of a move of this one; returns whether it leaves the execution, since all do.

    It waits for them no longer than `_AGREE_S`, and then reads on, as one that computes for so long does later.
    """
    supervisor.rank_moves.remote(rank, world_size, move)
    deadline = time.monotonic() + _AGREE_S
    answer = "wait"
    while move.leaves and answer == "wait":
        time.sleep(0.05)
        answer = ray.get(supervisor.answer.remote(rank, time.monotonic() > deadline))
    return answer == "leave"


def _broadcast(handed: Any, rank: int, place: str, timeout_s: float) -> Any:
    """Return rank 0's value on all ranks, which call this.

    Args:
        place: where the stream starts again; empty = it starts for the first time, which may take any time.
        timeout_s: limit of the wait for ranks that do not ask for the same.
    """
    from ray.train.collective import broadcast_from_rank_zero

    quiet_broadcasts()  # it warns of more than 1,000 bytes; these are about 6,000, once
    if not place:
        return broadcast_from_rank_zero(handed)
    waiting = ThreadPoolExecutor(1, "raypipe-handover").submit(
        broadcast_from_rank_zero, handed
    )
    try:
        return waiting.result(timeout_s)
    except TimeoutError:
        raise RaypipeError(
            f"rank {rank} starts the stream again at {place}, and other ranks have not for {timeout_s:g} s "
            "(pool.stall_timeout_s): all ranks iterate the same passes, also a validation that is made again"
        ) from None


def _folder_of_train() -> Folder | None:
    """The folder of Ray Train's run; None where it has none, in a train function that its driver itself calls."""
    try:
        storage = ray.train.get_context().get_storage()
    except NotImplementedError:
        return None
    return storage.storage_filesystem, storage.experiment_fs_path


def check_resources(spec: StreamSpec, scaling_config: ScalingConfig) -> None:
    """Raise within seconds the errors that would end a `TorchTrainer` of this stream; call it before `fit`.

    Starts or connects to Ray as `fit` does, unless this process is connected. Ends a stream that this process has
    left open, if the trainers need its CPUs: they would wait for them forever.

    Raises:
        ConfigError: the number of workers does not divide M.
        ResourceError: the cluster lacks resources for the workers and the smallest pool, and cannot scale to
            them.
    """
    from raypipe.rayext.allocation import check_own, cluster_resources, worker_resources

    # an attribute of Ray Train's version 2 that its type lacks
    config: Any = scaling_config
    workers = config.num_workers
    if isinstance(workers, int):
        # 0 = the train function runs in this process
        spec.plan.check_workers(workers or 1)
    else:
        workers = min(workers)  # elastic
    if not ray.is_initialized():
        ray.init()
    take_console()
    pool = spec.pool
    per_worker = worker_resources(config)
    offer = cluster_resources()
    cpus = per_worker.get("CPU", 0.0)
    check_own(offer.cpus, workers, cpus, pool, offer.gpus, per_worker.get("GPU", 0.0))
    _make_room(workers * cpus + pool.least_actors * pool.cpus_per_actor)


def _handed_round(
    spec: StreamSpec,
    start: Cursor,
    max_actors: int | None,
    rank: int,
    world_size: int,
    in_train: bool,
    apart: bool,
    again: bool = False,
) -> tuple[list[DataIterator], Any, int]:
    """Stream that rank 0 built: the iterators of all ranks, the supervisor's handle, and the most actors."""
    from raypipe.rayext.allocation import check_own, cluster_resources, preflight
    from raypipe.rayext.cluster import connect
    from raypipe.streaming.pipeline import splits

    handed: tuple[str, str, tuple[list[DataIterator], Any, int]] | None = None
    only = spec.plan.single
    place = f"epoch {start.epoch}, step {start.step}"
    if only:
        place = f"step {only.first_step} of the validation of epoch {only.epoch}"
    if rank == 0:
        connect()  # a loader outside of Ray Train may be the first here to need Ray
        if (
            in_train and max_actors is None and in_worker()
        ):  # a driver may also call its train function
            own = ray.get_runtime_context().get_assigned_resources().get("CPU", 0.0)
            check_own(cluster_resources().cpus, world_size, own, spec.pool)
        if world_size == 1:
            _make_room(spec.pool.least_actors * spec.pool.cpus_per_actor)
        if max_actors is None:
            most = preflight(spec.pool).max_actors
        else:
            most = max_actors
        supervisor = start_supervisor(spec.run, spec.log_format)
        iterators = splits(
            spec,
            start,
            max_actors=most,
            world_size=world_size,
            supervisor=supervisor,
            apart=apart,
        )
        handed = spec.plan.fingerprint, place, (iterators, supervisor, most)
    if in_train and world_size > 1:
        handed = _broadcast(
            handed, rank, place if again else "", spec.pool.stall_timeout_s
        )
    assert handed is not None
    plan, of_first, stream = handed
    if plan != spec.plan.fingerprint:
        raise ConfigError(
            f"rank {rank} has plan {spec.plan.fingerprint}, and rank 0 has {plan}: give all ranks the same stores "
            "and settings, whole; raypipe hands each rank its share"
        )
    if of_first != place:
        raise RaypipeError(
            f"rank {rank} starts the stream at {place}, and rank 0 at {of_first}: all ranks iterate the same "
            "passes of the same epochs"
        )
    if in_train and in_worker():
        stream[1].process_joined.remote(
            f"trainer {rank}", this_process(f"trainer {rank}")
        )
        if (
            rank == 0
            and (controller := own_controller())
            and (process := process_of(controller))
        ):
            stream[1].process_joined.remote("controller", process)
    return stream


def _make_room(cpus: float) -> None:
    """Where a stream that this process has left open holds so many CPUs that these are not free, end it.

    It may be one that nobody can end any more, as a notebook's names and errors hold it.
    """
    from raypipe.rayext.allocation import cluster_resources

    def has_room() -> bool:
        deadline = time.monotonic() + _SETTLE_S
        while cluster_resources().free_cpus < cpus:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    while not has_room() and end_oldest():
        _logger.warning(
            "an earlier stream of this process was left open, and has been ended: its CPUs are needed for the "
            "new one. It starts again if it is asked for more. End one by loader.close(), or leave room for both"
        )


def _ask_for_room(pool: PoolConfig) -> Callable[[], None]:
    """Let the pools of this process's other streams give way, as far as a new one needs it and they have more than
    their least; returns what ends that.
    """
    from raypipe.rayext.allocation import cluster_resources

    cpus = pool.least_actors * pool.cpus_per_actor
    others = supervisors()
    if not others or cluster_resources().free_cpus >= cpus:
        return lambda: None
    deadline = time.monotonic() + _GIVE_WAY_S

    def ask(more: float) -> None:
        for other in others:
            with contextlib.suppress(ray.exceptions.RayError):
                if ray.is_initialized():  # a call would restart it
                    other.give_way.remote(more)

    ask(cpus)
    while cluster_resources().free_cpus < cpus and time.monotonic() < deadline:
        time.sleep(0.1)
    return functools.partial(ask, -cpus)


def _in_train_worker() -> bool:
    if (
        "ray.train" not in sys.modules
    ):  # a train function's process has it; others need not wait 2 s for it
        return False
    import ray.train.torch

    try:
        return ray.train.get_context().get_world_size() is not None
    except (RuntimeError, DeprecationWarning):  # the second in a function of Ray Tune
        return False
