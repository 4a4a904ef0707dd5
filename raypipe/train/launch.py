"""A whole run from its configuration: stores, plan, preflight, Ray Train, result."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shlex
import sys
import traceback
from pathlib import Path
from typing import Any

from raypipe.config import AugmentConfig, RunConfig
from raypipe.errors import ConfigError, CursorError, OutageError, RaypipeError, RunError
from raypipe.logs import begin_phases, configure_logs, end_phases, phase, progress
from raypipe.metrics.records import METRICS
from raypipe.pages.report import write_report
from raypipe.rayext.allocation import Allocation, check_elastic, preflight
from raypipe.rayext.cluster import connect, started_here
from raypipe.rayext.failures import cause_of, explanation
from raypipe.rayext.waiting import Wait, is_head_lost, only_start
from raypipe.storage.files import read_json, write_text
from raypipe.storage.filesystem import exists, is_remote, join, open_filesystem
from raypipe.streaming.checkpoints import Checkpoint, find_newest, newest_name
from raypipe.streaming.maker import differing, try_samples
from raypipe.streaming.opening import spec_of
from raypipe.streaming.pipeline import check_memory
from raypipe.streaming.spec import StreamSpec
from raypipe.train.console import RunConsole, changes, describe
from raypipe.train.interrupts import Interrupts, Stopped
from raypipe.train.models import check_code, num_classes_of
from raypipe.train.run_folder import (
    FIGURES_FILE,
    located,
    remove_stop,
    request_stop,
    stop_answered,
    stop_requested,
    store_config,
)

logger = logging.getLogger(__name__)

_ERROR_FILE = "error.txt"

_RESIZE_EVERY_S = 60.0  # between two looks for room, where training is elastic


def train(run: RunConfig) -> dict[str, Any]:
    """Train by a configuration, on the connected cluster or on a new local one.

    At Ctrl-C or SIGTERM (`ray job stop`), be it sent to this process or to its group, the run ends within ten
    seconds: with a checkpoint after a step of the next seconds, or, where there is none, without. A second one
    aborts it. While the run starts, it ends before the trainers do.

    Returns:
        `val_accuracy` (None without validation), `images_per_s`, `wait_fraction`, `steps`, `run_dir`,
        `first_batch_s`, and `stopped`: whether it was ended before its last step, on request.

    Raises:
        RaypipeError: what is wrong with the configuration, a store, the cluster or the run.
        KeyboardInterrupt: it was asked to end before its trainers were started, or has done no step in time;
            `Stopped` where it has a checkpoint.
    """
    try:
        with located(run) as (run, run_uri, lease):
            try:
                return _train(run, run_uri, lease)
            except KeyboardInterrupt as interrupt:
                if newest_name(run_uri):
                    raise Stopped from interrupt
                raise
    finally:
        end_phases()


def _train(run: RunConfig, run_uri: str, lease: str) -> dict[str, Any]:
    configure_logs(run.log_format, run=run.name)
    spec, num_classes = _checked(run, run_uri)
    stop_was_asked = stop_requested(run_uri)  # of the run before it was stopped, and now goes on
    newest = _newest(run, run_uri, spec)
    if newest and _has_ended(spec, newest):
        progress(logger, f"this run has ended already, with {newest.name}: nothing is left to do")
        _leave_traces(run_uri)  # its process may have been killed before it did
        return _result(newest.metrics | {"stopped": False}, run_uri)
    with Interrupts() as interrupts, contextlib.ExitStack() as starting:
        allocation, start = _allocated(run, spec, interrupts, starting)
        # Nothing of an earlier start is changed before this line: all that can refuse this one has passed, but for
        # the content of state.pt, which is read once, by the trainers.
        if stop_was_asked:
            remove_stop(run_uri)
        store_config(run, run_uri)
        progress(logger, describe(run, spec, allocation, run_uri))
        phase(logger, f"starting {allocation.workers} trainer{'s' if allocation.workers > 1 else ''}")
        loop = {"run": run, "spec": spec, "num_classes": num_classes, "max_actors": allocation.max_actors}
        loop |= {"run_uri": run_uri, "lease": lease, "start": start, "begun": begin_phases()}
        console = RunConsole(spec.plan.steps_per_epoch, spec.plan.has_val, relays=run.log_format == "text")
        try:
            with console:
                result = _fit(loop | {"relays": console.relays}, allocation, interrupts)
            if result["stopped"]:
                progress(logger, _how_to_go_on(run_uri))
        except KeyboardInterrupt:
            progress(logger, _how_to_go_on(run_uri))
            raise
        finally:
            _leave_traces(run_uri)
    return _result(result, run_uri)


def _checked(run: RunConfig, run_uri: str) -> tuple[StreamSpec, int]:
    """The stream and the number of classes of a run; what is wrong with either is told before Ray starts."""
    phase(logger, "reading the stores")
    spec = spec_of(run, run_uri)
    num_classes = num_classes_of(run, spec)
    check_augment(run.augment)
    check_code(run.train, len(run.augment.mean))
    if not any(is_remote(store.address) for store in spec.stores.values()):  # else whole shards would be fetched
        sizes = try_samples(spec, num_classes, channels=len(run.augment.mean))
        if words := differing(spec.transform, spec.transforms, sizes):
            progress(logger, words)
    return spec, num_classes


def _newest(run: RunConfig, run_uri: str, spec: StreamSpec) -> Checkpoint | None:
    """The checkpoint that a run goes on from, if any; the trainers tell why newer ones are passed over."""
    changed = changes(run, run_uri) if run.resume else ""
    find = functools.partial(find_newest, run_uri, spec.plan.check, start_from=run.train.start_from)
    try:
        newest, _ = find()
        if _has_ended(spec, newest):  # no trainer will read the state
            newest, _ = find(with_state=True)
    except CursorError as error:
        raise CursorError(f"{error}{changed and f'. Changed: {changed}'}") from error
    if run.resume:
        where = newest.name if newest else "the beginning"
        progress(logger, f"resumed from {where}{changed and f', with {changed}'}")
    elif newest:
        progress(logger, f"starts from {newest.address}")
    return newest


def _allocated(
    run: RunConfig, spec: StreamSpec, interrupts: Interrupts, starting: contextlib.ExitStack
) -> tuple[Allocation, Any]:
    """Connect to Ray, and share out its cluster; also returns the actor that keeps other runs from starting."""
    wait = functools.partial(Wait, run.train.start_timeout_s, interrupts.check, "train.start_timeout_s")
    phase(logger, "connecting to Ray" if os.environ.get("RAY_ADDRESS") else "starting Ray on this machine")
    connect(log_format=run.log_format, wait=wait())
    interrupts.stand()
    interrupts.check()
    start = None if started_here() else starting.enter_context(only_start(wait()))
    allocation = preflight(run.pool, run.train, run.plan.per_step, wait())
    spec.plan.check_workers(allocation.workers)
    if allocation.min_workers:
        check_elastic()
    check_memory(spec, allocation.max_actors, allocation.workers)
    interrupts.check()
    return allocation, start


def _has_ended(spec: StreamSpec, newest: Checkpoint | None) -> bool:
    """Whether a run's newest checkpoint is its last; one that it starts from is another run's, without figures."""
    return newest is not None and newest.metrics != {} and next(spec.plan.segments(newest.cursor), None) is None


def _result(figures: dict[str, Any], run_uri: str) -> dict[str, Any]:
    """What `train` returns, of the figures of a run."""
    train_s = figures["train_s"] or 1.0  # of a run that has not trained
    return {
        **{name: figures[name] for name in ("val_accuracy", "steps", "stopped", "first_batch_s")},
        "images_per_s": figures["images"] / train_s,
        "wait_fraction": figures["wait_s"] / train_s,
        "run_dir": run_uri.removeprefix("file://"),
    }


def _how_to_go_on(run_uri: str) -> str:
    """What a run that was stopped has kept."""
    kept = newest_name(run_uri)
    where = f"its last checkpoint is {kept}" if kept else "before its first checkpoint"
    return f"stopped; {where}. Go on by: {_command(run_uri)}"


def _command(run_uri: str) -> str:
    """It resumes a run."""
    command = "jobs/train.py" if Path(sys.argv[0]).name == "train.py" else "raypipe train"
    return f"{command} --resume {shlex.quote(run_uri.removeprefix('file://'))}"


def _leave_traces(run_uri: str) -> None:
    """Whatever becomes of the run."""
    try:
        remove_stop(run_uri)  # it was for this run, and not for one that resumes it
        if not exists(join(run_uri, METRICS)):  # it has not begun to train
            return
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


def _fit(loop: dict[str, Any], allocation: Allocation, interrupts: Interrupts) -> dict[str, Any]:
    """Train on the resources that were allocated; `loop` has the arguments of `raypipe.train.loop.Trainer`."""
    from ray.train.v2.api import config as ray_config

    from raypipe.rayext.trainer import RunTrainer
    from raypipe.train.loop import train_loop

    run, run_uri = loop["run"], loop["run_uri"]

    def on_interrupt() -> None:
        progress(logger, "stopping with a checkpoint; once more aborts")
        request_stop(run_uri)

    sizes: dict[str, Any] = {"num_workers": allocation.workers}
    if allocation.min_workers:
        allowed = (allocation.min_workers, allocation.workers)
        sizes = {"num_workers": allowed, "elastic_resize_monitor_interval_s": _RESIZE_EVERY_S}
    of_logs: dict[str, Any] = {}
    if hasattr(ray_config, "LoggingConfig"):  # what Ray Train's controller does is told by the phases, and by ours
        of_logs["logging_config"] = ray_config.LoggingConfig(log_level="WARNING")
    failures = {"max_failures": run.train.max_failures}
    if hasattr(ray_config.FailureConfig, "max_preemption_failures"):
        failures["max_preemption_failures"] = run.train.max_preemption_failures
    filesystem, path = open_filesystem(run_uri)
    trainer = RunTrainer(
        train_loop,
        per_step=run.plan.per_step,
        run_uri=run_uri,
        log_format=run.log_format,
        timeout_s=run.pool.stall_timeout_s,
        take_signals=lambda: interrupts.hand_over(on_interrupt, lambda: stop_answered(run_uri)),
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
            failure_config=ray_config.FailureConfig(**failures),
            **of_logs,
        ),
    )
    try:
        trainer.fit()
    except Exception as error:
        raise _as_run_error(error, run_uri) from error
    return read_json(join(run_uri, FIGURES_FILE))


def _as_run_error(error: Exception, run_uri: str) -> RaypipeError:
    """What has ended a run: an error of ours as it is; any other as its message alone, and the rest in a file."""
    cause = cause_of(error)
    if isinstance(cause, RaypipeError):
        return cause
    if is_head_lost():
        return RunError(
            f"the head of the Ray cluster does not answer any more ({explanation(error)}): start the cluster "
            f"again, then go on by: {_command(run_uri)}"
        )
    where = join(run_uri, _ERROR_FILE)
    try:
        write_text(where, "".join(traceback.format_exception(error)))
        rest = f"its traceback is in {where.removeprefix('file://')}"
    except (ConfigError, OutageError) as unwritten:
        rest = f"its traceback is lost: {unwritten}"
    return RunError(f"{explanation(error)} ({rest})")
