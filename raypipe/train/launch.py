"""A whole run from its configuration: stores, plan, preflight, Ray Train, result; and how it is interrupted."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from typing import Any

import yaml

from raypipe.config import AugmentConfig, RunConfig, TrainConfig
from raypipe.failures import cause_of
from raypipe.logs import configure_logs, progress
from raypipe.lookup import import_name
from raypipe.pages.report import write_report
from raypipe.rayext.cluster import Allocation, check_elastic, connect, preflight
from raypipe.storage.files import read_json
from raypipe.storage.filesystem import is_remote, join, open_filesystem
from raypipe.streaming.maker import try_samples
from raypipe.streaming.pipeline import check_memory
from raypipe.streaming.spec import StreamSpec, spec_of
from raypipe.train.checkpoints import find_newest
from raypipe.train.learning import num_classes_of
from raypipe.train.run_folder import (
    FIGURES_FILE,
    as_plain,
    located,
    remove_stop,
    request_stop,
    stop_requested,
    store_config,
)
from raypipe.transform.jpeg import missing_extension

logger = logging.getLogger(__name__)

_RESIZE_EVERY_S = 60.0  # between two looks for room, where training is elastic


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
    with located(run) as (run, run_uri, lease):
        return _train(run, run_uri, lease)


def _train(run: RunConfig, run_uri: str, lease: str) -> dict[str, Any]:
    configure_logs(run.log, run=run.name)
    spec = spec_of(run, run_uri)
    num_classes = num_classes_of(run, spec)
    check_augment(run.augment)
    check_code(run.train)
    if not any(is_remote(store.address) for store in spec.stores.values()):  # else whole shards would be fetched
        try_samples(spec.plan, spec.stores, spec.transforms, spec.transform, num_classes)

    stop_was_asked = stop_requested(run_uri)  # of the run before it was stopped, and now goes on
    newest, passed_over = find_newest(run_uri, spec.plan.check)
    for name, reason in passed_over.items():
        progress(logger, f"not resumed from {name}: {reason}")
    if run.resume:
        progress(logger, f"resumed from {newest.name if newest else 'the beginning'}")
    with Interrupts() as interrupts:
        connect(log=run.log)
        interrupts.stand()
        allocation = preflight(run.pool, run.train, run.plan.per_step, interrupts.check)
        spec.plan.check_workers(allocation.workers)
        if allocation.min_workers:
            check_elastic()
        check_memory(spec, allocation.max_actors, allocation.workers)
        interrupts.check()
        # Nothing of an earlier start is changed before this line: all that can refuse this one has passed.
        if stop_was_asked:
            remove_stop(run_uri)
        store_config(run, run_uri)
        progress(logger, describe(run, spec, allocation, run_uri))
        loop = {"run": run, "spec": spec, "num_classes": num_classes, "max_actors": allocation.max_actors}
        try:
            result = _fit(loop | {"run_uri": run_uri, "lease": lease}, allocation, interrupts)
        finally:
            _leave_traces(run_uri)
    train_s = result["train_s"] or 1.0  # of a run that has not trained
    return {
        **{name: result[name] for name in ("val_accuracy", "steps", "stopped", "first_batch_s")},
        "images_per_s": result["images"] / train_s,
        "wait_fraction": result["wait_s"] / train_s,
        "run_dir": run_uri.removeprefix("file://"),
    }


def _leave_traces(run_uri: str) -> None:
    """Whatever becomes of the run."""
    try:
        remove_stop(run_uri)  # it was for this run, and not for one that resumes it
        page = write_report(run_uri)["report"]
        progress(logger, f"report     {page.removeprefix('file://')}")
    except Exception as error:  # the run has a result, or an error of its own, that must not hide behind this one
        logger.warning("no report: %s: %s", type(error).__name__, error)


def check_augment(config: AugmentConfig) -> None:
    """What is wrong with it is told here, and not by the trainers once the cluster has started them."""
    if config.ops or config.preset != "none" or config.module:
        import torch

        from raypipe.device.augment import DeviceAugment

        DeviceAugment(config, torch.device("cpu"))


def check_code(config: TrainConfig) -> None:
    """Raise ConfigError where a setting names a model or a function that there is not."""
    if config.model != "small":
        from raypipe.train.learning import check_model

        check_model(config.model)
    for name in ("loss", "optimizer", "schedule"):
        if ":" in (address := getattr(config, name)):
            import_name(address, f"train.{name}")


def _changed(settings: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Those that are not as they are by default, section by section."""
    changed = {}
    for name, value in settings.items():
        if isinstance(value, dict) and isinstance(defaults[name], dict):
            value = _changed(value, defaults[name])
            if not value:
                continue
        if value != defaults[name]:
            changed[name] = value
    return changed


def describe(run: RunConfig, spec: StreamSpec, allocation: Allocation, run_uri: str) -> str:
    """What is about to run, for people: the settings that are not the defaults, and what was derived from them."""
    plan = spec.plan
    left_out = sum(len(kept.left_out) for kept in plan.kept.values())
    slower = missing_extension()
    trainers = f"{allocation.workers} x {'GPU' if allocation.gpu else f'{allocation.cpus_per_worker:g} CPU'}"
    if allocation.min_workers:
        trainers = f"{allocation.min_workers} to {trainers}"
    if allocation.idle_gpus:
        all_gpus = allocation.workers + allocation.idle_gpus
        all_at_once = all_gpus * plan.config.micro_batch_size
        trainers += (
            f"\nidle GPUs  {allocation.idle_gpus} of {all_gpus}, since the number of workers must divide the "
            f"{plan.config.per_step} micro-batches of a step: set plan.global_batch_size to {all_at_once} or a "
            f"multiple of it, or train.num_workers={allocation.workers} if this is meant"
        )
    actors = f"{run.pool.least_actors} to {allocation.max_actors} actors"
    if run.pool.executions > 1:
        actors += f" in {run.pool.executions} executions"
    if run.pool.engine == "inline":
        actors = "in the trainers themselves (pool.engine=inline)"
    settings = _changed(as_plain(run), as_plain(RunConfig())) | {"name": run.name}
    return (
        f"{yaml.safe_dump(settings, sort_keys=False)}\n"
        f"run        {run_uri}, whose config.yaml has all settings\n"
        f"plan       {plan.fingerprint}: {plan.config.epochs} epochs of {plan.steps_per_epoch} steps of "
        f"{plan.config.per_step} x {plan.config.micro_batch_size} = {plan.global_batch_size} samples "
        f"({plan.num_train} train, {plan.num_val} val"
        f"{f'; {left_out} left out' if left_out else ''})\n"
        f"trainers   {trainers}\n"
        f"transform  {actors}" + (f"\nslower     {slower}" if slower else "")
    )


def _fit(loop: dict[str, Any], allocation: Allocation, interrupts: Interrupts) -> dict[str, Any]:
    """Train on the resources that were allocated; `loop` has the arguments of `raypipe.train.loop.Trainer`."""
    from ray.train.v2.api import config as ray_config

    from raypipe.rayext.trainer import RunTrainer
    from raypipe.train.loop import train_loop

    run, run_uri = loop["run"], loop["run_uri"]

    def on_interrupt() -> None:
        request_stop(run_uri)
        progress(logger, "stopping at the next line of progress, with a checkpoint; once more aborts")

    sizes: dict[str, Any] = {"num_workers": allocation.workers}
    if allocation.min_workers:
        allowed = (allocation.min_workers, allocation.workers)
        sizes = {"num_workers": allowed, "elastic_resize_monitor_interval_s": _RESIZE_EVERY_S}
    of_logs: dict[str, Any] = {}
    if run.log == "json" and hasattr(ray_config, "LoggingConfig"):  # Ray Train's controller knows text alone
        of_logs["logging_config"] = ray_config.LoggingConfig(log_level="WARNING")
    filesystem, path = open_filesystem(run_uri)
    trainer = RunTrainer(
        train_loop,
        per_step=run.plan.per_step,
        timeout_s=run.pool.stall_timeout_s,
        take_signals=lambda: interrupts.hand_over(on_interrupt),
        train_loop_config=loop,
        scaling_config=ray_config.ScalingConfig(
            **sizes,
            use_gpu=allocation.gpu,
            resources_per_worker={"CPU": allocation.cpus_per_worker},  # and a GPU, with `use_gpu`
        ),
        run_config=ray_config.RunConfig(
            name=run.name,
            storage_path=f"{path}/ray",  # of its own: which checkpoints a run has, its folder says
            storage_filesystem=filesystem,
            failure_config=ray_config.FailureConfig(max_failures=run.train.max_failures),
            **of_logs,
        ),
    )
    try:
        trainer.fit()
    except Exception as error:
        raise cause_of(error) from error
    return read_json(join(run_uri, FIGURES_FILE))


class Interrupts:
    """Ctrl-C and SIGTERM (`ray job stop`) of a run: the first asks it to end, the second aborts it.

    A first signal within this context is never lost: nothing is raised where Ray would swallow it. In another
    thread than the main one it does nothing: signals are not for others.
    """

    def __init__(self) -> None:
        self._asked = False
        self._request: Callable[[], None] | None = None
        self._seconds: dict[int, Any] = {}  # what a second signal gets

    def __enter__(self) -> Interrupts:
        self._at_first = signal.getsignal(signal.SIGINT)
        self.stand()
        return self

    def __exit__(self, *error: object) -> None:
        if self._seconds:
            signal.signal(signal.SIGINT, self._at_first)
            # Ray's, if it was started within; it ends Ray's processes.
            signal.signal(signal.SIGTERM, self._seconds[signal.SIGTERM])

    def stand(self) -> None:
        """Take the place of handlers that Ray has set since."""
        if self._asked or threading.current_thread() is not threading.main_thread():
            return
        for signum in (signal.SIGINT, signal.SIGTERM):
            if (handler := signal.getsignal(signum)) != self._interrupted:
                self._seconds[signum] = handler
                signal.signal(signum, self._interrupted)

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was a signal."""
        if self._asked:
            raise KeyboardInterrupt

    def hand_over(self, request: Callable[[], None]) -> None:
        """From now on the run can be asked to end by itself, and is, if there was a signal already."""
        self._request = request
        self.stand()
        if self._asked:
            request()

    def _interrupted(self, signum: int, frame: Any) -> None:
        self._asked = True
        for each, handler in self._seconds.items():
            signal.signal(each, handler)
        if self._request is not None:
            self._request()
        else:
            progress(logger, "stopping before the trainers are started; once more aborts")
