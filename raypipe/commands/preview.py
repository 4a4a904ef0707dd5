"""A picture of what becomes of a few samples over several epochs. Starts no Ray.

    decoded | epoch 0: transformed  augmented  mixed | epoch 1: …        one row per sample
    decoded | epoch 0: each crop of each view, augmented | epoch 1: …    the same of views

The plan, a run's transform worker and the device's augmentation are called as a run calls them, on the whole
micro-batch in which the sample stands in that epoch: a tile is what a run of the same settings feeds the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raypipe.commands.picture import STAGES, Tile, draw
from raypipe.config import AugmentConfig, PlanConfig, TransformConfig
from raypipe.device.augment import DeviceAugment
from raypipe.device.mixing import Mixed, check_mixable
from raypipe.errors import ConfigError, SampleError
from raypipe.plan.places import MicroBatchId
from raypipe.plan.schedule import Plan
from raypipe.stores.base import Store
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.opening import open_stream
from raypipe.transform.decode import decode
from raypipe.transform.decode_array import as_rgb, decode_array
from raypipe.transform.fields import COLUMN, IMAGE, LABEL, VIEW, MicroBatch, Ragged, in_group
from raypipe.transform.samples import NO_LABEL, read_samples
from raypipe.transform.targets import decode_targets
from raypipe.transform.transform_steps import brief
from raypipe.transform.views import find_views, makes_views

MAX_TILES = 1000  # about 40 megapixels
# To find samples by drawing takes some seconds for so many.
_MAX_LOOKED_AT, _LOOKED_AT = 1 << 24, 1 << 16
Stages = tuple[MicroBatch, np.ndarray, np.ndarray, Mixed | None]


class Preview:
    """Makes tiles for samples of a training store; the CPU transform is `transform.train`."""

    def __init__(
        self,
        store: Store,
        plan: PlanConfig,
        transform: TransformConfig,
        augment: AugmentConfig,
        columns: Mapping[str, Any] | None = None,
    ) -> None:
        # Without a GPU the CPU's decoder is the nearest that there is; and any number of bad samples is shown.
        transform = replace(transform, decode="cpu", max_bad_fraction=1)
        label = LABEL if LABEL in store.columns else ""
        spec = open_stream(store, plan=plan, transform=transform, columns=columns or {}, label_column=label)
        self._columns, self._wanted = spec.columns, spec.wanted
        if target := spec.columns.target:
            check_mixable(augment, target.dtype, target.shape)
        self.plan, self.store, self.config, self.augment = spec.plan, store, spec.transform, augment
        self._maker, self._targets = MicroBatchMaker(spec), transform.target_columns
        device, targets = torch.device("cpu"), bool(self._targets)
        # The mixing draws from a generator of its own, so the operations draw the same without it.
        unmixed = replace(augment, mixup_alpha=0, cutmix_alpha=0)
        self._augment_only = DeviceAugment(unmixed, device, targets=targets)
        views = makes_views(self.config.train)
        self._augment_and_mix = DeviceAugment(augment, device, targets=targets, views=views)
        self.columns: tuple[str, ...] = STAGES

    def tiles(self, indices: list[int], epochs: list[int]) -> list[list[Tile]]:
        """One row per sample: decoded, then transformed, augmented and mixed for each epoch; or the crops of
        views, by which `columns` are then called."""
        rows = [[self._decoded(index)] for index in indices]
        for epoch in epochs:
            places = find(self.plan, epoch, indices)
            # Each micro-batch once, and one at a time.
            for at in dict.fromkeys(at for at, _ in places if at is not None):
                host = self._maker.batch(at)
                shown = self._views(host) if host.arrays(VIEW) else partial(self._three, stages=self.stages(host))
                for row, (place, position) in zip(rows, places, strict=True):
                    if place == at:
                        row += shown(position)
            reason = "not in this epoch: its draws are others"
            if self.plan.steps_per_epoch * self.plan.global_batch_size > _MAX_LOOKED_AT:
                reason = f"not among the first {_MAX_LOOKED_AT} draws of this epoch"
            elif self.plan.config.is_plain:
                left_out = len(self.store) % self.plan.global_batch_size
                reason = f"not in this epoch: its last {left_out} samples make no whole step"
            for row, (place, _) in zip(rows, places, strict=True):
                if place is None:
                    row += [Tile(None, (), reason), *[Tile(None)] * (len(self.columns) - 1)]
        return rows

    def stages(self, made: MicroBatch) -> Stages:
        """All of one micro-batch on its way to the model, bad samples substituted.

        Returns:
            The micro-batch; uint8 (B, h, w, 3), what the device's operations make of it; the same, mixed: what the
            model gets, normalisation undone; and the other half of the targets, None = not mixed.
        """
        at = made.at
        image = torch.from_numpy(made[IMAGE]).permute(0, 3, 1, 2)
        target, counts = torch.from_numpy(made[LABEL]), made.index >= 0
        strength = self.augment.strength.at(self.plan.progress(at.epoch, at.step))
        drawn: Any = {"seed": self.plan.micro_batch_seed(at), "strength": strength}
        augmented, _ = self._augment_only(image, target, counts, **drawn)
        fed, mixed = self._augment_and_mix(image, target, counts, **drawn)
        return made, self._shown(augmented), self._shown(fed), mixed

    def _shown(self, image: torch.Tensor) -> np.ndarray:
        """Normalised floats (B, 3, H, W) → uint8 (B, H, W, 3), of the first three channels, or of one."""
        mean, std = (torch.tensor(value).view(1, -1, 1, 1) for value in (self.augment.mean, self.augment.std))
        pixels = (image * std + mean).clamp(0, 1) * 255
        pixels = pixels[:, :3] if pixels.shape[1] >= 3 else pixels[:, :1].expand(-1, 3, -1, -1)
        return np.ascontiguousarray(pixels.round().byte().permute(0, 2, 3, 1).numpy())

    def _decoded(self, index: int) -> Tile:
        (sample,) = read_samples(self.store, np.array([index]), self._wanted)
        lines = ("" if LABEL in self._columns.types else self._class(sample.label), f"sample {index}")
        try:
            image = self._pixels(sample.image)
            height, width = image.shape[:2]
            drawn: dict[str, Any] = decode_targets(sample.columns, self._targets, (height, width))
        except SampleError as error:
            return Tile(None, lines, str(error))
        return Tile(image, (lines[0], f"{lines[1]}, {width} x {height}"), targets=drawn)

    def _pixels(self, image: bytes | None) -> np.ndarray:
        if self.config.decode_as == "array":
            return as_rgb(decode_array(image))
        return decode(image, exif=self.config.apply_exif)

    def _views(self, made: MicroBatch) -> Callable[[int], list[Tile]]:
        """Makes the tiles of a row: the crops of its views, as the model gets them."""
        at = made.at
        views = {name: torch.from_numpy(view).movedim(-1, -3) for name, view in made.arrays(VIEW).items()}
        strength = self.augment.strength.at(self.plan.progress(at.epoch, at.step))
        fed = self._augment_only.of_views(views, seed=self.plan.micro_batch_seed(at), strength=strength)
        crops: dict[str, np.ndarray] = {}
        for name, view in fed.items():
            several = [view] if view.ndim == 4 else view.unbind(1)
            crops |= {
                f"{name} {i}" if view.ndim == 5 else name: self._shown(crop) for i, crop in enumerate(several)
            }
        self.columns = tuple(crops)

        def tiles(row: int) -> list[Tile]:
            lines, reason = self._place(made, row)
            pixels = [None if reason else crop[row].copy() for crop in crops.values()]
            return [Tile(pixels[0], tuple(lines), reason), *(Tile(each) for each in pixels[1:])]

        return tiles

    def _place(self, made: MicroBatch, row: int) -> tuple[list[str], str]:
        """Lines that say where a row stands, and why it has no image."""
        at, wanted = made.at, int(self.plan.indices(made.at)[row])
        lines, reason = [f"step {at.step}, row {row}"], ""
        if self.plan.config.per_step > 1:
            lines = [f"step {at.step}, micro-batch {at.micro}", f"row {row}"]
        if made.index[row] != wanted:
            lines.append(f"bad: sample {made.index[row]} stands in")
            if self._decoded(wanted).image is not None:  # else a grey tile has the reason already
                reason = "the transform fails on it: the log has its error"
        columns = in_group(made.fields, COLUMN)
        values = {name: each.unpacked() if isinstance(each, Ragged) else each for name, each in columns.items()}
        if shown := [f"{name} {_short(of_rows[row])}" for name, of_rows in values.items()]:
            bad = lines[-1:] if lines[-1].startswith("bad") else []
            lines = [lines[0], *bad, ", ".join(shown)]  # three at most
        return lines, reason

    def _three(self, row: int, stages: Stages) -> list[Tile]:
        made, augmented, fed, mixed = stages
        own, (lines, reason) = self._class(made[LABEL][row]), self._place(made, row)
        if mixed is None:
            label: tuple[str, ...] = ("not mixed", own)
        else:
            kind = "CutMix" if mixed.is_cutmix else "MixUp"
            other = self._class(mixed.target[row].numpy())
            label = (f"{kind}: {mixed.lam:.2f} {own}", f"+ {1 - mixed.lam:.2f} {other}")
        # Copies: a view would keep its whole micro-batch in memory. On the device masks and boxes stay the same.
        drawn: dict[str, Any] = {name: made[name][row].copy() for name in self._targets}
        return [
            Tile(None if reason else as_rgb(made[IMAGE][row]).copy(), tuple(lines), reason, targets=drawn),
            Tile(augmented[row].copy(), (own,), targets=drawn),
            Tile(fed[row].copy(), label, targets=drawn),
        ]

    def _class(self, label: Any) -> str:
        """Its name, or its number where it has none that the picture's font is sure to have; or another target."""
        if self._columns.target:
            return f"target {_short(label)}"
        if not self._columns.has_target:
            return ""
        names = self.store.classes or ()
        if label == NO_LABEL:
            return "no label"
        return names[label] if 0 <= label < len(names) and names[label].isascii() else f"class {label}"


def _short(value: Any) -> str:
    """A column's value for a line of a caption."""
    if isinstance(value, str):
        return value
    return (
        np.array2string(np.asarray(value), precision=3, threshold=6) if not isinstance(value, dict) else str(value)
    )


def preview(
    store: Store,
    output: str,
    *,
    plan: PlanConfig,
    transform: TransformConfig,
    augment: AugmentConfig,
    epochs: int,
    samples: int = 6,
    indices: list[int] | None = None,
    columns: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write a picture of samples of a store, as PNG.

    Args:
        store: the training store.
        output: the file to write.
        plan, transform, augment: of the run. Micro-batches are no larger than the store allows.
        epochs: how many of the run's epochs to show, evenly spread.
        samples: the first so many of the run, where no indices are given.
        indices: of the samples to show.
        columns: of the run, see `open_stream`; their values are in the captions.

    Returns:
        `output`, `samples` and `epochs`.

    Raises:
        ConfigError: there is nothing to show, too much, or no place to write it.
    """
    target = Path(output)
    if target.suffix.lower() != ".png" or not target.parent.is_dir():
        raise ConfigError(f"--output {output}: expected is a file *.png in a folder that exists")
    if not len(store):
        raise ConfigError(f"{store.address} holds no samples: there is nothing to show")
    if not 1 <= epochs <= plan.epochs:
        raise ConfigError(f"--show-epochs must be in [1, {plan.epochs}], the epochs of the run, got {epochs}")
    outside = [index for index in indices or () if not 0 <= index < len(store)]
    if outside:
        raise ConfigError(f"--indices: {outside[0]} is outside [0, {len(store)}) of {store.address}")
    size = min(plan.micro_batch_size, max(1, len(store) // plan.per_step))
    made = Preview(
        store,
        replace(plan, micro_batch_size=size, global_batch_size=size * plan.per_step),
        transform,
        augment,
        columns,
    )
    shown = indices or _first_of(made.plan, min(samples, len(store)))
    per_epoch = len(STAGES)
    if makes_views(made.config.train):
        per_epoch = sum(view.count for view in find_views(made.config.train, made.config.final_size).values())
    if not 0 < (num_tiles := len(shown) * (1 + per_epoch * epochs)) <= MAX_TILES:
        raise ConfigError(
            f"{len(shown)} samples over {epochs} epochs make {num_tiles} tiles, not 1 to {MAX_TILES}"
        )
    numbers = np.linspace(0, plan.epochs - 1, epochs).round().astype(int).tolist()
    titles = [f"{store.address.rstrip('/').rpartition('/')[2]}: {len(store):,} samples", _note(made)]
    strengths = (augment.strength.at(made.plan.progress(epoch, 0)) for epoch in numbers)
    headers = [f"epoch {e}, seed {plan.seed}, strength {s:.2f}" for e, s in zip(numbers, strengths, strict=True)]
    figure = draw(made.tiles(shown, numbers), titles, headers, made.columns)
    try:
        figure.savefig(target, metadata={"Software": None}, pil_kwargs={"optimize": True})
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error}") from error
    return {"output": output, "samples": len(shown), "epochs": epochs}


def find(plan: Plan, epoch: int, indices: Sequence[int]) -> list[tuple[MicroBatchId | None, int]]:
    """The first micro-batch of a training epoch that draws each sample, None where none does, and the row there.

    Only the first 16 million draws are looked at.
    """
    num_draws = min(plan.steps_per_epoch * plan.global_batch_size, _MAX_LOOKED_AT)
    first_drawn: dict[int, int] = {}
    for first in range(0, num_draws, _LOOKED_AT):
        drawn = plan.draw_epoch(epoch, np.arange(first, min(num_draws, first + _LOOKED_AT))).indices
        for row in np.flatnonzero(np.isin(drawn, indices)).tolist():
            first_drawn.setdefault(int(drawn[row]), first + row)
        if len(first_drawn) == len(set(indices)):
            break
    places = list[tuple[MicroBatchId | None, int]]()
    for index in indices:
        number, row = divmod(first_drawn.get(index, 0), plan.config.micro_batch_size)
        at = MicroBatchId("train", epoch, *divmod(number, plan.config.per_step))
        places.append((at if index in first_drawn else None, row))
    return places


def _first_of(plan: Plan, num: int) -> list[int]:
    """The first samples of a run, each once; fewer where an epoch's first draws are of fewer."""
    num_draws = min(8 * num, plan.steps_per_epoch * plan.global_batch_size)
    return list(dict.fromkeys(plan.draw_epoch(0, np.arange(num_draws)).indices.tolist()))[:num]


def _note(made: Preview) -> str:
    plan, augment = made.plan.config, made.augment
    device = ["" if augment.preset == "none" else augment.preset, *(entry["op"] for entry in augment.ops)]
    device.append(augment.module)
    mixing = {"MixUp": augment.mixup_alpha, "CutMix": augment.cutmix_alpha}
    device += [f"{name} {alpha:g}" for name, alpha in mixing.items() if alpha]
    done = ", ".join(filter(None, device)) or "nothing, as augment sets nothing"
    size = ", ".join(plan.buckets) or made.config.size_text
    return (
        f"CPU: {brief(made.config.train)}, {size} px. Device: {done}. "
        f"Micro-batches of {plan.micro_batch_size}, {plan.per_step} to a step."
    )
