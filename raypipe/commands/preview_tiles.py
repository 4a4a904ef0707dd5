"""Tiles of a preview: samples as they are stored, and as several epochs feed them.

    decoded | epoch 0: transformed  augmented | epoch 1: …      one row per sample
    decoded | epoch 0: each crop of each view | epoch 1: …      the same for views, augmented

The plan, the transform worker and the augmentation are called as a run calls them, on the whole micro-batch that
has the sample in that epoch, so an augmented tile shows exactly the input of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from raypipe.commands.picture import Tile
from raypipe.config import AugmentConfig
from raypipe.device.mixing import Mix
from raypipe.errors import SampleError
from raypipe.history.step_maker import Remade, StepMaker, crops_of
from raypipe.plan.places import SamplePlace
from raypipe.plan.schedule import Plan
from raypipe.transform.decode.array import as_rgb, decoder_of
from raypipe.transform.decode.rgb import stored_bytes
from raypipe.transform.ending import Ending
from raypipe.transform.fields import (
    COLUMN,
    LABEL,
    MicroBatch,
    Ragged,
    in_group,
)
from raypipe.transform.samples import NO_LABEL, read_samples
from raypipe.transform.targets import decode_targets


class Preview:
    """Makes tiles for samples of a stream's training store.

    Args:
        maker: makes the stream's micro-batches.
    """

    def __init__(self, maker: StepMaker) -> None:
        self.maker = maker
        self.plan = maker.spec.plan
        self._targets = maker.spec.transform.target_columns
        # an augmentation that cannot be built is an error at once
        _ = maker.stage.augment

    def tiles(
        self, indices: list[int], epochs: list[int]
    ) -> tuple[list[list[Tile]], list[str]]:
        """A row of tiles per sample, and the names of the columns of one epoch."""
        drawn: dict[tuple[int, int], list[Tile]] = {}
        names = [""]
        for epoch in epochs:
            draws = find_draws(self.plan, epoch, indices)
            # each micro-batch once, and one at a time
            for place in dict.fromkeys(draw.micro_batch for draw in draws.values()):
                there = {
                    index: draw.row
                    for index, draw in draws.items()
                    if draw.micro_batch == place
                }
                remade = Remade(self.maker, place)
                made, names = self.of_micro_batch(remade, [*there.values()])
                for index, tiles in zip(there, made, strict=True):
                    drawn[epoch, index] = tiles
        absent = [Tile(None, (), "not drawn in this epoch")]
        absent += [Tile(None)] * (len(names) - 1)
        rows = []
        for index in indices:
            row = [self._decoded(index)]
            for epoch in epochs:
                row += drawn.get((epoch, index), absent)
            rows.append(row)
        return rows, names

    def of_micro_batch(
        self, remade: Remade, rows: Sequence[int]
    ) -> tuple[list[list[Tile]], list[str]]:
        """The tiles of rows of a micro-batch, as the CPU made it and as the model sees it; and their names."""
        images, moved = self.stages(remade)
        return [self._of_row(remade, images, moved, row) for row in rows], [*images]

    @torch.no_grad()
    def stages(
        self, remade: Remade
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Images (B, H, W, C) of a micro-batch by stage or crop; and masks and the like behind the last stage."""
        arrived = remade.arrived
        fed = remade.finished
        if arrived.views:
            crops = crops_of(fed).items()
            return {name: _shown(crop, self._normalization) for name, crop in crops}, {}
        moved = {name: fed.fields[name].numpy() for name in self._targets}
        ending = self.maker.spec.endings.get("train")
        by_cpu = ending if ending and not ending.on_device else None
        images = {"transformed": _shown(arrived.image, by_cpu)}
        if self.maker.stage.config is not None:
            # else the model sees what the CPU made
            images["augmented"] = _shown(fed.image, self._normalization)
        return images, moved

    @property
    def _normalization(self) -> AugmentConfig | Ending | None:
        """What has the mean and the std of the model's images; None = they are not normalized."""
        ending = self.maker.spec.endings.get("train")
        augment = self.maker.stage.augment
        by_cpu = ending and ending.normalizes and not ending.on_device
        if augment is None or by_cpu:
            return ending
        # with the numbers of its module
        return augment.config

    def _decoded(self, index: int) -> Tile:
        spec = self.maker.spec
        config = spec.transform
        sample = read_samples(
            spec.stores["train"],
            np.array([index]),
            spec.names,
            spec.columns.reads_class,
        )
        name = ""
        if LABEL not in spec.columns.types:
            name = self._class(int(sample.labels[0]))
        try:
            image = as_rgb(decoder_of(config)(stored_bytes(sample.images[0])))
            height, width = image.shape[:2]
            targets: Any = decode_targets(
                sample.row(0), self._targets, (height, width), config.boxes_format
            )
        except SampleError as error:
            return Tile(None, (name, f"sample {index}"), str(error))
        return Tile(
            image, (name, f"sample {index}, {width} x {height}"), targets=targets
        )

    def _of_row(
        self,
        remade: Remade,
        images: dict[str, np.ndarray],
        moved: dict[str, np.ndarray],
        row: int,
    ) -> list[Tile]:
        """The tiles of a sample in an epoch; the last one has the targets that a module has moved with it."""
        batch = remade.host
        # copies: a view would keep its whole micro-batch in memory
        targets = {name: batch[name][row].copy() for name in self._targets}
        tiles = [
            Tile(as_rgb(image[row]).copy(), targets=targets)
            for image in images.values()
        ]
        tiles[0] = replace(tiles[0], lines=self._place(batch, row))
        if not remade.arrived.views:
            lines = self._mixed(remade.finished.mix, batch[LABEL][row], row)
            last = {name: values[row].copy() for name, values in moved.items()}
            tiles[-1] = replace(tiles[-1], lines=lines, targets=last)
        return tiles

    def _mixed(self, mix: Mix | None, label: Any, row: int) -> tuple[str, str]:
        """Lines that give a row's own target, and the one that is mixed in."""
        own = self._class(label)
        if mix is None:
            return "not mixed", own
        kind = "CutMix" if mix.is_cutmix else "MixUp"
        lam = mix.lam
        if isinstance(lam, torch.Tensor):
            lam = float(lam[row])
        other = self._class(mix.target[row].numpy())
        return f"{kind}: {lam:.2f} {own}", f"+ {1 - lam:.2f} {other}"

    def _place(self, batch: MicroBatch, row: int) -> list[str]:
        """Lines that give a row's place and its columns."""
        micro_batch = batch.position
        lines = [f"step {micro_batch.step}, micro {micro_batch.micro}, row {row}"]
        if batch.index[row] != self.plan.indices(micro_batch)[row]:
            lines.append(f"bad: sample {batch.index[row]} stands in")
        texts = []
        for name, rows in in_group(batch.fields, COLUMN).items():
            values = rows.unpacked() if isinstance(rows, Ragged) else rows
            texts.append(f"{name} {_short(values[row])}")
        return [*lines, ", ".join(texts)] if texts else lines

    def _class(self, label: Any) -> str:
        """Name a class, by its number if the picture's font may lack its name; or give another target."""
        columns = self.maker.spec.columns
        if columns.target:
            return f"target {_short(label)}"
        if not columns.has_target:
            return ""
        names = self.maker.spec.stores["train"].classes or ()
        if label == NO_LABEL:
            return "no label"
        if 0 <= label < len(names) and names[label].isascii():
            return names[label]
        return f"class {label}"


def _shown(
    image: torch.Tensor, normalization: AugmentConfig | Ending | None
) -> np.ndarray:
    """Images (B, C, H, W) → (B, H, W, C), uint8 if they are floats that were normalized."""
    if normalization is not None and image.is_floating_point():
        mean, std = (
            torch.tensor(numbers).view(1, -1, 1, 1)
            for numbers in (normalization.mean, normalization.std)
        )
        image = ((image * std + mean).clamp(0, 1) * 255).round().byte()
    return image.permute(0, 2, 3, 1).numpy()


def _short(value: Any) -> str:
    """Format a column's value for a caption."""
    if isinstance(value, str | dict):
        return str(value)
    return np.array2string(np.asarray(value), precision=3, threshold=6)


def find_draws(
    plan: Plan, epoch: int, indices: Sequence[int]
) -> dict[int, SamplePlace]:
    """Find the first place of an epoch that draws each sample; those that it leaves out are missing."""
    draws: dict[int, SamplePlace] = {}
    for index, place in plan.places_of(indices, "train", [epoch]):
        draws.setdefault(index, place)
        if len(draws) == len(set(indices)):
            break
    return draws
