"""A whole run from its configuration: stores, plan, preflight, Ray Train, result."""

from __future__ import annotations

import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow.fs
import yaml

from raypipe.cluster import Allocation, connect, preflight
from raypipe.config import AugmentConfig, RunConfig
from raypipe.digits import digits_stores
from raypipe.errors import ConfigError, RaypipeError
from raypipe.pipeline import StreamSpec
from raypipe.runlog import as_uri, remove_stop, request_stop
from raypipe.stores import open_store


def train(run: RunConfig) -> dict[str, Any]:
    """Train by a configuration, on the connected cluster or on a new local one.

    At Ctrl-C the run ends cleanly: at the next line of progress it leaves a checkpoint. A second one aborts it.

    Returns:
        `val_accuracy` (None without validation), `images_per_s`, `wait_fraction`, `steps`, `run_dir`,
        `first_batch_s`, and `stopped`: whether it was ended before its last step, on request.

    Raises:
        RaypipeError: what is wrong with the configuration, a store, the cluster or the run.
    """
    if run.resume:
        address = run.resume.rstrip("/")
        runs, _, name = address.rpartition("/")
        run = dataclasses.replace(run, runs=runs or ".", name=name)
    elif not run.name:
        run = dataclasses.replace(run, name=datetime.datetime.now().strftime("%Y%m%d-%H%M%S"))
    run_uri = f"{as_uri(run.runs)}/{run.name}"
    _check_run_folder(run_uri, bool(run.resume))
    if not run.store.train:
        train_address, val_address = digits_stores()
        store = dataclasses.replace(run.store, train=train_address, val=run.store.val or val_address)
        run = dataclasses.replace(run, store=store)
    spec = _spec(run, run_uri)
    num_classes = _num_classes(run, spec)
    _check_augment(run.augment)

    remove_stop(run_uri)  # of a run that was stopped, and now goes on
    connect(dashboard=True)
    allocation = preflight(run.pool, run.train, run.plan.per_step)
    spec.plan.check_workers(allocation.workers)
    spec.check_memory(allocation.max_actors, allocation.workers)
    _store_config(run, run_uri)
    print(describe(run, spec, allocation, run_uri), flush=True)
    result = _fit(run, spec, allocation, num_classes, run_uri)
    return {
        "val_accuracy": result["val_accuracy"],
        "images_per_s": result["images"] / result["train_s"] if result["train_s"] else 0.0,
        "wait_fraction": result["wait_s"] / result["train_s"] if result["train_s"] else 0.0,
        "steps": result["steps"],
        "stopped": result["stopped"],
        "first_batch_s": result["first_batch_s"],
        "run_dir": run_uri.removeprefix("file://"),
    }


def _spec(run: RunConfig, run_uri: str) -> StreamSpec:
    options = {"image_column": run.store.image_column, "label_column": run.store.label_column}
    changed = {name: value for name, value in options.items() if value != name.removesuffix("_column")}
    return StreamSpec.of(
        open_store(run.store.train, **changed),
        open_store(run.store.val, **changed) if run.store.val else None,
        plan=run.plan,
        transform=run.transform,
        pool=run.pool,
        leave_out=run.store.leave_out,
        val_leave_out=run.store.val_leave_out,
        quarantine=f"{run_uri}/quarantine",
    )


def _num_classes(run: RunConfig, spec: StreamSpec) -> int:
    classes = spec.stores["train"].classes
    if run.train.num_classes:
        return run.train.num_classes
    if classes is None:
        raise ConfigError(f"{run.store.train} does not name its classes: set train.num_classes")
    val = spec.stores.get("val")
    if val is not None and val.classes is not None and val.classes != classes:
        raise ConfigError(
            f"{run.store.train} has {len(classes)} classes and {run.store.val} has {len(val.classes)} others, "
            "or in another order: their labels mean different things. Ingest both with the same classes"
        )
    return len(classes)


def _check_augment(config: AugmentConfig) -> None:
    """What is wrong with it is told here, and not by the trainers once the cluster has started them."""
    if config.ops or config.preset != "none" or config.module:
        import torch

        from raypipe.augment import DeviceAugment

        DeviceAugment(config, torch.device("cpu"))


def _check_run_folder(run_uri: str, resume: bool) -> None:
    filesystem, path = pyarrow.fs.FileSystem.from_uri(run_uri)
    exists = filesystem.get_file_info(f"{path}/config.yaml").type == pyarrow.fs.FileType.File
    if resume and not exists:
        raise ConfigError(f"there is no run at {run_uri}: --resume takes the folder that `run_dir` named")
    if exists and not resume:
        raise ConfigError(f"there is a run at {run_uri} already: go on with it by --resume, or choose --name")


def _store_config(run: RunConfig, run_uri: str) -> None:
    filesystem, path = pyarrow.fs.FileSystem.from_uri(run_uri)
    filesystem.create_dir(path, recursive=True)
    with filesystem.open_output_stream(f"{path}/config.yaml") as file:
        file.write(yaml.safe_dump(as_plain(run), sort_keys=False).encode())


def as_plain(run: RunConfig) -> dict[str, Any]:
    """A configuration as dicts, lists and scalars, as YAML has it; `resume` left out."""
    plain = dataclasses.asdict(run)
    del plain["resume"]
    return yaml.safe_load(json.dumps(plain))  # tuples become lists


def describe(run: RunConfig, spec: StreamSpec, allocation: Allocation, run_uri: str) -> str:
    """What is about to run, for people: the effective configuration and what was derived from it."""
    plan = spec.plan
    left_out = sum(len(kept.left_out) for kept in plan.kept.values())
    trainers = f"{allocation.workers} x {'GPU' if allocation.gpu else f'{allocation.cpus_per_worker:g} CPU'}"
    if allocation.min_workers:
        trainers = f"{allocation.min_workers} to {trainers}"
    return (
        f"{yaml.safe_dump(as_plain(run), sort_keys=False)}\n"
        f"run        {run_uri}\n"
        f"plan       {plan.fingerprint}: {plan.config.epochs} epochs of {plan.steps_per_epoch} steps of "
        f"{plan.config.per_step} x {plan.config.micro_batch} = {plan.config.per_step * plan.config.micro_batch} "
        f"samples ({plan.num_train} train, {plan.num_val} val"
        f"{f'; {left_out} left out' if left_out else ''})\n"
        f"trainers   {trainers}\n"
        f"transform  {run.pool.min_actors} to {allocation.max_actors} actors"
    )


def _fit(
    run: RunConfig, spec: StreamSpec, allocation: Allocation, num_classes: int, run_uri: str
) -> dict[str, Any]:
    import ray.train
    from ray.train.v2.api.config import ScalingConfig

    from raypipe.train import train_loop
    from raypipe.trainer import RunTrainer

    def on_interrupt() -> bool:
        request_stop(run_uri)
        print("stopping at the next line of progress, with a checkpoint; press Ctrl-C again to abort", flush=True)
        return True

    filesystem, path = pyarrow.fs.FileSystem.from_uri(run_uri)
    trainer = RunTrainer(
        train_loop,
        per_step=run.plan.per_step,
        on_interrupt=on_interrupt,
        train_loop_config={
            "run": run,
            "spec": spec,
            "num_classes": num_classes,
            "max_actors": allocation.max_actors,
            "run_uri": run_uri,
        },
        scaling_config=ScalingConfig(
            num_workers=(
                (allocation.min_workers, allocation.workers) if allocation.min_workers else allocation.workers
            ),
            elastic_resize_monitor_interval_s=run.train.resize_every_s,
            use_gpu=allocation.gpu,
            resources_per_worker={
                "CPU": allocation.cpus_per_worker,
                **({"GPU": 1} if allocation.gpu else {}),
            },
        ),
        run_config=ray.train.RunConfig(
            name=run.name,
            storage_path=str(Path(path).parent),
            storage_filesystem=filesystem,
            failure_config=ray.train.FailureConfig(max_failures=run.train.max_failures),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    try:
        result = trainer.fit()
    except Exception as error:
        raise _cause(error) from error
    return result.metrics or {}


def _cause(error: BaseException) -> BaseException:
    """raypipe's own error among the failures of the workers, or the error as it is."""
    for failure in getattr(error, "worker_failures", {}).values():
        found: BaseException | None = failure
        while found is not None:
            if isinstance(found, RaypipeError):
                return found
            found = found.__cause__
    return error
