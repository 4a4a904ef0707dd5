"""A picture of what becomes of a few samples over several epochs. Starts no Ray.

    decoded | epoch 0: transformed  augmented  mixed | epoch 1: …        one row per sample

The plan, a run's transform worker and the device's augmentation are called as a run calls them, on the whole
micro-batch in which the sample stands in that epoch: a tile is what a run of the same settings feeds the model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raypipe.config import AugmentConfig, PlanConfig, TransformConfig
from raypipe.device.augment import DeviceAugment
from raypipe.device.mixing import Mixed
from raypipe.errors import ConfigError, SampleError
from raypipe.pages.picture import Tile, draw
from raypipe.plan.schedule import MicroBatchId
from raypipe.stores.base import Store
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.worker import TransformWorker
from raypipe.transform.decode import decode
from raypipe.transform.micro_batch import read_encoded
from raypipe.transform.targets import decode_boxes, decode_mask
from raypipe.transform.transform_steps import brief

# Shown to a newcomer who has set nothing. A MixUp that can be seen: at the usual 0.1 to 0.4 most are near 0 or 1.
_EXAMPLE: dict[str, Any] = {"preset": "standard", "mixup_alpha": 0.8, "cutmix_alpha": 1.0}
MAX_TILES = 1000  # about 40 megapixels


class Preview:
    """Makes tiles for samples of a training store; the CPU transform is `transform.train`."""

    def __init__(self, store: Store, plan: PlanConfig, transform: TransformConfig, augment: AugmentConfig) -> None:
        # Without a GPU the CPU's decoder is the nearest that there is; and any number of bad samples is shown.
        transform = replace(transform, decode="cpu", max_bad_fraction=1)
        spec = StreamSpec.of(store, plan=plan, transform=transform)
        self.plan, self.store, self.config, self.augment = spec.plan, store, spec.transform, augment
        self._worker, self._targets = TransformWorker(spec), transform.target_columns
        device, targets = torch.device("cpu"), bool(self._targets)
        # The mixing draws from a generator of its own, so the operations draw the same without it.
        unmixed = replace(augment, mixup_alpha=0, cutmix_alpha=0)
        self._augment_only = DeviceAugment(unmixed, device, targets=targets)
        self._augment_and_mix = DeviceAugment(augment, device, targets=targets)

    def tiles(self, indices: list[int], epochs: list[int]) -> list[list[Tile]]:
        """One row per sample: decoded, then transformed, augmented and mixed for each epoch."""
        rows = [[self._decoded(index)] for index in indices]
        for epoch in epochs:
            places = [self.place(epoch, index) for index in indices]
            # Each micro-batch once, and one at a time.
            for at in dict.fromkeys(at for at, _ in places if at is not None):
                stages = self.stages(at)
                for row, (place, position) in zip(rows, places, strict=True):
                    if place == at:
                        row += self._three(at, position, *stages)
            left_out = len(self.store) % (self.plan.config.micro_batch * self.plan.config.per_step)
            reason = f"not in this epoch: its last {left_out} samples make no whole step"
            for row, (place, _) in zip(rows, places, strict=True):
                if place is None:
                    row += [Tile(None, (), reason), Tile(None), Tile(None)]
        return rows

    def place(self, epoch: int, index: int) -> tuple[MicroBatchId | None, int]:
        """The micro-batch in which a sample stands, None where an epoch leaves it out, and its row there."""
        position = int(self.plan.train_order.positions(epoch, np.array([index]))[0])
        number, row = divmod(position, self.plan.config.micro_batch)
        step, micro = divmod(number, self.plan.config.per_step)
        return (MicroBatchId("train", epoch, step, micro) if step < self.plan.steps_per_epoch else None), row

    def strength(self, epoch: int, step: int) -> float:
        """The strength of the augmentation at a training step."""
        return self.augment.strength.at(self.plan.progress(epoch, step))

    def stages(self, at: MicroBatchId) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, Mixed | None]:
        """All of one micro-batch on its way to the model.

        Returns:
            The columns of its row, see `raypipe.streaming.row`, bad samples substituted; uint8 (B, h, w, 3), what
            the device's operations make of that; the same, mixed: what the model gets, normalisation undone; and
            the other half of the targets, None = not mixed.
        """
        made = {name: column[0] for name, column in self._worker.run(at).items()}
        image = torch.from_numpy(made["image"]).permute(0, 3, 1, 2)
        target, counts = torch.from_numpy(made["label"]), made["index"] >= 0
        drawn: Any = {"seed": self.plan.micro_batch_seed(at), "strength": self.strength(at.epoch, at.step)}
        augmented, _ = self._augment_only(image, target, counts, **drawn)
        fed, mixed = self._augment_and_mix(image, target, counts, **drawn)
        return made, self._shown(augmented), self._shown(fed), mixed

    def _shown(self, image: torch.Tensor) -> np.ndarray:
        """Normalised floats (B, 3, H, W) → uint8 (B, H, W, 3)."""
        mean, std = (torch.tensor(value).view(1, 3, 1, 1) for value in (self.augment.mean, self.augment.std))
        pixels = (image * std + mean).clamp(0, 1) * 255
        return np.ascontiguousarray(pixels.round().byte().permute(0, 2, 3, 1).numpy())

    def _decoded(self, index: int) -> Tile:
        (sample,), (label,) = read_encoded(self.store, np.array([index]), self._targets)
        lines = (self._class(label), f"sample {index}")
        drawn: dict[str, Any] = {}
        try:
            image = decode(sample.image, exif=self.config.exif)
            height, width = image.shape[:2]
            if "mask" in self._targets:
                drawn["mask"] = decode_mask(sample.mask, (height, width))
            if "boxes" in self._targets:
                drawn["boxes"] = decode_boxes(sample.boxes, (height, width))
        except SampleError as error:
            return Tile(None, lines, str(error))
        return Tile(image, (lines[0], f"{lines[1]}, {width} x {height}"), **drawn)

    def _three(
        self,
        at: MicroBatchId,
        row: int,
        made: dict[str, np.ndarray],
        augmented: np.ndarray,
        fed: np.ndarray,
        mixed: Mixed | None,
    ) -> list[Tile]:
        wanted, own = int(self.plan.indices(at)[row]), self._class(made["label"][row])
        micro = f"micro-batch {at.micro}, " if self.plan.config.per_step > 1 else ""
        lines, reason = [f"step {at.step}, {micro}row {row}"], ""
        if made["index"][row] != wanted:
            lines.append(f"bad: sample {made['index'][row]} stands in")
            if self._decoded(wanted).image is not None:  # else a grey tile has the reason already
                reason = "the transform fails on it: the log has its error"
        if mixed is None:
            label: tuple[str, ...] = ("not mixed", own)
        else:
            kind = "CutMix" if mixed.is_cutmix else "MixUp"
            other = self._class(int(mixed.target[row]))
            label = (f"{kind}: {mixed.lam:.2f} {own}", f"+ {1 - mixed.lam:.2f} {other}")
        # Copies: a view would keep its whole micro-batch in memory. On the device masks and boxes stay the same.
        drawn = {name: array[row].copy() for name, array in made.items() if name in self._targets}
        return [
            Tile(None if reason else made["image"][row].copy(), tuple(lines), reason, **drawn),
            Tile(augmented[row].copy(), (own,), **drawn),
            Tile(fed[row].copy(), label, **drawn),
        ]

    def _class(self, label: int) -> str:
        """Its name, or its number where it has none that the picture's font is sure to have."""
        names = self.store.classes or ()
        return names[label] if 0 <= label < len(names) and names[label].isascii() else f"class {label}"


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
) -> dict[str, Any]:
    """Write a picture of samples of a store, as PNG.

    Args:
        store: the training store.
        output: the file to write.
        plan, transform, augment: of the run. Micro-batches are no larger than the store allows; an augmentation
            that does nothing is replaced by an example, and the picture says so.
        epochs: how many of the run's epochs to show, evenly spread.
        samples: the first so many of the run, where no indices are given.
        indices: of the samples to show.

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
        raise ConfigError(f"--epochs must be in [1, {plan.epochs}], the epochs of the run, got {epochs}")
    if not indices and samples < 1:
        raise ConfigError(f"--samples must be at least 1, got {samples}")
    outside = [index for index in indices or () if not 0 <= index < len(store)]
    if outside:
        raise ConfigError(f"--indices: {outside[0]} is outside [0, {len(store)}) of {store.address}")
    nothing = (augment.preset, augment.ops, augment.module, augment.mixup_alpha, augment.cutmix_alpha)
    is_example = nothing == ("none", [], "", 0, 0) and not transform.target_columns  # it moves pixels
    micro_batch = min(plan.micro_batch, max(1, len(store) // plan.per_step))
    augment = replace(augment, **_EXAMPLE) if is_example else augment
    made = Preview(store, replace(plan, micro_batch=micro_batch), transform, augment)
    shown = indices or made.plan.train_order.indices(0, np.arange(min(samples, len(store)))).tolist()
    if len(shown) * (1 + 3 * epochs) > MAX_TILES:
        raise ConfigError(f"{len(shown)} samples over {epochs} epochs make more than {MAX_TILES} tiles")
    numbers = np.linspace(0, plan.epochs - 1, epochs).round().astype(int).tolist()
    figure = draw(
        made.tiles(shown, numbers),
        title=f"{store.address.rstrip('/').rpartition('/')[2]}: {len(store):,} samples",
        note=_note(made, is_example),
        headers=[_header(made, epoch) for epoch in numbers],
    )
    try:
        figure.savefig(target, metadata={"Software": None}, pil_kwargs={"optimize": True})
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error}") from error
    return {"output": output, "samples": len(shown), "epochs": epochs}


def _header(made: Preview, epoch: int) -> str:
    first, last = (f"{made.strength(epoch, step):.2f}" for step in (0, made.plan.steps_per_epoch - 1))
    span = first if first == last else f"{first} to {last}"
    return f"epoch {epoch}, seed {made.plan.config.seed}, strength {span}"


def _note(made: Preview, is_example: bool) -> str:
    plan, augment = made.plan.config, made.augment
    names = [augment.preset, *(entry["op"] for entry in augment.ops), augment.module]
    mixing = {"MixUp": augment.mixup_alpha, "CutMix": augment.cutmix_alpha}
    device = [name for name in names if name not in ("none", "")]
    device += [f"{name} {alpha:g}" for name, alpha in mixing.items() if alpha]
    example = " No augmentation was set: this one is an example." if is_example else ""
    return (
        f"CPU: {brief(made.config.train)}, {made.config.size} px. Device: {', '.join(device) or 'nothing'}. "
        f"Micro-batches of {plan.micro_batch}, {plan.per_step} to a step.{example}"
    )
