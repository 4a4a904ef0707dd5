"""The way of a rank's micro-batches from host memory to its loop: onto the device, augmented."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from raypipe.device.augment import DeviceAugment
from raypipe.device.prefetcher import Batch, asked_for_here, on_device
from raypipe.device.ring import uses_ring
from raypipe.metrics.timing import StageClock
from raypipe.plan.places import Split
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.fields import IMAGE, VIEW, MicroBatch


class Feed(NamedTuple):
    """Source of a rank's batches, and the processes behind it.

    Attributes:
        batches: micro-batches in host memory.
        supervisor: handle of the stream's supervisor, if it has one.
        actors: most transform actors of the pool, if this rank knows it.
        draws_globally: the thread that requests a batch makes it, from the process's generators: it must be the
            consumer's.
        end: function that ends all other parts, once the batches are closed.
    """

    batches: Iterator[MicroBatch]
    supervisor: Any = None
    draws_globally: bool = False
    actors: int = 0
    end: Callable[[], None] = lambda: None


def moved(
    feed: Feed,
    spec: StreamSpec,
    device: torch.device,
    clocks: Mapping[Split, StageClock],
    prefetch_factor: int,
    keep_batches: int,
) -> Iterator[Batch]:
    """Micro-batches on the device.

    Args:
        clocks: of each split; transfers are counted with "train".
        prefetch_factor, keep_batches: see `raypipe.loader`.
    """
    move = functools.partial(
        on_device,
        device=device,
        seed_of=spec.plan.micro_batch_seed,
        depth=prefetch_factor,
        keep=keep_batches,
        on_copied=functools.partial(clocks["train"].add, "transfer"),
    )
    if feed.draws_globally and uses_ring(device):
        return asked_for_here(feed.batches, move, prefetch_factor)
    return move(feed.batches)


def augmented(batch: Batch, augment: DeviceAugment, strength: Callable[[int, int], float]) -> Batch:
    """Augment a training batch, or normalize a validation batch.

    Args:
        strength: strength of the augmentation at an epoch and a step.
    """
    if batch.position.split != "train":
        named = {f"{VIEW}.{name}": view for name, view in batch.views.items()} or {IMAGE: batch.image}
        return batch.with_fields({name: augment.normalize(images) for name, images in named.items()})
    at_strength = strength(batch.position.epoch, batch.position.step)
    if batch.views:
        views = augment.of_views(batch.views, seed=batch.seed, strength=at_strength)
        return batch.with_fields({f"{VIEW}.{name}": view for name, view in views.items()})
    image, mixed = augment(batch.image, batch.target, batch.index >= 0, seed=batch.seed, strength=at_strength)
    return batch.with_fields({IMAGE: image}, mix=mixed)
