"""Samples of a micro-batch as rows: their place in the store, the numbers drawn for them, and their partners.

An operation that was applied to an image is an entry {"op": name, …} with its numbers:

CPU           "numbers", integers in the units of `raypipe.kernel.ops`; resizes and pads are left out
preset        the fields of `raypipe.device.fused.FusedParams`
Kornia        the parameters that its modules keep, once the micro-batch was made again

With several images of a sample, "view" names the one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from raypipe.device.augment import DeviceAugment, preset_params, view_seed
from raypipe.device.mixing import draw_mix, partner_rows
from raypipe.device.prefetcher import Batch
from raypipe.errors import RaypipeError
from raypipe.history.recorded_stream import MicroBatchDraws, RecordedStream
from raypipe.history.step_maker import StepMaker
from raypipe.kernel import Op
from raypipe.plan.order import Domain
from raypipe.plan.places import PADDING
from raypipe.stores.base import Store, name_of
from raypipe.transform.samples import NO_LABEL, Samples, read_samples
from raypipe.transform.views import makes_views

_ALIKE = (Op.RESIZE, Op.PAD)
_MOST_NUMBERS = 64  # a parameter of Kornia's with more is left out

Operations = list[dict[str, Any]]
"""The operations that were applied to an image, see above."""


class SampleTable:
    """Describes samples of a recorded stream, as rows.

    Args:
        maker: makes its micro-batches; None = only the order is known.
    """

    def __init__(self, stream: RecordedStream, maker: StepMaker | None) -> None:
        self._stream = stream
        self._maker = maker

    def rows(self, draws: MicroBatchDraws) -> list[dict[str, Any]]:
        """Return a row for each sample of a micro-batch."""
        labels, names, classes = self._of_store(draws)
        drawn = self._drawn(draws)
        augmented = self._augmented(draws)
        mixed = self._mixed(draws)
        rows = []
        for row, index in enumerate(draws.indices.tolist()):
            label = labels[row]
            of_class = None
            if label is not None and classes and 0 <= label < len(classes):
                of_class = classes[label]
            rows.append(
                {
                    "row": row,
                    "index": index,
                    "name": names[row],
                    "label": label,
                    "class": of_class,
                    "weight": float(draws.weights[row]),
                    "seed": "".join(
                        f"{word:016x}" for word in draws.keys[row].tolist()
                    ),
                    "drawn": drawn[row],
                    "augmented": augmented[row],
                    "mixed": mixed[row],
                    "bad": draws.bad.get(row, ""),
                }
            )
        return rows

    def _of_store(
        self, draws: MicroBatchDraws
    ) -> tuple[list[int | None], list[str], tuple[str, ...] | None]:
        """Labels and names of samples, and the names of the classes, as far as the store can be read."""
        num = len(draws.indices)
        if not self._stream.is_open:
            return [None] * num, [""] * num, None
        spec = self._stream.spec
        store = spec.stores[draws.place.split]
        names = [
            "" if index == PADDING else name_of(store, index)
            for index in draws.indices.tolist()
        ]
        labels: list[int | None] = [None] * num
        if spec.columns.has_target and spec.columns.target is None:
            labels = _labels(store, draws.indices)
        return labels, names, store.classes

    def _drawn(self, draws: MicroBatchDraws) -> list[Operations]:
        """The operations of programs."""
        found: list[Operations] = [[] for _ in draws.indices]
        if self._maker is None:
            return found
        maker = self._maker.maker
        place = draws.place
        sample_maker = maker.sample_makers.get(place, maker.plan.draw(place))
        if all(transform.program is None for _, transform in sample_maker.transforms):
            return found
        sample_maker.weaken(maker.sample_makers.strength(place))
        samples: Samples = maker.read_store(place, draws.indices)
        for field, program, params, is_known in sample_maker.drawn(samples, draws.keys):
            view = field.partition(".")[2]
            for row in np.flatnonzero(is_known & (draws.weights > 0)).tolist():
                found[row] += [
                    {"op": op.name.lower(), **_of_view(view), "numbers": numbers}
                    for _, op, numbers in program.applied(params[row])
                    if op not in _ALIKE
                ]
        return found

    def _augmented(self, draws: MicroBatchDraws) -> list[Operations]:
        """The operations of the augmentation on the device."""
        found: list[Operations] = [[] for _ in draws.indices]
        maker = self._maker
        if maker is None or maker.device is None or draws.place.split != "train":
            return found
        augment = maker.device
        place = draws.place
        strength = maker.strength_at(place)
        has_views = makes_views(maker.spec.transforms["train"])
        draws_by_kornia = not has_views and _draws_by_kornia(augment)
        if augment.preset is None and not draws_by_kornia:
            return found
        arrived = maker.arrive(maker.on_cpu(place))
        if augment.preset is not None:
            for view, seed, shape in _images_of(arrived):
                params = preset_params(augment.preset, seed, shape, strength)
                for row, operations in enumerate(found):
                    numbers = {
                        name: values[row].tolist()
                        for name, values in vars(params).items()
                    }
                    operations.append({"op": "preset", **_of_view(view), **numbers})
        if draws_by_kornia:
            maker.finish(arrived)
            for row, operations in enumerate(found):
                operations += _of_kornia(augment, row)
        is_sample = (draws.indices != PADDING).tolist()
        return [
            operations if shows else []
            for operations, shows in zip(found, is_sample, strict=True)
        ]

    def _mixed(self, draws: MicroBatchDraws) -> list[dict[str, Any] | None]:
        """The partner of each row, the share of the row's own target, and CutMix's box, where the settings mix."""
        nothing: list[dict[str, Any] | None] = [None] * len(draws.indices)
        augment = self._maker.augment if self._maker else None
        if (
            augment is None
            or draws.place.split != "train"
            or not sum(augment.mix_shares)
        ):
            return nothing
        assert self._maker is not None
        plan = self._maker.spec.plan
        height, width = self._maker.batch(draws.place).image.shape[-2:]
        seed = plan.micro_batch_seed(draws.place)
        rng = np.random.Generator(np.random.Philox(key=[seed, Domain.MIXING]))
        strength = self._maker.strength_at(draws.place)
        mixing = draw_mix(augment, rng, height, width, strength)
        if mixing is None:
            return nothing
        share, box = mixing
        partners = partner_rows(draws.indices >= 0).tolist()
        rows = list[dict[str, Any] | None]()
        for row, partner in enumerate(partners):
            mix = {
                "partner": partner,
                "sample": int(draws.indices[partner]),
                "share": float(share),
                "box": box,
            }
            rows.append(None if partner == row else mix)
        return rows


def _labels(store: Store, indices: np.ndarray) -> list[int | None]:
    """The classes of samples; None for padding, and for labels that are missing or damaged."""
    (rows,) = np.nonzero(indices != PADDING)
    labels: list[int | None] = [None] * len(indices)
    try:
        read = read_samples(store, indices[rows]).labels
    except RaypipeError:
        return labels
    for row, label in zip(rows.tolist(), read.tolist(), strict=True):
        if label != NO_LABEL:
            labels[row] = label
    return labels


def _of_view(view: str) -> dict[str, str]:
    return {"view": view} if view else {}


def _images_of(arrived: Batch) -> Iterator[tuple[str, int, tuple[int, int, int]]]:
    """The images of a batch, or the crops of its views: name, seed and (B, H, W) of each."""
    if not arrived.views:
        (rows, _, height, width) = arrived.image.shape
        yield "", arrived.seed, (rows, height, width)
    for name, view in arrived.views.items():
        num_crops = 1 if view.ndim == 4 else view.shape[1]
        for number in range(num_crops):
            title = name if view.ndim == 4 else f"{name} {number}"
            shape = (view.shape[0], view.shape[-2], view.shape[-1])
            yield title, view_seed(name, number, arrived.seed), shape


def _draws_by_kornia(augment: DeviceAugment) -> bool:
    return bool(augment.operations) or isinstance(
        augment.config.module, torch.nn.Module
    )


def _of_kornia(augment: DeviceAugment, row: int) -> Iterator[dict[str, Any]]:
    """The operations that Kornia's modules applied to a row of the micro-batch that was augmented last."""
    for operation in augment.operations:
        if operation.chosen is None or operation.chosen[row]:
            yield from _of_params(operation.op, operation.module._params, row)
    for name, drawn in _kept_params(augment.config.module):
        yield from _of_params(name, drawn, row)


def _kept_params(module: Any) -> Iterator[tuple[str, Any]]:
    """The parameters that Kornia's operations in a module keep, by their names, in order."""
    drawn = getattr(module, "_params", None)
    if drawn and type(module).__module__.startswith("kornia."):
        # those of a container name the ones of its children
        yield type(module).__name__, drawn
    elif isinstance(module, torch.nn.Module):
        for child in module.children():
            yield from _kept_params(child)


def _of_params(name: str, drawn: Any, row: int) -> Iterator[dict[str, Any]]:
    """The entry of an operation that was applied to a row, or those of a policy's operations."""
    if isinstance(drawn, list):
        for chosen in drawn:
            # a container numbers its operations
            title, _, number = chosen.name.rpartition("_")
            inner = title if number.isdecimal() else chosen.name
            yield from _of_params(inner, chosen.data, row)
        return
    if not isinstance(drawn, Mapping):
        return
    probability = drawn.get("batch_prob")
    if not isinstance(probability, torch.Tensor):
        return
    # one for all rows, or one for each
    if not bool(probability[row if len(probability) > 1 else 0] > 0.5):
        return
    numbers = {
        title: value[row].tolist()
        for title, value in drawn.items()
        if title != "batch_prob"
        and isinstance(value, torch.Tensor)
        and value.ndim > 0
        and row < len(value)
        and value[row].numel() <= _MOST_NUMBERS
    }
    yield {"op": name, **numbers}
