"""What a stream holds and a run learns, made in this process: what a real one, on a cluster, must be equal to."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from raypipe.config import PoolConfig, RunConfig
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.fields import MicroBatch


def host_batches(spec: StreamSpec, from_step: int = 0) -> Iterator[MicroBatch]:
    """Each micro-batch from a training step on, by one worker, which reads the store itself."""
    maker = MicroBatchMaker(spec)
    return (
        maker.batch(at)
        for at in spec.plan.micro_batches(spec.plan.cursor_at(from_step))
    )


def every_batch(loader: Any) -> Iterator[Any]:
    """Of all that a loader has left, training and validation in turn."""
    for epoch in loader.epochs():
        yield from epoch.train
        yield from epoch.val


def digests(spec: StreamSpec, from_step: int = 0) -> list[bytes]:
    return [batch_hash(batch) for batch in host_batches(spec, from_step)]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Within, torch works in one thread: on busy cores two wait for each other longer than they work."""
    import torch  # noqa: F401  what is not imported keeps its threads

    from raypipe.transform.process_state import torch_in_one_thread

    with torch_in_one_thread():
        yield


@contextlib.contextmanager
def only_rank() -> Iterator[None]:
    """Within, this process is the only rank of a run by Ray Train."""
    from ray.train.v2._internal.execution import train_fn_utils

    from raypipe.rayext.trainer import train_alone

    before = train_fn_utils._train_fn_utils
    train_alone("alone")
    try:
        yield
    finally:
        train_fn_utils._train_fn_utils = before


def train(run: RunConfig, device: str = "cpu") -> dict[str, Any]:
    """The figures of a whole run, whose folder is left as Ray Train's workers would leave it."""
    from raypipe.launch.run_checks import num_classes_of
    from raypipe.launch.run_folder import located, store_config
    from raypipe.streaming.opening import spec_of
    from raypipe.train.loop import Trainer

    inline = dataclasses.replace(run, pool=PoolConfig(engine="inline"))
    # One thread, as Ray has it in a worker of one CPU.
    with one_thread(), only_rank(), located(inline) as (inline, run_uri, lease):
        spec = spec_of(inline, run_uri)
        store_config(inline, run_uri)
        trainer = Trainer(
            inline, spec, num_classes_of(inline, spec), 0, run_uri, lease, device=device
        )
        for _ in trainer.epochs():
            pass
    return {**trainer.figures(), "run_dir": run_uri.removeprefix("file://")}
