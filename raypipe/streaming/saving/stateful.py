"""The states of an own loop's model and optimizer, to and from `raypipe.streaming.saving.checkpoints`."""

from __future__ import annotations

import io
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from raypipe.errors import ConfigError
from raypipe.metrics.records import RunFolder
from raypipe.plan.places import Cursor
from raypipe.storage.filesystem import as_uri, open_filesystem
from raypipe.streaming.saving.checkpoints import write_files


class Stateful(Protocol):
    """Object that a checkpoint can store: a model, an optimizer, a learning-rate schedule, a scaler, …"""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def saved(state: Mapping[str, Any]) -> memoryview:
    """state.pt of the states of parts, by name.

    Raises:
        ConfigError: a part holds objects that `loaded` would refuse.
    """
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(file):
        for name, values in state.items() if len(state) > 1 else ():
            saved({name: values})
        raise ConfigError(
            f"the state_dict of {', '.join(state)} has {', '.join(sorted(unsafe))}, which no resume could load: "
            "give tensors, plain numbers, text, lists and dicts (float(x), torch.from_numpy(x) for NumPy's)"
        )
    return file.getbuffer()


def loaded(content: bytes) -> dict[str, Any]:
    """The state in a state.pt, on the CPU."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


Parts = Mapping[str, Stateful | None]
"""Parts of a checkpoint, by name; None = a part that this run lacks, such as an average of its weights."""


def states_of(parts: Parts) -> dict[str, Any]:
    """Return the states of parts, by name; all ranks call it.

    Raises:
        ConfigError: a part is sharded.
    """
    from torch.distributed.tensor import DTensor

    state = {
        name: _unwrapped(part).state_dict() if part is not None else None
        for name, part in parts.items()
    }
    for name, values in state.items():
        if any(isinstance(value, DTensor) for value in tree_leaves(values)):
            raise ConfigError(
                f"{name} is sharded, and each rank has one shard of it: save it with "
                'torch.distributed.checkpoint, as docs/training-loop.md shows under "FSDP2"'
            )
    return state


def report(
    metrics: Mapping[str, Any],
    parts: Parts,
    rank: int,
    cursor: Cursor,
    described: Mapping[str, Any] | None = None,
) -> None:
    """Report metrics and a checkpoint to Ray Train; all ranks call it.

    On its return Ray Train has noted the checkpoint: whatever dies from then on, the run resumes from this one.
    With `checkpoint_upload_mode=ASYNC` it would return before that, so it waits for the upload.

    Args:
        metrics: those that are numbers are also in the checkpoint.
        parts: by their names.
        cursor: where the run stands.
        described: the model's input, see `saved_model.input_of`.
    """
    import ray.train  # 2 s, which those who have no train function need not wait

    state = states_of(parts)
    if rank > 0:
        ray.train.report(dict(metrics))
    else:
        with tempfile.TemporaryDirectory() as folder:
            write_files(
                open_filesystem(as_uri(folder)),
                cursor,
                saved(state),
                of_kind(metrics, NUMBERS),
                described,
            )
            ray.train.report(
                dict(metrics), checkpoint=ray.train.Checkpoint.from_directory(folder)
            )
    # Ray Train's `report` leaves it in a queue of this process, which the controller empties every 0.5 s: until
    # then the death of any rank would lose it.
    ray.train.get_all_reported_checkpoints(
        consistency_mode=ray.train.CheckpointConsistencyMode.COMMITTED
    )


def as_plain_numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics whose tensors and arrays of one element are numbers.

    Ray Train refuses a tensor, and its controller would end the run at a number of NumPy's.
    """
    return {
        name: value.item() if hasattr(value, "item") else value
        for name, value in metrics.items()
    }


NUMBERS = int | float
IN_CHECKPOINT = int | float | str | None
"""Kinds of metrics that a checkpoint in a run's folder keeps."""


def of_kind(metrics: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Return the metrics of a kind."""
    return {name: value for name, value in metrics.items() if isinstance(value, kind)}


def latest_of_train() -> RunFolder | None:
    """Ray Train's latest checkpoint; None = it has none, or this process is not a worker of its."""
    if "ray.train" not in sys.modules:
        # a train function's process has it; others need not wait 2 s for it
        return None
    import ray.train

    try:
        checkpoint = ray.train.get_checkpoint()
    except (RuntimeError, DeprecationWarning):  # the second in a function of Ray Tune
        return None
    if checkpoint:
        return (checkpoint.filesystem, checkpoint.path)
    return None


def restore(parts: Parts, state: Mapping[str, Any], path: str) -> None:
    """Load the states of a checkpoint, by name, into the parts; `path` names it in messages.

    Raises:
        ConfigError: it does not hold all the parts, or one of another make.
    """
    present = {name: part for name, part in parts.items() if part is not None}
    if missing := {name for name in present if state.get(name) is None}:
        # a run without an average of its weights
        raise ConfigError(
            f"{path} has {', '.join(state)}, and no {', '.join(sorted(missing))}"
        )
    for name, part in present.items():
        try:
            _unwrapped(part).load_state_dict(state[name])
        except (KeyError, RuntimeError, ValueError) as error:
            # torch's error names every parameter of a model
            beginning = textwrap.shorten(str(error), 400, placeholder=" …")
            raise ConfigError(
                f"{name} in {path} does not fit this one: {beginning}"
            ) from error


def _unwrapped(model: Any) -> Any:
    """The model in a DDP: a checkpoint is the same for any number of workers."""
    if isinstance(model, DistributedDataParallel):
        return model.module
    return model
