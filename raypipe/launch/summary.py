"""Description of a run: its settings, and values derived from them."""

from __future__ import annotations

from typing import Any

import yaml

from raypipe.config import RunConfig
from raypipe.launch.run_folder import CONFIG_FILE, as_plain
from raypipe.rayext.allocation import Allocation
from raypipe.storage.files import read_whole
from raypipe.storage.filesystem import join_address
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.decode.jpeg import missing_extension


def changes(run: RunConfig, run_uri: str) -> str:
    """Return the settings that a resume changes, with both values; empty if there are none or they are unknown."""
    try:
        before = (
            yaml.safe_load(read_whole(join_address(run_uri, CONFIG_FILE)) or b"") or {}
        )
    except yaml.YAMLError:
        return ""
    then = flattened(before)
    now = flattened(as_plain(run))
    names = [name for name in now if name in then and then[name] != now[name]]
    return ", ".join(f"{name}={now[name]} (was {then[name]})" for name in names)


def flattened(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by whole name, such as `plan.seed`."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def summarize(
    run: RunConfig, spec: StreamSpec, allocation: Allocation, run_uri: str
) -> str:
    """Describe a run: the settings that differ from the defaults, and values derived from the settings."""
    plan = spec.plan
    num_excluded = sum(kept.num_left_out for kept in plan.kept.values())
    slower = missing_extension()
    trainers = f"{allocation.workers} x {'GPU' if allocation.gpu else f'{allocation.cpus_per_worker:g} CPU'}"
    if allocation.min_workers:
        trainers = f"{allocation.min_workers} to {trainers}"
    if allocation.idle_gpus:
        all_gpus = allocation.workers + allocation.idle_gpus
        batch_size = all_gpus * plan.config.micro_batch_size
        trainers += (
            f"\nidle GPUs  {allocation.idle_gpus} of {all_gpus}, since the number of workers must divide the "
            f"{plan.config.per_step} micro-batches of a step: set plan.global_batch_size to {batch_size} or a "
            f"multiple of it, or train.num_workers={allocation.workers} if this is intended"
        )
    actors = f"{run.pool.least_actors} to {allocation.max_actors} actors"
    if run.pool.engine == "inline":
        actors = "in the trainers themselves (pool.engine=inline)"
    defaults = flattened(as_plain(RunConfig()))
    settings = [
        f"{name}={value}"
        for name, value in flattened(as_plain(run)).items()
        if value != defaults.get(name)
    ]
    return (
        f"settings   {', '.join(settings)}\n"
        f"run        {run_uri}  (all settings: config.yaml)\n"
        f"plan       {plan.fingerprint}: {plan.config.epochs} epochs of {plan.steps_per_epoch} steps of "
        f"{plan.config.per_step} x {plan.config.micro_batch_size} = {plan.global_batch_size} samples "
        f"({plan.num_train} train, {plan.num_val} val"
        f"{f'; {num_excluded} excluded' if num_excluded else ''})\n"
        f"trainers   {trainers}\n"
        f"optimizer  {run.train.named('optimizer')[0]} with a peak learning rate of {run.peak_lr:.3g}"
        f"{'' if run.train.lr else ' (train.lr=0: by the samples of a step)'}\n"
        f"transform  {actors}" + (f"\nslower     {slower}" if slower else "")
    )
