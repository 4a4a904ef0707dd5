"""The share of a stream that a process gets, by its launcher or by its place in a mesh of devices."""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple

import numpy as np
from torch.distributed.device_mesh import DeviceMesh

from raypipe.errors import ConfigError
from raypipe.rayext.agreement import processes

# Names of torchtitan, Accelerate, Lightning and PyTorch's tutorials.
_DATA_AXES = "dp, ddp, fsdp, data, data_parallel, batch, dp_replicate, dp_shard, replicate, shard"


class Share(NamedTuple):
    """A process's share of a stream.

    Attributes:
        rank, world_size: it has the micro-batches m of each step with m mod W = rank.
        process: number of the process in its run; 0 writes the run's records and checkpoints.
        num_processes: those of the run.
        is_given: whether the caller says so, and not the launcher.
        is_first: whether no process before it in the mesh has the same share.
    """

    rank: int
    world_size: int
    process: int
    num_processes: int
    is_given: bool = False
    is_first: bool = True


ALONE = Share(0, 1, 0, 1)


def share_of(
    rank: int | None = None,
    world_size: int | None = None,
    mesh: DeviceMesh | None = None,
) -> Share:
    """Return the share of this process.

    Args:
        rank, world_size, mesh: see `raypipe.loader`; None = by Ray Train, torch.distributed, or the variables RANK
            and WORLD_SIZE of a launcher; without any of them, the whole stream.

    Raises:
        ConfigError: they contradict each other, or the mesh has no data-parallel axis.
    """
    started = processes()
    if started is None and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        started = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    given = mesh, rank, world_size
    if given == (None, None, None):
        return Share(*started, *started) if started else ALONE
    if given[1:] == (None, None):
        return _in_mesh(mesh, *(started or (0, 1)))
    if rank is None and world_size == 1:
        rank = 0
    if mesh is not None or rank is None or not world_size or rank >= world_size:
        raise ConfigError(
            "raypipe.loader: give rank and world_size, with rank from 0 to world_size - 1, or only a mesh, got "
            f"rank={rank} and world_size={world_size}"
        )
    return Share(rank, world_size, *(started or (rank, world_size)), is_given=True)


def _in_mesh(mesh: Any, process: int, num_processes: int) -> Share:
    names = mesh.mesh_dim_names or ("dp",) * (mesh.ndim == 1)
    known = _DATA_AXES.split(", ")
    axes = [axis for axis, name in enumerate(names) if name in known]
    place = list(mesh.get_coordinate() or [])
    if not axes or not place:
        raise ConfigError(
            f"raypipe.loader: process {process} has the place {place} in a mesh of the axes {names}; it needs a "
            f"data-parallel axis ({_DATA_AXES}), or rank and world_size"
        )
    sizes = [mesh.size(axis) for axis in axes]
    numbers = [place.pop(axis) for axis in reversed(axes)]
    rank = int(np.ravel_multi_index(numbers[::-1], sizes))
    return Share(rank, math.prod(sizes), process, num_processes, True, not any(place))
