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

from raypipe.device.augment import DeviceAugment
from raypipe.device.mixing import partner_rows
from raypipe.device.modules import ChosenRows
from raypipe.errors import RaypipeError
from raypipe.history.recorded_stream import RecordedStream
from raypipe.history.step_maker import Remade, crops_of
from raypipe.kernel import Op
from raypipe.plan.places import PADDING
from raypipe.stores.base import Columns, name_of
from raypipe.streaming.items import DatasetItems
from raypipe.transform.sample_maker import SampleMaker
from raypipe.transform.samples import NO_LABEL, read_samples

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
    rows: Rows = [
        {
            "row": row,
            "index": index,
            "name": "",
            "label": None,
            "class": None,
            "weight": float(draws.weights[row]),
            "seed": draws.keys[row].astype(">u8").tobytes().hex(),
            "drawn": [],
            "augmented": [],
            "mixed": None,
            "bad": draws.bad.get(row, ""),
        }
        for row, index in enumerate(draws.indices.tolist())
    ]
    if stream.is_open:
        _add_stored(rows, draws, stream, remade)
    if remade is not None and draws.place.split == "train":
        augment = remade.maker.stage.augment
        if augment is not None:
            _add_augmented(rows, remade, augment)
            _add_mixed(rows, draws, remade)
    return rows


def _add_stored(
    rows: Rows, draws: MicroBatchDraws, stream: RecordedStream, remade: Remade | None
) -> None:
    """Add names, labels and the draws of the CPU transform, but for samples that cannot be read."""
    spec = stream.spec
    store = spec.stores[draws.place.split]
    there = [row for row in rows if row["index"] != PADDING]
    for row in there:
        row["name"] = name_of(store, row["index"])
    if isinstance(spec.transforms[draws.place.split], DatasetItems):
        return
    has_class = spec.columns.has_target and spec.columns.target is None
    names = ("image", "label") if has_class else ("image",)
    titles = dict(enumerate(store.classes or ()))
    with contextlib.suppress(RaypipeError):
        samples = read_samples(store, draws.indices, names, has_class)
        for row in there if has_class else ():
            label = int(samples.labels[row["row"]])
            if label != NO_LABEL:
                row |= {"label": label, "class": titles.get(label)}
        if remade is not None:
            _add_drawn(rows, draws, remade, samples)


def _add_drawn(
    rows: Rows, draws: MicroBatchDraws, remade: Remade, samples: Columns
) -> None:
    """Add the operations of the CPU transform's programs."""
    makers = remade.maker.maker.sample_makers
    sample_maker = makers.get(draws.place)
    assert isinstance(sample_maker, SampleMaker), "a store's samples are transformed"
    sample_maker.weaken(makers.strength(draws.place))
    for field, program, params, is_known in sample_maker.drawn(samples, draws.keys):
        view = _of_view(field.partition(".")[2])
        for row in np.flatnonzero(is_known & (draws.weights > 0)).tolist():
            rows[row]["drawn"] += [
                {"op": op.name.lower(), **view, "numbers": numbers}
                for _, op, numbers in program.applied(params[row])
                if op not in _ALIKE
            ]


def _add_augmented(rows: Rows, remade: Remade, augment: DeviceAugment) -> None:
    """Add the operations of the augmentation on the device."""
    # made first: the augmentation keeps what it drew last
    views = remade.finished.views
    titles = list(crops_of(remade.finished)) or [""]
    # Kornia's modules keep the draws of one crop
    steps = [] if views else augment.modules.steps
    for row in rows:
        number = row["row"]
        if row["index"] == PADDING:
            continue
        for view, params in zip(titles, augment.drawn, strict=False):
            numbers = {key: of[number].tolist() for key, of in vars(params).items()}
            row["augmented"].append({"op": "preset", **_of_view(view), **numbers})
        for step in steps:
            for name, drawn in _kept_params(step, number):
                row["augmented"] += _of_params(name, drawn, number)


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
    elif isinstance(drawn, Mapping) and "batch_prob" in drawn:
        tensors = dict(drawn)
        probability = tensors.pop("batch_prob")
        # one for all rows, or one for each
        if probability[row if len(probability) > 1 else 0] > 0.5:
            yield {"op": name} | {
                title: value[row].tolist()
                for title, value in tensors.items()
                if isinstance(value, torch.Tensor)
                and value.ndim
                and row < len(value)
                and value[row].numel() <= _MOST_NUMBERS
            }
