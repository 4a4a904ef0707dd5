"""Checkpoints of a train function by Ray Train: the state of the user's model and optimizer, beside the place.

CHECKPOINT/
    state.pt       state_dict of each part, by its name
    cursor.json    where the run stands
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from raypipe.errors import ConfigError

_STATE_FILE = "state.pt"


class Stateful(Protocol):
    """What a checkpoint can hold: a model, an optimizer, a schedule of learning rates, a scaler, …"""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def report(
    metrics: Mapping[str, Any], parts: Mapping[str, Stateful], rank: int, save: Callable[[str], None]
) -> None:
    """Report metrics and a checkpoint to Ray Train; all ranks call it.

    On its return Ray Train has noted the checkpoint: whatever dies from then on, the run resumes from this one.

    Args:
        parts: by their names.
        save: writes the place into a folder.
    """
    import ray.train  # 2 s, which those who have no train function need not wait
    from torch.distributed.tensor import DTensor

    state = {name: _unwrapped(part).state_dict() for name, part in parts.items()}
    for name, values in state.items():
        if any(isinstance(value, DTensor) for value in values.values()):
            raise ConfigError(
                f"{name} is sharded, and each rank has one shard of it: save it with "
                'torch.distributed.checkpoint, as docs/own-loop.md shows under "FSDP2"'
            )
    if rank > 0:
        ray.train.report(dict(metrics))
    else:
        with tempfile.TemporaryDirectory() as folder:
            torch.save(state, Path(folder, _STATE_FILE))
            save(folder)
            ray.train.report(dict(metrics), checkpoint=ray.train.Checkpoint.from_directory(folder))
    # Ray Train's `report` leaves it in a queue of this process, which the controller empties every 2 s: until then
    # the death of any rank would lose it.
    ray.train.get_all_reported_checkpoints(consistency_mode=ray.train.CheckpointConsistencyMode.COMMITTED)


def restore(parts: Mapping[str, Stateful]) -> None:
    """Load what `report` has saved into the latest checkpoint, if there is one.

    Raises:
        ConfigError: the checkpoint does not hold all the parts.
    """
    import ray.train

    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return
    with checkpoint.as_directory() as folder:
        path = Path(folder, _STATE_FILE)
        if not path.exists():
            raise ConfigError(f"{checkpoint.path} was not made by loader.report: restore it as you have made it")
        state = torch.load(path, map_location="cpu", weights_only=True)
    if missing := parts.keys() - state.keys():
        raise ConfigError(f"{checkpoint.path} has {', '.join(state)}, and no {', '.join(sorted(missing))}")
    for name, part in parts.items():
        _unwrapped(part).load_state_dict(state[name])


def _unwrapped(part: Any) -> Any:
    """The model in a DDP: a checkpoint is the same for any number of workers."""
    return part.module if isinstance(part, DistributedDataParallel) else part
