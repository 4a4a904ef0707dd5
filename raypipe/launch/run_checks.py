"""Checks of a run's settings against its stores and code, before the cluster starts trainers."""

from __future__ import annotations

from difflib import get_close_matches

import torch
from torch import nn

from raypipe.config import AugmentConfig, RunConfig, TrainConfig
from raypipe.device.stage import DeviceStage
from raypipe.errors import ConfigError
from raypipe.mistakes import did_you_mean
from raypipe.streaming.saving.checkpoints import Checkpoint
from raypipe.streaming.saving.stateful import loaded
from raypipe.streaming.spec import StreamSpec
from raypipe.train.learning import NO_VIEWS, Learner
from raypipe.train.models import (
    build_loss,
    build_metric,
    build_optimizer,
    build_schedule,
)
from raypipe.transform.columns import ColumnType
from raypipe.transform.device_input import IMAGES, DeviceInput
from raypipe.transform.views import makes_views


def check_code(config: TrainConfig, channels: int) -> None:
    """Raise ConfigError if a setting names a model or a function that does not exist."""
    if ":" in config.model_name:
        config.imported("model")
    else:
        check_model(config.model_name, channels)
    if ":" in config.named("optimizer")[0]:
        config.imported("optimizer")
    else:
        build_optimizer(nn.Linear(1, 1), config)
    build_loss(config)
    build_schedule(config)
    build_metric(config)


def check_model(name: str, channels: int) -> None:
    """Raise ConfigError if a name is not 'small' or a torchvision model, or the model cannot take the channels."""
    if name == "small":
        return
    import torchvision

    names = ["small", *torchvision.models.list_models(torchvision.models)]
    if name.lower() not in names:
        raise ConfigError(
            f"train.model={name!r} is neither 'small' nor a torchvision classification model nor module:function"
            + did_you_mean(get_close_matches(name, names))
        )
    if channels != 3:
        raise ConfigError(
            f"train.model={name!r} needs three channels, but augment.mean has {channels}: use 'small' or a "
            "module:function"
        )


def check_continues(run: RunConfig, num_classes: int, start: Checkpoint) -> None:
    """Raise ConfigError if a run's model or optimizer is not the one of the checkpoint that it starts from.

    The trainers load it as well. By then the run's folder has the new settings.

    Args:
        start: with its state.
    """
    was = start.input.get("model")
    if was and was != run.train.model_name:
        raise ConfigError(
            f"train.model={run.train.model_name} cannot continue {start.name}, which has train.model={was}: "
            "leave it out, or start a new run"
        )
    try:
        with torch.random.fork_rng(devices=[]):
            learner = Learner(run, num_classes, torch.device("cpu"), 1)
        state = loaded(start.state)
    except Exception:  # where the trainers fail like this, they say more
        return
    learner.load(state)


def num_classes_of(run: RunConfig, spec: StreamSpec) -> int:
    """Return the number of classes of a run's classifier, or of its model's outputs if targets are not classes.

    Raises:
        ConfigError: the number is unknown, or the run's loss or mixing does not fit its targets.
    """
    if run.transform.target_columns:
        raise ConfigError(
            f"`raypipe train` trains a classifier, which cannot use {run.transform.target_settings}: leave it "
            "out, or write your own loop around raypipe.loader, see docs/targets.md"
        )
    for split, transform in spec.transforms.items():
        if makes_views(transform):
            raise ConfigError(f"transform.{split} {NO_VIEWS}")
    if not spec.columns.has_target:
        raise ConfigError(
            "`raypipe train` needs targets, but store.target_column is '': name a column, or write your own loop "
            "around raypipe.loader, see docs/transforms.md"
        )
    if target := spec.columns.target:
        return _num_outputs(run, target)
    store = spec.stores["train"]
    classes = store.classes
    if run.train.num_classes:
        return run.train.num_classes
    if classes is None:
        raise ConfigError(
            f"{store.address} does not name its classes: set num_classes in train.model"
        )
    return len(classes)


def _num_outputs(run: RunConfig, target: ColumnType) -> int:
    """Return the number of a model's outputs for targets that are not classes."""
    num = run.train.num_classes
    if not num and len(target.shape) < 2:
        num = target.shape[0] if target.shape else 1
    if not num:
        raise ConfigError(
            f"targets are {target}: set num_classes in train.model, the number of its outputs"
        )
    # Floats may be probabilities of the classes.
    if run.train.named("loss")[0] == "cross_entropy" and not (
        target.dtype.startswith("float") and target.shape == (num,)
    ):
        raise ConfigError(
            f"targets are {target}, but train.loss=cross_entropy needs classes or their probabilities: set "
            "train.loss to a module:function of outputs and targets"
        )
    return num


def check_augment(config: AugmentConfig, batches: DeviceInput = IMAGES) -> None:
    """Raise ConfigError for a wrong setting, before the cluster starts trainers.

    Args:
        batches: facts about the batches that it augments.
    """
    if not isinstance(config.module, str):
        raise ConfigError(
            "augment.module of a run is kept in its folder, so it must be module:name: put the module into a "
            "file, such as my_code.py, and name it my_code:augment; your own loop takes the object"
        )
    cpu = torch.device("cpu")
    _ = DeviceStage(config, cpu, None, batches, tells=False).augment
