"""The way of a rank's micro-batches from host memory to its loop: onto the device, judged, augmented."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from raypipe.device.augment import DeviceAugment
from raypipe.device.device_decode import DeviceDecoder
from raypipe.device.prefetcher import Batch, asked_for_here, decoded_on_device, on_device
from raypipe.device.ring import uses_ring
from raypipe.errors import SampleError
from raypipe.metrics.timing import StageClock
from raypipe.plan.places import MicroBatchId, Split
from raypipe.stores.base import name_of, title_of
from raypipe.streaming.bad_samples import BadSampleBudget, record_bad
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.fields import IMAGE, VIEW, MicroBatch
from raypipe.transform.sizes import Size, size_in


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
) -> tuple[Iterator[Batch], str]:
    """Micro-batches on the device, copied or decoded there, and the library that decodes; empty = none does.

    Args:
        clocks: of each split; transfers are counted with "train".
        prefetch_factor, keep_batches: see `raypipe.loader`.
    """
    move: Callable[[Iterable[MicroBatch]], Iterator[Batch]]
    plan, transform, library = spec.plan, spec.transform, ""
    if transform.decode == "gpu":
        decoder = DeviceDecoder(transform.final_size, device, transform.apply_exif)
        library = decoder.library

        def add_decode(at: MicroBatchId, since: object, until: object) -> None:
            clocks[at.split].add("decode", since, until)

        def size_of(at: MicroBatchId) -> Size:
            return size_in(transform, at.split, at.epoch, plan.bucket_of(at))

        move = functools.partial(
            decoded_on_device,
            decoder=decoder,
            seed_of=plan.micro_batch_seed,
            depth=prefetch_factor,
            on_decoded=add_decode,
            size_of=size_of,
        )
    else:
        move = functools.partial(
            on_device,
            device=device,
            seed_of=plan.micro_batch_seed,
            depth=prefetch_factor,
            keep=keep_batches,
            on_copied=functools.partial(clocks["train"].add, "transfer"),
        )
    in_thread = bool(library) or uses_ring(device)
    if feed.draws_globally and in_thread:
        return asked_for_here(feed.batches, move, prefetch_factor), library
    return move(feed.batches), library


def judge(batch: Batch, spec: StreamSpec, budget: BadSampleBudget) -> None:
    """Handle bad samples that only the device's decoder found: too late for substitutes, they get weight 0.

    Raises:
        SampleError: there is one, and transform.max_bad_fraction is 0.
        BadSamplesError: there are too many.
    """
    store = spec.stores[batch.position.split]
    bad = []
    for row, error in batch.failed.items():
        index = int(batch.index[row])
        where = {"store": store.address, "index": index, "name": name_of(store, index)}
        bad.append({**where, "substitute": None, "error": error, "fault": SampleError.fault})
    if bad:
        record_bad(spec.quarantine, batch.position, bad, by="device")
        if spec.transform.max_bad_fraction == 0:
            title = title_of(store.address, bad[0]["index"], bad[0]["name"])
            raise SampleError(f"{title}: {bad[0]['error']}")
    budget.spend(bad, len(batch.index))


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
    counts = batch.index >= 0
    counts[list(batch.failed)] = False
    image, mixed = augment(batch.image, batch.target, counts, seed=batch.seed, strength=at_strength)
    return batch.with_fields({IMAGE: image}, mix=mixed)
