"""Trained models, read from checkpoints: their weights, and what their inputs and outputs mean."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raypipe.config import AugmentConfig, TransformConfig
from raypipe.device.decoders import DeviceDecoder
from raypipe.errors import ConfigError, SampleError
from raypipe.importing import check_named_code
from raypipe.plan.places import Split
from raypipe.storage.filesystem import as_uri
from raypipe.streaming.saving.checkpoints import Checkpoint, find_newest
from raypipe.streaming.saving.stateful import loaded
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.encoded_map import DATA, MAP
from raypipe.transform.ending import normalization
from raypipe.transform.fields import IMAGE, Field, Ragged
from raypipe.transform.sample_maker import SampleMaker
from raypipe.transform.samples import of_images

_ANY_KEY = (0, 0)  # a validation's transform draws nothing


def input_of(
    spec: StreamSpec, augment: AugmentConfig | None, model: str = ""
) -> dict[str, Any]:
    """Describe a model's inputs and outputs, as plain values for a checkpoint.

    Returns:
        `classes`, names by output, or None; `transform`, the settings; `val`, the transform during validation,
        None if it is an object, which a checkpoint does not hold; `mean` and `std` of the normalization, by
        `augment` or the pipeline's own, None if the loop normalizes; `dtype`; and `model`, its name.
    """
    store = spec.stores["train"]
    val = val_of(spec)
    split: Split = "val" if "val" in spec.endings else "train"
    ending = spec.endings.get(split)
    augment = normalization(augment, ending, split)
    return {
        "classes": list(store.classes) if store.classes else None,
        "transform": dataclasses.asdict(spec.transform),
        "val": val if isinstance(val, str | list) and _is_plain(val) else None,
        "mean": list(augment.mean) if augment else None,
        "std": list(augment.std) if augment else None,
        "dtype": ending.dtype if ending else "float32",
        "model": model,
    }


def val_of(spec: StreamSpec) -> Any:
    """Return the transform of a stream's validations."""
    return spec.transforms.get("val", spec.transform.val)


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


@dataclass(frozen=True)
class SavedModel:
    """A model as a checkpoint has it; `raypipe.read_checkpoint` and `Loader.restore` make one.

    Attributes:
        address: the checkpoint's folder.
        epoch, step: its place in the run: the epoch, from 0 on, and the steps done in it.
        metrics: the run's metrics up to there.
        state: the state_dict of each part, on the CPU, by its name: a run has `model`, `optimizer`, `scaler` and
            `ema`, the average of the weights (None without `ema_decay`); an own loop has the names that it
            gave to `loader.report`.
        classes: the names of the classes, in the order of the outputs; None = the store names none.
        model: `train.model` of a run; empty = of an own loop.
        settings: the settings of the run's transform, by name.
    """

    address: str
    epoch: int
    step: int
    metrics: Mapping[str, Any]
    state: Mapping[str, Any] = field(repr=False)
    classes: list[str] | None = field(repr=False)
    model: str
    settings: Mapping[str, Any] = field(repr=False)
    _input: Mapping[str, Any] = field(repr=False)
    _trusts: bool = field(repr=False)

    def prepare(self, image: bytes) -> torch.Tensor:
        """Make the model's input of one encoded image, as the run's validations do.

        Returns:
            float32 (3, H, W), or of the dtype with which the pipeline ended, normalized; uint8 (3, H, W) from an
            own loop that normalizes by itself.

        Raises:
            SampleError: the image cannot be decoded.
            ConfigError: the validations' transform was an object, or is code that nobody has trusted.
        """
        fields = self._sample_maker.slow(of_images([image]), 0, _ANY_KEY)
        if IMAGE in fields:
            channels_first = (
                torch.from_numpy(fields[IMAGE]).permute(2, 0, 1).contiguous()
            )
        else:
            channels_first = self._decoded(fields).contiguous()
        if self._input["mean"] is None:
            return channels_first
        mean = torch.tensor(self._input["mean"]).view(-1, 1, 1)
        std = torch.tensor(self._input["std"]).view(-1, 1, 1)
        pixels = channels_first
        if not pixels.is_floating_point():
            pixels = pixels / torch.iinfo(pixels.dtype).max
        return ((pixels - mean) / std).to(getattr(torch, self._input["dtype"]))

    def _decoded(self, fields: Mapping[str, Any]) -> torch.Tensor:
        """The image, uint8 (3, H, W), of a run with `transform.decode: device`, with this device's own pixels."""
        data = Ragged.of("bytes", [fields[DATA]], Field("bytes"))
        decoded = self._decoder(data, fields[MAP][None], np.ones(1, bool))
        if decoded.failed:
            raise SampleError(decoded.failed[0])
        return decoded.image[0]

    @functools.cached_property
    def _decoder(self) -> DeviceDecoder:
        return DeviceDecoder("cpu", self.settings["apply_exif"])

    @functools.cached_property
    def _sample_maker(self) -> SampleMaker:
        val = self._input["val"]
        if val is None:
            raise ConfigError(
                f"{self.address} was trained with a validation transform that is an object, which a checkpoint "
                "does not hold: apply it to the pixels yourself"
            )
        check_named_code({"transform.val": val}, self.address, self._trusts)
        size = self.settings["size"]
        if isinstance(size, dict):
            size = {int(epoch): side for epoch, side in size.items()}
        kept = {name: self.settings[name] for name in ("decode", "apply_exif")}
        return SampleMaker(val, TransformConfig(size=size, **kept))


def read_checkpoint(address: str | Path, *, trust_run_code: bool = False) -> SavedModel:
    """Read the newest whole checkpoint of a run, or one checkpoint, to use its model.

    Args:
        address: the folder or URI of a run, by `raypipe train` or your own loop, or of one of its checkpoints.
        trust_run_code: let `SavedModel.prepare` run the code that the checkpoint names as the transform.

    Raises:
        ConfigError: there is none, or all are damaged.
    """
    newest, _ = find_newest(as_uri(str(address)), lambda _: None, with_state=True)
    if newest is None:
        raise ConfigError(
            f"no raypipe checkpoint at {address}: give the folder of a run or of a checkpoint"
        )
    if not newest.input:
        raise ConfigError(
            f"{newest.address} does not describe its model's input: an older raypipe made it"
        )
    return saved_model(newest, trust_run_code)


def saved_model(checkpoint: Checkpoint, trusts: bool) -> SavedModel:
    """Return the model of a checkpoint that was read with its state.

    Args:
        trusts: whether `SavedModel.prepare` may run the code that it names.
    """
    described = checkpoint.input
    return SavedModel(
        address=checkpoint.address.removeprefix("file://"),
        epoch=checkpoint.cursor.epoch,
        step=checkpoint.cursor.step,
        metrics=checkpoint.metrics,
        state=loaded(checkpoint.state),
        classes=described.get("classes"),
        model=described.get("model", ""),
        settings=described.get("transform", {}),
        _input=described,
        _trusts=trusts,
    )
