"""Samples of a micro-batch as rows: their place in the store, the numbers drawn for them, and their partners.

An operation that was applied to an image is an entry {"op": name, …} with its numbers:

CPU           "numbers", integers in the units of `raypipe.kernel.ops`; resizes and pads are left out
preset        the fields of `raypipe.device.fused.FusedParams`
Kornia        the parameters that its modules keep, once the micro-batch was made again

With several images of a sample, "view" names the one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from raypipe.device.augment import DeviceAugment, preset_params, view_seed
from raypipe.device.mixing import partner_rows
from raypipe.device.modules import ChosenRows
from raypipe.device.prefetcher import Batch
from raypipe.errors import RaypipeError
from raypipe.history.recorded_stream import RecordedStream
from raypipe.history.step_maker import Remade
from raypipe.kernel import Op
from raypipe.plan.places import PADDING
from raypipe.stores.base import name_of
from raypipe.streaming.items import ItemMaker
from raypipe.transform.samples import NO_LABEL, read_samples
from raypipe.transform.views import makes_views

if TYPE_CHECKING:
    from raypipe.history.recorded import MicroBatchDraws

_ALIKE = (Op.RESIZE, Op.PAD)
_MOST_NUMBERS = 64  # a parameter of Kornia's with more is left out

Rows = list[dict[str, Any]]


def sample_rows(
    draws: MicroBatchDraws, stream: RecordedStream, remade: Remade | None
) -> Rows:
    """Return a row for each sample of a micro-batch.

    Args:
        remade: the micro-batch; None = only the order is known.
    """
    drawn = zip(draws.indices.tolist(), draws.weights.tolist(), draws.keys, strict=True)
    rows: Rows = [
        {
            "row": row,
            "index": index,
            "name": "",
            "label": None,
            "class": None,
            "weight": weight,
            "seed": "".join(f"{half:016x}" for half in key.tolist()),
            "drawn": [],
            "augmented": [],
            "mixed": None,
            "bad": draws.bad.get(row, ""),
        }
        for row, (index, weight, key) in enumerate(drawn)
    ]
    there = [row for row in rows if row["index"] != PADDING]
    if stream.is_open:
        _add_names(there, draws, stream)
    if remade is not None:
        _add_drawn(rows, draws, remade)
        augment = remade.maker.stage.augment
        if augment is not None and draws.place.split == "train":
            _add_augmented(there, draws, remade, augment)
            if sum(augment.config.mix_shares):
                _add_mixed(rows, draws, remade)
    return rows


def _add_names(there: Rows, draws: MicroBatchDraws, stream: RecordedStream) -> None:
    """Add names and labels of samples, but for labels that are missing or damaged."""
    store = stream.spec.stores[draws.place.split]
    columns = stream.spec.columns
    for row in there:
        row["name"] = name_of(store, row["index"])
    if not columns.has_target or columns.target is not None:
        return
    titles = dict(enumerate(store.classes or ()))
    indices = np.array([row["index"] for row in there], np.int64)
    with contextlib.suppress(RaypipeError):
        labels = read_samples(store, indices).labels.tolist()
        for row, label in zip(there, labels, strict=True):
            if label != NO_LABEL:
                row |= {"label": label, "class": titles.get(label)}


def _add_drawn(rows: Rows, draws: MicroBatchDraws, remade: Remade) -> None:
    """Add the operations of the CPU transform's programs."""
    maker = remade.maker.maker
    place = draws.place
    sample_maker = maker.sample_makers.get(place)
    if isinstance(sample_maker, ItemMaker) or all(
        transform.program is None for _, transform in sample_maker.transforms
    ):
        return
    sample_maker.weaken(maker.sample_makers.strength(place))
    samples = maker.read_store(place, draws.indices)
    for field, program, params, is_known in sample_maker.drawn(samples, draws.keys):
        view = _of_view(field.partition(".")[2])
        for row in np.flatnonzero(is_known & (draws.weights > 0)).tolist():
            rows[row]["drawn"] += [
                {"op": op.name.lower(), **view, "numbers": numbers}
                for _, op, numbers in program.applied(params[row])
                if op not in _ALIKE
            ]


def _add_augmented(
    there: Rows, draws: MicroBatchDraws, remade: Remade, augment: DeviceAugment
) -> None:
    """Add the operations of the augmentation on the device."""
    strength = remade.maker.strength_at(draws.place)
    if augment.preset is not None:
        for view, seed, shape in _images_of(remade.arrived):
            params = vars(preset_params(augment.preset, seed, shape, strength))
            for row in there:
                numbers = {key: of[row["row"]].tolist() for key, of in params.items()}
                row["augmented"].append({"op": "preset", **_of_view(view), **numbers})
    steps = augment.modules.steps if augment.modules else []
    if makes_views(remade.maker.spec.transforms["train"]) or not steps:
        return
    _ = remade.finished  # Kornia's modules keep what they drew last
    for row in there:
        for step in steps:
            for name, drawn in _kept_params(step, row["row"]):
                row["augmented"] += _of_params(name, drawn, row["row"])


def _add_mixed(rows: Rows, draws: MicroBatchDraws, remade: Remade) -> None:
    """Add the partner of each row, the share of the row's own target, and CutMix's box, where the settings mix."""
    mix = remade.finished.mix
    if mix is None or not isinstance(mix.lam, float):
        return
    of_mix = {"share": mix.lam, "box": mix.box}
    for row, partner in enumerate(partner_rows(draws.indices >= 0).tolist()):
        if partner != row:
            sample = int(draws.indices[partner])
            rows[row]["mixed"] = {"partner": partner, "sample": sample, **of_mix}


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


def _kept_params(module: Any, row: int) -> Iterator[tuple[str, Any]]:
    """The parameters that Kornia's operations on a row keep, in a module, by their names, in order."""
    if isinstance(module, ChosenRows) and not module.chosen[row]:
        return
    drawn = getattr(module, "_params", None)
    if drawn and type(module).__module__.startswith("kornia."):
        # those of a container name the ones of its children
        yield type(module).__name__, drawn
    elif isinstance(module, torch.nn.Module):
        for child in module.children():
            yield from _kept_params(child, row)


def _of_params(name: str, drawn: Any, row: int) -> Iterator[dict[str, Any]]:
    """The entry of an operation that was applied to a row, or those of a policy's operations."""
    if isinstance(drawn, list):
        for chosen in drawn:
            # a container numbers its operations
            yield from _of_params(chosen.name.rstrip("_0123456789"), chosen.data, row)
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
