"""Samples of a micro-batch as rows: their place in the store, the numbers drawn for them, and their partners.

An operation that was applied to an image is an entry {"op": name, …} with its numbers:

CPU           "numbers", integers in the units of `raypipe.kernel.ops`; resizes and pads are left out
preset        the fields of `raypipe.device.fused.FusedParams`
Kornia        the parameters that its modules keep, once the micro-batch was made again

With several images of a sample, "view" names the one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from raypipe.device.augment import DeviceAugment, preset_params, view_seed
from raypipe.device.mixing import partner_rows
from raypipe.device.prefetcher import Batch
from raypipe.errors import RaypipeError
from raypipe.history.recorded_stream import RecordedStream
from raypipe.history.step_maker import Remade
from raypipe.kernel import Op
from raypipe.plan.places import PADDING
from raypipe.stores.base import name_of
from raypipe.transform.samples import NO_LABEL, read_samples
from raypipe.transform.views import makes_views

if TYPE_CHECKING:
    from raypipe.history.recorded import MicroBatchDraws

_ALIKE = (Op.RESIZE, Op.PAD)
_MOST_NUMBERS = 64  # a parameter of Kornia's with more is left out

Operations = list[list[dict[str, Any]]]
"""The operations that were applied to the image of each row, see above."""


def sample_rows(
    draws: MicroBatchDraws, stream: RecordedStream, remade: Remade | None
) -> list[dict[str, Any]]:
    """Return a row for each sample of a micro-batch.

    Args:
        remade: the micro-batch; None = only the order is known.
    """
    num = len(draws.indices)
    columns: dict[str, list[Any]] = {
        "row": [*range(num)],
        "index": draws.indices.tolist(),
        "name": [""] * num,
        "label": [None] * num,
        "class": [None] * num,
        "weight": draws.weights.tolist(),
        "seed": [f"{first:016x}{second:016x}" for first, second in draws.keys.tolist()],
        "drawn": [[] for _ in range(num)],
        "augmented": [[] for _ in range(num)],
        "mixed": [None] * num,
        "bad": [draws.bad.get(row, "") for row in range(num)],
    }
    if stream.is_open:
        columns |= _of_store(draws, stream)
    if remade is not None:
        _add_drawn(columns["drawn"], draws, remade)
        augment = remade.maker.stage.augment
        if augment is not None and draws.place.split == "train":
            _add_augmented(columns["augmented"], draws, remade, augment)
            if sum(augment.config.mix_shares):
                _add_mixed(columns["mixed"], draws, remade)
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _of_store(draws: MicroBatchDraws, stream: RecordedStream) -> dict[str, list[Any]]:
    """Names and labels of samples; None for padding, and for labels that are missing or damaged."""
    store = stream.spec.stores[draws.place.split]
    of_columns = stream.spec.columns
    names = [
        "" if index == PADDING else name_of(store, index)
        for index in draws.indices.tolist()
    ]
    labels = np.full(len(names), NO_LABEL)
    has_classes = of_columns.has_target and of_columns.target is None
    is_sample = draws.indices != PADDING
    if has_classes:
        try:
            labels[is_sample] = read_samples(store, draws.indices[is_sample]).labels
        except RaypipeError:
            has_classes = False
    known = [label if label != NO_LABEL else None for label in labels.tolist()]
    titles: dict[int | None, str] = dict(enumerate(store.classes or ()))
    classes = [titles.get(label) for label in known]
    return {"name": names, "label": known, "class": classes}


def _add_drawn(found: Operations, draws: MicroBatchDraws, remade: Remade) -> None:
    """Add the operations of the CPU transform's programs."""
    maker = remade.maker.maker
    place = draws.place
    sample_maker = maker.sample_makers.get(place, maker.plan.draw(place))
    if all(transform.program is None for _, transform in sample_maker.transforms):
        return
    sample_maker.weaken(maker.sample_makers.strength(place))
    samples = maker.read_store(place, draws.indices)
    for field, program, params, is_known in sample_maker.drawn(samples, draws.keys):
        view = _of_view(field.partition(".")[2])
        for row in np.flatnonzero(is_known & (draws.weights > 0)).tolist():
            for _, op, numbers in program.applied(params[row]):
                if op not in _ALIKE:
                    found[row].append(
                        {"op": op.name.lower(), **view, "numbers": numbers}
                    )


def _add_augmented(
    found: Operations, draws: MicroBatchDraws, remade: Remade, augment: DeviceAugment
) -> None:
    """Add the operations of the augmentation on the device."""
    rows = np.flatnonzero(draws.indices != PADDING).tolist()
    strength = remade.maker.strength_at(draws.place)
    if augment.preset is not None:
        for view, seed, shape in _images_of(remade.arrived):
            params = vars(preset_params(augment.preset, seed, shape, strength))
            for row in rows:
                numbers = {
                    name: values[row].tolist() for name, values in params.items()
                }
                found[row].append({"op": "preset", **_of_view(view), **numbers})
    module = augment.config.module
    has_module = isinstance(module, torch.nn.Module)
    if (not augment.operations and not has_module) or makes_views(
        remade.maker.spec.transforms["train"]
    ):
        return
    _ = remade.finished  # Kornia's modules keep what they drew last
    for row in rows:
        for operation in augment.operations:
            if operation.chosen is None or operation.chosen[row]:
                found[row] += _of_params(operation.op, operation.module._params, row)
        for name, drawn in _kept_params(module):
            found[row] += _of_params(name, drawn, row)


def _add_mixed(
    found: list[dict[str, Any] | None], draws: MicroBatchDraws, remade: Remade
) -> None:
    """Add the partner of each row, the share of the row's own target, and CutMix's box, where the settings mix."""
    mix = remade.finished.mix
    if mix is None or not isinstance(mix.lam, float):
        return
    for row, partner in enumerate(partner_rows(draws.indices >= 0).tolist()):
        if partner != row:
            sample = int(draws.indices[partner])
            found[row] = {
                "partner": partner,
                "sample": sample,
                "share": mix.lam,
                "box": mix.box,
            }


def _of_view(view: str) -> dict[str, str]:
    return {"view": view} if view else {}


def _images_of(arrived: Batch) -> Iterator[tuple[str, int, tuple[int, int, int]]]:
    """The images of a batch, or the crops of its views: name, seed and (B, H, W) of each."""
    for name, image in (arrived.views or {"": arrived.image}).items():
        crops = [image] if image.ndim == 4 else image.unbind(1)
        for number, crop in enumerate(crops):
            seed = view_seed(name, number, arrived.seed) if name else arrived.seed
            title = name if crop is image else f"{name} {number}"
            yield title, seed, (len(crop), *crop.shape[-2:])


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
    probability = drawn.get("batch_prob") if isinstance(drawn, Mapping) else None
    if not isinstance(probability, torch.Tensor):
        return
    # one for all rows, or one for each
    if not bool(probability[row if len(probability) > 1 else 0] > 0.5):
        return
    numbers = {"op": name}
    for title, value in drawn.items():
        has_row = isinstance(value, torch.Tensor) and value.ndim and row < len(value)
        if has_row and title != "batch_prob" and value[row].numel() <= _MOST_NUMBERS:
            numbers[title] = value[row].tolist()
    yield numbers
