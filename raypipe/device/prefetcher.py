"""Micro-batches on the device, ahead of their use. Knows torch, not Ray.

    on_device        MicroBatch → Batch

On CUDA they go through the pinned ring of `raypipe.device.ring`; on CPU nothing is transferred. With
`transform.decode: device` images are decoded where the ring takes a micro-batch, ahead of its use, and do not go
through the ring.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from raypipe.device.ambient import pinned
from raypipe.device.mixing import Mix
from raypipe.device.ring import OnCopied, Ring, hand_over, uses_ring, view
from raypipe.errors import ConfigError
from raypipe.mistakes import Unlike
from raypipe.plan.places import MicroBatchId
from raypipe.plan.schedule import Plan
from raypipe.transform.block_memory import reused_memory
from raypipe.transform.fields import (
    COLUMN,
    IMAGE,
    LABEL,
    VIEW,
    MicroBatch,
    Ragged,
    images_in,
    in_group,
)
from raypipe.transform.nest import NEST, TENSORS, unpack
from raypipe.transform.samples import check_labels

_INSTEAD = (
    "write batch.image and batch.target; columns are batch.columns['caption'], masks and the like are "
    "batch.fields['mask'], and len(batch.index) is its size"
)


@dataclass(frozen=True)
class Batch(Unlike, instead=_INSTEAD):
    """A micro-batch on the training device. From a ring it is valid until the next one is requested, or for
    `keep_batches` more batches.

    Attributes:
        position: place in the run.
        seed: seed of everything that is drawn once for this micro-batch.
        fields: by name, see `raypipe.transform.fields`: arrays as tensors on the device, images with channels
            first; others as lists of B on the host. Masks and the like are read here, as fields["mask"];
            the properties name the others.
        weight: float32 (B,); 0 for padding and for samples that do not count.
        target_host: the target, on the host.
        index: int64 (B,), on the host; -1 for padding.
        ends_step: whether it is this rank's last micro-batch of an optimizer step.
        ends_split: whether it is this rank's last micro-batch of an epoch's training, or of a validation.
        num_bad: samples replaced or left out.
        read_s: seconds that an actor spent reading it.
        work_s: seconds that an actor spent on it in all.
        outage_s: seconds of read_s that object storage did not answer.
        num_remembered: 1 if it was made before, and not again; else 0.
        mix: the other half of the targets, if MixUp or CutMix was applied.
        pixels: float32 (B, C, H, W) in [0, 1], as they came from the CPU, with `augment.differentiable`: `image`
            was made of them, so a loss has a gradient with respect to them. Else None.
        augment: makes images of other pixels in the way in which `image` was made, with the same random numbers;
            None without `augment.differentiable`.
        copied: event behind the transfer, for streams besides the current one; None = there was none.
        source: int64 (B,), on the host: each sample's store in a mixture, by the order of `plan.sources`; -1
            for padding; None without a mixture.
        stream_hash: 16 bytes over it as it came from the CPU, with `log_digest`; else empty.
        finished_hash: 16 bytes over what the device stage made of it, with `log_digest`, on a CPU; else empty.
    """

    position: MicroBatchId
    seed: int
    fields: dict[str, Any]
    weight: torch.Tensor
    target_host: np.ndarray
    index: np.ndarray
    num_bad: int
    ends_step: bool = False
    ends_split: bool = False
    read_s: float = 0.0
    work_s: float = 0.0
    outage_s: float = 0.0
    num_remembered: int = 0
    mix: Mix | None = None
    pixels: torch.Tensor | None = None
    augment: Callable[[torch.Tensor], torch.Tensor] | None = None
    source: np.ndarray | None = None
    copied: Any = None
    stream_hash: bytes = b""
    finished_hash: bytes = b""

    @property
    def image(self) -> torch.Tensor:
        """uint8 (B, 3, H, W), or floating point once it is augmented; channels_last in memory.

        With views, the first crop of the first one, in the same memory. With `transform.decode: array`, (B,
        C, H, W) in the arrays' dtype until it is augmented.
        """
        if IMAGE in self.fields:
            return self.fields[IMAGE]
        if TENSORS in self.fields:
            raise ConfigError(
                "a batch of a Dataset has no image: batch.collated is what collate_fn made"
            )
        first = next(iter(self.views.values()))
        return first if first.ndim == 4 else first[:, 0]

    @functools.cached_property
    def collated(self) -> Any:
        """The nest that collate_fn made of a Dataset's items; its tensors are on the device, in their own memory.

        None if no row of the batch counts. On a CPU the memory of its tensors serves later ones once nobody holds
        on to them, see `reused_memory`.
        """
        values: torch.Tensor = self.fields[TENSORS]
        if values.device.type == "cpu":
            own = reused_memory(len(values))
            # by NumPy: the threads of torch's copy spin for longer than it takes, on CPUs that actors need
            np.copyto(own, values.numpy())
            copied = torch.from_numpy(own)
        else:
            copied = values.clone()
        return unpack({**self.fields, TENSORS: copied})

    def check_labels(self, num_classes: int) -> None:
        """Check on the host, without a wait, that labels are classes: a wrong one would end a GPU's process.

        Raises:
            ConfigError: a label is outside [0, num_classes).
        """
        check_labels(
            self.target_host,
            num_classes,
            lambda row: f"{self.position.split} sample {self.index[row]}",
        )

    @property
    def target(self) -> torch.Tensor:
        """int64 (B,), classes; or what the target's column holds, (B, …)."""
        return self.fields[LABEL]

    @property
    def columns(self) -> dict[str, Any]:
        """The columns that store.columns names, by name.

        Numbers are tensors (B, …) of their dtype; all else is lists of B on the host: tensors of any length, text,
        bytes, or what JSON holds (docs/targets.md).
        """
        return in_group(self.fields, COLUMN)

    @property
    def views(self) -> dict[str, torch.Tensor]:
        """Views by name, uint8 or floating point (B, 3, H, W), or (B, n, 3, H, W) for n crops.

        Empty if the stream's transform makes one image.
        """
        return in_group(self.fields, VIEW)

    def with_fields(self, fields: Mapping[str, Any], **changes: Any) -> Batch:
        """A copy with other values of some fields."""
        return replace(self, fields={**self.fields, **fields}, **changes)

    def with_rows(self, rows: np.ndarray) -> Batch:
        """A copy of some of its rows, which stays valid."""

        def chosen(values: Any) -> Any:
            if isinstance(values, list):
                return [values[row] for row in rows]
            return None if values is None else values[rows]

        names = ("weight", "target_host", "index", "source")
        fields = {
            # a nest has only the rows that count
            name: values if name.startswith(NEST) else chosen(values)
            for name, values in self.fields.items()
        }
        return replace(
            self, fields=fields, **{name: chosen(getattr(self, name)) for name in names}
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """A copy on another device, or itself. Libraries call it on whatever their loops get."""
        if self.weight.device == torch.device(device):
            return self

        def moved(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.to(device, non_blocking=non_blocking)
            return value

        fields = {name: moved(value) for name, value in self.fields.items()}
        mix = self.mix
        if mix:
            mix = replace(mix, target=moved(mix.target), lam=moved(mix.lam))
        return replace(self, fields=fields, weight=moved(self.weight), mix=mix)


def facts_of(plan: Plan, world_size: int, host: MicroBatch) -> dict[str, Any]:
    """Attributes of a micro-batch's `Batch` that follow from its place and its samples."""
    place = host.position
    ends_step = place.micro + world_size >= plan.config.per_step
    return {
        "ends_step": ends_step,
        "ends_split": ends_step and plan.ends_split(place),
        "source": plan.source_of(host.index) if plan.sources else None,
    }


def on_device(
    batches: Iterable[MicroBatch],
    device: torch.device,
    seed_of: Callable[[MicroBatchId], int],
    depth: int = 2,
    keep: int = 0,
    ring: bool | None = None,
    on_copied: OnCopied | None = None,
    decode: Callable[[MicroBatch], MicroBatch] | None = None,
    facts_of: Callable[[MicroBatch], Mapping[str, Any]] = lambda host: {},
    hash_of: Callable[[MicroBatch], bytes] | None = None,
) -> Iterator[Batch]:
    """Micro-batches on the device: on CUDA `depth` transfers ahead, see `Ring`; on CPU as views of host memory.

    Args:
        batches: micro-batches in host memory.
        device: CUDA or CPU.
        seed_of: the seed of the micro-batch at a place.
        depth, keep, on_copied: see `Ring`.
        ring: None = see `uses_ring`; True = on CPU too, as tests of the ring do; False = never: the consumer's
            thread makes a micro-batch, for a source that draws from generators that threads share, and copies it.
        decode: decodes a micro-batch's images on the device; None = they are pixels.
        facts_of: further attributes of a micro-batch's `Batch`, by name.
        hash_of: the hash of a micro-batch as it comes; None = it has none.

    Raises:
        ConfigError: the device is neither CUDA nor CPU.
    """

    def prepared(host: MicroBatch) -> MicroBatch:
        if hash_of:
            host = replace(host, stream_hash=hash_of(host))
        return decode(host) if decode else host

    source = map(prepared, batches) if hash_of or decode else batches
    through = Ring(source, _arrays, device, depth, keep, on_copied, _without_arrays)

    def made(host: MicroBatch, tensors: Sequence[torch.Tensor] | None = None) -> Batch:
        with pinned(through.device):
            if tensors is None:  # without a ring
                tensors = [view(array).to(through.device) for array in _arrays(host)]
            # an image that was decoded is made on the current stream; without a ring nothing was copied
            copied = through.copied if host.ready is None else None
            facts = {"seed": seed_of(host.position), "copied": copied, **facts_of(host)}
            return _batch(host, tensors, through.device, facts)

    def from_ring() -> Iterator[Batch]:
        with closing(iter(through)) as pairs:
            for host, tensors in pairs:
                yield made(host, tensors)
                del host, tensors

    if uses_ring(through.device) if ring is None else ring:
        return from_ring()
    return map(made, source)


def _batch(
    host: MicroBatch,
    tensors: Sequence[torch.Tensor],
    device: torch.device,
    facts: Mapping[str, Any],
) -> Batch:
    """Make the batch of a micro-batch.

    Args:
        tensors: the arrays of `_arrays`, on the device.
        facts: further attributes, by name.
    """
    fields = _fields(host, tensors)
    if host.ready is not None:
        hand_over(host.ready, [fields[IMAGE]], device)
    same = {name: getattr(host, name) for name in _SAME}
    return Batch(
        fields=fields, weight=tensors[0], target_host=host[LABEL], **same, **facts
    )


def _arrays(host: MicroBatch) -> list[np.ndarray]:
    """Return the arrays of a micro-batch that go to the device: its weight, then its fields, in order."""
    return [host.weight, *host.arrays().values()]


_ELSEWHERE = np.empty(0, np.uint8)


def _without_arrays(host: MicroBatch) -> MicroBatch:
    """Copy the parts of a micro-batch that the host still needs, without views of its block."""
    on_host: dict[str, Any] = {
        name: values.copied() if isinstance(values, Ragged) else values
        for name, values in host.fields.items()
    }
    on_host |= dict.fromkeys(host.arrays(), _ELSEWHERE)
    on_host[LABEL] = host[LABEL].copy()
    return replace(host, index=host.index.copy(), weight=_ELSEWHERE, fields=on_host)


_SAME = (
    "position",
    "index",
    "num_bad",
    "read_s",
    "work_s",
    "outage_s",
    "num_remembered",
    "stream_hash",
)


def _fields(host: MicroBatch, arrays: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The fields of a micro-batch whose arrays, in the order of `_arrays`, are on the device."""
    _, *field_tensors = arrays
    tensors = dict(zip(host.arrays(), field_tensors, strict=True))
    images = images_in(tensors)
    fields: dict[str, Any] = {}
    for name, values in host.fields.items():
        if isinstance(values, Ragged):
            fields[name] = values.unpacked()
            if values.kind == "ragged":
                fields[name] = list(map(view, fields[name]))
        elif name in images:
            # NHWC in memory is channels_last as it stands
            fields[name] = images[name].movedim(-1, -3)
        else:  # images that were decoded here have no array
            fields[name] = tensors.get(name, values)
    return fields
