"""The command `preview`, which draws a few samples, stored and as several epochs feed them. Starts no Ray."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raypipe.commands.picture import draw_tiles, save_picture
from raypipe.config import AugmentConfig, RunConfig
from raypipe.errors import ConfigError
from raypipe.plan.schedule import Plan
from raypipe.printing import Result
from raypipe.stores.base import Store
from raypipe.transform.transform_steps import brief

if TYPE_CHECKING:
    from raypipe.streaming.spec import StreamSpec

_MAX_PICTURES = 400  # samples times (1 + epochs), about 30 megapixels


def draw_preview(
    run: RunConfig,
    target: str = "",
    *,
    output: str = "preview.png",
    show_epochs: int = 3,
    samples: int = 6,
    indices: list[int] = [],  # noqa: B006  no code changes it
) -> Result:
    """Draw samples as a run feeds them: transformed, augmented, mixed.

    Examples:
        raypipe preview train.lmdb -o grid.png --augment.preset strong --augment.cutmix-alpha 1
        raypipe preview --config run.yaml --indices [3,14,15]

    Args:
        output: the PNG to write.
        show_epochs: how many epochs to show, evenly spread over the run.
        samples: how many samples to show, the first of the run.
        indices: show these samples instead, as in [3,14,15].
    """
    from raypipe.streaming.opening import open_train, spec_of

    opened = open_train(run)
    store = replace(
        run.store,
        val="",
        target_column=run.store.target_column if "label" in opened.schema.names else "",
    )

    def spec_at(size: int) -> StreamSpec:
        plan = replace(
            run.plan, micro_batch_size=size, global_batch_size=size * run.plan.per_step
        )
        return spec_of(replace(run, plan=plan, store=store))

    try:
        spec = spec_at(run.plan.micro_batch_size)
    except ConfigError:
        # a first look at a few samples, fewer than a step; another mistake is met again
        spec = spec_at(min(run.plan.micro_batch_size, spec_at(1).plan.steps_per_epoch))
    return preview(
        spec,
        output,
        augment=run.augment,
        epochs=show_epochs,
        samples=samples,
        indices=indices,
    )


def preview(
    spec: StreamSpec,
    output: str,
    *,
    augment: AugmentConfig | None = None,
    epochs: int = 3,
    samples: int = 6,
    indices: list[int] | None = None,
) -> dict[str, Any]:
    """Write a picture of a stream's training samples, as PNG; the values of its columns are in the captions.

    Args:
        spec: the stream.
        output: the file to write.
        augment: augmentation on the device; None = only normalization.
        epochs: how many of the run's epochs to show, evenly spread; all if it has fewer.
        samples: how many samples to show, the first of the run, if no indices are given.
        indices: the samples to show.

    Returns:
        `output`, `samples` and `epochs`.

    Raises:
        ConfigError: there is nothing to show, too much, or no place to write it.
    """
    from raypipe.commands.preview_tiles import Preview
    from raypipe.history.step_maker import StepMaker

    if output[-4:].lower() != ".png" or not Path(output).parent.is_dir():
        raise ConfigError(
            f"--output must be a .png file in an existing folder, got {output}"
        )
    store = spec.stores["train"]
    _check_indices(indices or [], store)
    augment = augment or AugmentConfig()
    shown = Preview(StepMaker(spec, augment))
    indices = indices or _first_of(spec.plan, min(samples, len(store)))
    config = spec.plan.config
    epochs = min(epochs, config.epochs)
    if not 0 < (num := len(indices) * (1 + epochs)) <= _MAX_PICTURES:
        raise ConfigError(
            f"{len(indices)} samples, stored and in {epochs} epochs, are {num} pictures, not 1 to {_MAX_PICTURES}"
        )
    numbers = np.linspace(0, config.epochs - 1, epochs).round().astype(int).tolist()
    rows, names = shown.tiles(indices, numbers)
    headers = {
        1 + number * len(names): _header(spec, augment, epoch)
        for number, epoch in enumerate(numbers)
    }
    columns = ["decoded", *names * len(numbers)]
    picture = draw_tiles(rows, _title(spec, augment), columns, headers)
    save_picture(picture, output)
    return {"output": output, "samples": len(indices), "epochs": epochs}


def _check_indices(indices: list[int], store: Store) -> None:
    """Raise ConfigError if a store lacks one of the samples."""
    outside = [index for index in indices if not 0 <= index < len(store)]
    if outside:
        raise ConfigError(
            f"--indices: {outside[0]} is outside [0, {len(store)}) of {store.address}"
        )


def _title(spec: StreamSpec, augment: AugmentConfig) -> str:
    """Return the title of a picture: the store, the transform, the sizes, and the operations on the device."""
    name = spec.stores["train"].address.rstrip("/").rpartition("/")[2]
    size_px = ", ".join(spec.plan.config.train_buckets) or spec.transform.size_text
    on_cpu = brief(spec.transforms["train"])
    return f"{name}: {on_cpu}, {size_px} px; on the device: {_on_device(augment)}"


def _header(spec: StreamSpec, augment: AugmentConfig, epoch: int) -> str:
    """Return the header of an epoch: its number, the seed, and the strengths at its begin."""
    plan = spec.plan
    begin = plan.global_step(plan.cursor(epoch, 0))
    progress = plan.progress(begin)
    strength = augment.strength_at(progress)
    header = f"epoch {epoch}, seed {plan.config.seed}, strength {strength:.2f}"
    if spec.transform.strength == 1:
        return header
    return f"{header}, CPU {spec.transform.strength_at(progress):.2f}"


def _first_of(plan: Plan, num: int) -> list[int]:
    """The first samples of a run, each once; fewer if an epoch's first draws repeat some."""
    num_draws = min(8 * num, plan.steps_per_epoch * plan.global_batch_size)
    return list(
        dict.fromkeys(plan.draw_epoch(0, np.arange(num_draws)).indices.tolist())
    )[:num]


def _on_device(augment: AugmentConfig) -> str:
    """Return the settings of the augmentation that are not the defaults."""
    defaults = vars(AugmentConfig())
    given = (
        f"{name} {value}"
        for name, value in vars(augment).items()
        if value != defaults[name]
    )
    return ", ".join(given) or "normalized"
