"""A whole run from its configuration: stores, plan, preflight, Ray Train, result."""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
from typing import Any

import yaml

from raypipe.checkpoints import newest_cursor, remove_unfinished
from raypipe.cluster import Allocation, connect, reserved
from raypipe.config import AugmentConfig, RunConfig
from raypipe.digits import digits_stores
from raypipe.errors import ConfigError
from raypipe.failures import cause_of
from raypipe.filesystem import as_uri, check_bucket, exists, explained, join, open_filesystem, split
from raypipe.interrupts import Interrupts
from raypipe.logs import configure_logs, progress
from raypipe.pipeline import StreamSpec
from raypipe.report import write_report
from raypipe.runlog import remove_stop, request_stop
from raypipe.stores import open_store, store_options
from raypipe.whole_file import write_text

logger = logging.getLogger(__name__)


def train(run: RunConfig) -> dict[str, Any]:
    """Train by a configuration, on the connected cluster or on a new local one.

    At Ctrl-C or SIGTERM (`ray job stop`) the run ends cleanly: at the next line of progress it leaves a
    checkpoint. A second one aborts it, as does whoever sends SIGKILL before then. While the run starts, it ends
    before the trainers do.

    Returns:
        `val_accuracy` (None without validation), `images_per_s`, `wait_fraction`, `steps`, `run_dir`,
        `first_batch_s`, and `stopped`: whether it was ended before its last step, on request.

    Raises:
        RaypipeError: what is wrong with the configuration, a store, the cluster or the run.
        KeyboardInterrupt: it was asked to end before its trainers were started.
    """
    run, run_uri = locate(run)
    configure_logs(run.log, run=run.name)
    spec = spec_of(run, run_uri)
    num_classes = num_classes_of(run, spec)
    check_augment(run.augment)

    remove_stop(run_uri)  # of a run that was stopped, and now goes on
    for name in remove_unfinished(run_uri):
        progress(logger, f"removed {run_uri}/{name}: it was cut off while it was written")
    if run.resume and (cursor := newest_cursor(run_uri)):
        spec.plan.check(cursor)  # before its configuration is written over, and a cluster starts trainers
    with Interrupts() as interrupts:
        connect(log=run.log)
        interrupts.stand()
        with reserved(run.name, run.pool, run.train, run.plan.per_step, interrupts.check) as allocation:
            spec.plan.check_workers(allocation.workers)
            spec.check_memory(allocation.max_actors, allocation.workers)
            store_config(run, run_uri)
            progress(logger, describe(run, spec, allocation, run_uri))
            interrupts.check()
            try:
                result = _fit(run, spec, allocation, num_classes, run_uri, interrupts)
            finally:
                _leave_report(run_uri)
    return {
        "val_accuracy": result["val_accuracy"],
        "images_per_s": result["images"] / result["train_s"] if result["train_s"] else 0.0,
        "wait_fraction": result["wait_s"] / result["train_s"] if result["train_s"] else 0.0,
        "steps": result["steps"],
        "stopped": result["stopped"],
        "first_batch_s": result["first_batch_s"],
        "run_dir": run_uri.removeprefix("file://"),
    }


def _leave_report(run_uri: str) -> None:
    """Whatever becomes of the run; what it is made of has been written already."""
    try:
        page = write_report(run_uri)["report"]
        progress(logger, f"report     {page.removeprefix('file://')}")
    except ConfigError as error:  # a run that ended before it began to train has an error of its own
        logger.info("no report: %s", error)


def locate(run: RunConfig, prefix: str = "") -> tuple[RunConfig, str]:
    """A run with its name, its stores and the steps of its transforms, and the URI of its folder.

    Args:
        run: the name is that of the run to resume, or its own, or made from the date.
        prefix: of a name that is made from the date.

    Raises:
        ConfigError: there is a run in the folder, and it is not resumed; or there is none, and it is; or a file
            of steps cannot be read.
    """
    if run.resume:
        runs, name = split(run.resume)
        run = dataclasses.replace(run, runs=runs or ".", name=name)
    elif not run.name:
        run = dataclasses.replace(run, name=prefix + datetime.datetime.now().strftime("%Y%m%d-%H%M%S"))
    run_uri = join(as_uri(run.runs), run.name)
    _check_run_folder(run_uri, bool(run.resume))
    if not run.store.train:
        train_address, val_address = digits_stores()
        store = dataclasses.replace(run.store, train=train_address, val=run.store.val or val_address)
        run = dataclasses.replace(run, store=store)
    return dataclasses.replace(run, transform=run.transform.without_files()), run_uri


def spec_of(run: RunConfig, run_uri: str) -> StreamSpec:
    options = store_options(run.store.image_column, run.store.label_column, run.store.layout)
    return StreamSpec.of(
        open_store(run.store.train, **options),
        open_store(run.store.val, **options) if run.store.val else None,
        plan=run.plan,
        transform=run.transform,
        pool=run.pool,
        leave_out=run.store.leave_out,
        val_leave_out=run.store.val_leave_out,
        quarantine=join(run_uri, "quarantine"),
        run=run.name,
        log=run.log,
    )


def num_classes_of(run: RunConfig, spec: StreamSpec) -> int:
    """Classes of the classifier that a run trains."""
    if run.transform.target_columns:
        raise ConfigError(
            "a run trains a classifier, which has no use for transform.mask_column and transform.boxes_column: "
            "leave them out, or write a loop of your own around raypipe.feed, as docs/targets.md does"
        )
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


def check_augment(config: AugmentConfig) -> None:
    """What is wrong with it is told here, and not by the trainers once the cluster has started them."""
    if config.ops or config.preset != "none" or config.module:
        import torch

        from raypipe.augment import DeviceAugment

        DeviceAugment(config, torch.device("cpu"))


def _is_run(run_uri: str) -> bool:
    check_bucket(run_uri)
    with explained(ConfigError, f"{run_uri} cannot be used"):
        return exists(join(run_uri, "config.yaml"))


def _check_run_folder(run_uri: str, resume: bool) -> None:
    if resume:
        require_run(run_uri)
    elif _is_run(run_uri):
        raise ConfigError(f"there is a run at {run_uri} already: go on with it by --resume, or choose --name")


def require_run(run_uri: str) -> None:
    """Raise ConfigError unless there is a run at a URI."""
    if not _is_run(run_uri):
        raise ConfigError(f"there is no run at {run_uri}: expected is the folder that `run_dir` named")


def make_folder(run_uri: str) -> None:
    """Make the folder of a run, if it is not there."""
    with explained(ConfigError, f"{run_uri} cannot be written to"):
        filesystem, path = open_filesystem(run_uri)
        filesystem.create_dir(path, recursive=True)


def store_config(run: RunConfig, run_uri: str) -> None:
    make_folder(run_uri)
    write_text(join(run_uri, "config.yaml"), yaml.safe_dump(as_plain(run), sort_keys=False))


def as_plain(run: RunConfig) -> dict[str, Any]:
    """A configuration as dicts, lists and scalars, as YAML has it; `resume` left out."""
    plain = dataclasses.asdict(run)
    del plain["resume"]
    return json.loads(json.dumps(plain))  # tuples become lists


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
        f"transform  {run.pool.least_actors} to {allocation.max_actors} actors"
        f"{f' in {run.pool.executions} executions' if run.pool.executions > 1 else ''}"
    )


def _fit(
    run: RunConfig,
    spec: StreamSpec,
    allocation: Allocation,
    num_classes: int,
    run_uri: str,
    interrupts: Interrupts,
) -> dict[str, Any]:
    from ray.train.v2.api import config as ray_config

    from raypipe.train import train_loop
    from raypipe.trainer import RunTrainer

    def on_interrupt() -> None:
        request_stop(run_uri)
        progress(logger, "stopping at the next line of progress, with a checkpoint; once more aborts")

    filesystem, path = open_filesystem(run_uri)
    trainer = RunTrainer(
        train_loop,
        per_step=run.plan.per_step,
        timeout_s=run.pool.stall_timeout_s,
        interrupts=interrupts,
        on_interrupt=on_interrupt,
        train_loop_config={
            "run": run,
            "spec": spec,
            "num_classes": num_classes,
            "max_actors": allocation.max_actors,
            "run_uri": run_uri,
        },
        scaling_config=ray_config.ScalingConfig(
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
        run_config=ray_config.RunConfig(
            name=run.name,
            storage_path=path.rpartition("/")[0],
            storage_filesystem=filesystem,
            failure_config=ray_config.FailureConfig(max_failures=run.train.max_failures),
            checkpoint_config=ray_config.CheckpointConfig(num_to_keep=2),
            # Ray Train's controller knows text alone.
            logging_config=ray_config.LoggingConfig(log_level="WARNING" if run.log == "json" else "INFO"),
        ),
    )
    try:
        result = trainer.fit()
    except Exception as error:
        raise cause_of(error) from error
    return result.metrics or {}
