"""Launch of a run from its configuration: stores, plan, preflight, Ray Train, result."""

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

import pyarrow as pa

from raypipe.config import RunConfig
from raypipe.errors import (
    ConfigError,
    CursorError,
    OutageError,
    RaypipeError,
    RunError,
    without_credentials,
)
from raypipe.importing import own_code
from raypipe.launch.interrupts import Interrupts, Stopped
from raypipe.launch.run_checks import (
    check_augment,
    check_code,
    check_continues,
    num_classes_of,
)
from raypipe.launch.run_folder import (
    ERROR_FILE,
    FIGURES_FILE,
    as_plain,
    located,
    remove_error,
    store_config,
    write_error,
)
from raypipe.launch.summary import changes, flattened, summarize
from raypipe.logs import configure_logs
from raypipe.progress import end_phases, phase, phases, print_progress
from raypipe.rayext.allocation import Allocation, preflight
from raypipe.rayext.cluster import connect
from raypipe.rayext.cluster_state import started_here
from raypipe.rayext.failures import cause_of, explanation
from raypipe.rayext.head import is_head_lost
from raypipe.rayext.startup import Wait, only_start
from raypipe.rayext.worker_logs import await_progress, begin_progress
from raypipe.storage.files import read_json
from raypipe.storage.filesystem import is_remote, join_address, open_filesystem
from raypipe.storage.retries import allow_retries
from raypipe.streaming.maker import try_samples
from raypipe.streaming.opening import spec_of
from raypipe.streaming.saving.checkpoints import Checkpoint, find_newest, newest_name
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.stop_file import (
    remove_stop,
    request_stop,
    stop_answered,
    stop_requested,
)

logger = logging.getLogger(__name__)

_RESIZE_EVERY_S = 60.0  # period in which elastic training checks for more resources


def launch(run: RunConfig, *, until: str = "") -> dict[str, Any]:
    """Train with a configuration, on the connected cluster or on a new local one.

    After Ctrl-C or SIGTERM (`ray job stop`), to this process or to its group, the run ends with a checkpoint after
    the current step, or without one if the step takes longer than `train.stop_grace_s`. A second signal aborts the
    run. During the start, the run ends before it starts the trainers.

    Args:
        until: file of the run's folder with which the run stops, and is not to be continued; empty = none.

    Returns:
        `val_accuracy` (None without validation), `val_NAME` for each name of `train.metrics`, `images_per_s`,
        `wait_fraction`, `steps`, `run_dir`, `first_batch_s`, and `stopped`: whether it was stopped on request,
        before its last step.

    Raises:
        RaypipeError: an error in the configuration, a store, the cluster or the run.
        KeyboardInterrupt: the run was stopped before its trainers started, or finished no step in time; `Stopped`
            if it has a checkpoint.
    """
    try:
        with located(run) as (run, run_uri, lease):
            try:
                return _train(run, run_uri, lease, until)
            except KeyboardInterrupt as interrupt:
                if _newest_name(run_uri) != "":
                    raise Stopped from interrupt
                raise
    finally:
        end_phases()
        allow_retries()  # the process may go on, as a notebook's does


def _train(run: RunConfig, run_uri: str, lease: str, until: str) -> dict[str, Any]:
    configure_logs(run.log_format, run=run.name)
    spec, num_classes = _checked(run, run_uri)
    stop_was_asked = stop_requested(run_uri)  # an old request, from before this resume
    newest = _newest(run, run_uri, spec, num_classes)
    if newest and _has_ended(spec, newest):
        print_progress(
            logger,
            f"this run has already ended, with {newest.name}: nothing left to do",
        )
        _withdraw_stop(run_uri)  # its process may have been killed before this
        return _result(newest.metrics | {"stopped": False}, run_uri)
    with (
        Interrupts(run.train.stop_grace_s) as interrupts,
        contextlib.ExitStack() as starting,
    ):
        allocation, start = _allocated(run, spec, interrupts, starting)
        # No file of an earlier start is changed before this line, where all checks have passed, except that of
        # state.pt, which only the trainers read.
        if stop_was_asked:
            remove_stop(run_uri)
        store_config(run, run_uri)
        remove_error(run_uri)
        print_progress(logger, summarize(run, spec, allocation, run_uri))
        phase(
            logger,
            f"starting {allocation.workers} trainer{'s' if allocation.workers > 1 else ''}",
        )
        relays = begin_progress() and run.log_format == "text"
        loop = {
            "run": run,
            "spec": spec,
            "num_classes": num_classes,
            "max_actors": allocation.max_actors,
            "run_uri": run_uri,
            "lease": lease,
            "start": start,
            "phases": phases(),
            "relays": relays,
            "until": until,
        }
        try:
            result = _fit(loop, allocation, interrupts)
            if relays:
                await_progress()
            if result["stopped"] and not until:
                print_progress(logger, _how_to_continue(run, run_uri))
        except KeyboardInterrupt as interrupt:
            if interrupts.reason:
                reason = f"{interrupts.reason}: restart the cluster, then continue with: {_command(run, run_uri)}"
                _record_error(run_uri, reason)
                raise RunError(reason) from interrupt
            print_progress(logger, _how_to_continue(run, run_uri))
            raise
        finally:
            _withdraw_stop(run_uri)
    return _result(result, run_uri)


def _checked(run: RunConfig, run_uri: str) -> tuple[StreamSpec, int]:
    """Return a run's stream and number of classes, with all checks that need no Ray."""
    phase(logger, "reading the stores")
    spec = spec_of(run, run_uri)
    num_classes = num_classes_of(run, spec)
    check_augment(run.augment, spec.device_input)
    check_code(run.train, len(run.augment.mean))
    if not any(is_remote(store.address) for store in spec.stores.values()):
        # this would fetch whole shards
        try_samples(spec, num_classes)
    return spec, num_classes


def _newest(
    run: RunConfig, run_uri: str, spec: StreamSpec, num_classes: int
) -> Checkpoint | None:
    """Return the checkpoint that a run continues from, if any; the trainers log why newer ones are skipped.

    Raises:
        RaypipeError: the settings, or the code of the model, do not fit it.
    """
    changed = changes(run, run_uri) if run.resume else ""
    find = functools.partial(
        find_newest, run_uri, spec.plan.check, start_from=run.train.start_from
    )
    try:
        newest, _ = find(with_state=True)
        if newest and not _has_ended(spec, newest):
            check_continues(run, num_classes, newest)
    except CursorError as error:
        raise CursorError(f"{error}{changed and f'. Changed: {changed}'}") from error
    if run.resume:
        start = newest.name if newest else "the beginning"
        print_progress(logger, f"resumed from {start}{changed and f', with {changed}'}")
    elif newest:
        print_progress(logger, f"starting from {newest.address}")
    return newest and newest._replace(state=b"")


def _allocated(
    run: RunConfig,
    spec: StreamSpec,
    interrupts: Interrupts,
    starting: contextlib.ExitStack,
) -> tuple[Allocation, Any]:
    """Connect to Ray, and allocate resources; also return the actor that keeps other runs from starting."""
    wait = functools.partial(
        Wait, run.pool.stall_timeout_s, interrupts.check, "pool.stall_timeout_s"
    )
    phase(
        logger,
        "connecting to Ray"
        if os.environ.get("RAY_ADDRESS")
        else "starting Ray on this machine",
    )
    connect(log_format=run.log_format, wait=wait())
    interrupts.stand()
    interrupts.check()
    if started_here():
        start = None
    else:
        start = starting.enter_context(only_start(wait(), run.name))
    tell = start.tell.remote if start else lambda text: None
    allocation = preflight(run.pool, run.train, run.plan.per_step, wait(tell=tell))
    spec.plan.check_workers(allocation.workers)
    interrupts.check()
    return allocation, start


def _has_ended(spec: StreamSpec, newest: Checkpoint | None) -> bool:
    """Return whether a run's newest checkpoint is its last, not another run's, which has no metrics here."""
    return (
        newest is not None
        and newest.metrics != {}
        and next(spec.plan.segments(newest.cursor), None) is None
    )


def _result(figures: dict[str, Any], run_uri: str) -> dict[str, Any]:
    """Return the result of `train` from the figures of a run."""
    train_s = figures["train_s"] or 1.0  # 0 if the run has not trained
    return {
        **{
            name: value
            for name, value in figures.items()
            if name.startswith("val_") and name not in ("val_loss", "val_samples")
        },
        **{name: figures[name] for name in ("steps", "stopped", "first_batch_s")},
        "images_per_s": figures["images"] / train_s,
        "wait_fraction": figures["wait_s"] / train_s,
        "run_dir": run_uri.removeprefix("file://"),
    }


def _how_to_continue(run: RunConfig, run_uri: str) -> str:
    """Return the message for a stopped run: its checkpoint, and the command to continue."""
    checkpoint = _newest_name(run_uri)
    state = f"stopped with {checkpoint}"
    if checkpoint is None:
        state = (
            "stopped while storage does not answer, so the newest checkpoint is unknown"
        )
    elif not checkpoint:
        state = "stopped before the first checkpoint"
    return f"{state}. Continue with: {_command(run, run_uri)}"


def _newest_name(run_uri: str) -> str | None:
    """Return the name of a run's newest checkpoint; "" = there is none, None = storage does not tell."""
    try:
        return newest_name(run_uri)
    except (RaypipeError, OSError, pa.ArrowException) as error:
        logger.warning(
            "cannot look for checkpoints: %s: %s", type(error).__name__, error
        )
        return None


def _command(run: RunConfig, run_uri: str) -> str:
    """Return the command that resumes a run."""
    if Path(sys.argv[0]).name == "train.py":
        command = "jobs/train.py"
    else:
        command = "raypipe train"
    word = " --trust-run-code" if any(own_code(flattened(as_plain(run)))) else ""
    return f"{command} --resume {shlex.quote(run_uri.removeprefix('file://'))}{word}"


def _withdraw_stop(run_uri: str) -> None:
    """Remove the stop request, after any end of a run: it must not stop a resume."""
    try:
        remove_stop(run_uri)
    except (RaypipeError, pa.ArrowException, OSError) as error:
        # it must not hide the run's result or error
        logger.warning(
            "cannot remove the request to stop: %s: %s", type(error).__name__, error
        )


def _fit(
    loop: dict[str, Any], allocation: Allocation, interrupts: Interrupts
) -> dict[str, Any]:
    """Train on the allocated resources; `loop` has the arguments of `raypipe.train.loop.Trainer`."""
    from raypipe.launch.train_function import train_loop
    from raypipe.rayext.trainer import RunTrainer, ray_config

    run = loop["run"]
    run_uri = loop["run_uri"]

    def on_interrupt() -> None:
        print_progress(
            logger, "stopping with a checkpoint; press Ctrl-C again to abort"
        )
        request_stop(run_uri)

    sizes: dict[str, Any] = {"num_workers": allocation.workers}
    if allocation.min_workers:
        allowed = (allocation.min_workers, allocation.workers)
        sizes = {
            "num_workers": allowed,
            "elastic_resize_monitor_interval_s": _RESIZE_EVERY_S,
        }
    failures = {"max_failures": run.train.max_failures}
    if hasattr(ray_config.FailureConfig, "max_preemption_failures"):
        failures[
            "max_preemption_failures"
        ] = -1  # a node that goes with notice has no fault
    filesystem, path = open_filesystem(run_uri)
    trainer = RunTrainer(
        train_loop,
        per_step=run.plan.per_step,
        run_uri=run_uri,
        log_format=run.log_format,
        timeout_s=run.pool.stall_timeout_s,
        take_signals=lambda: interrupts.hand_over(
            on_interrupt, lambda: stop_answered(run_uri)
        ),
        give_up=interrupts.give_up,
        train_loop_config=loop,
        scaling_config=ray_config.ScalingConfig(
            **sizes,
            use_gpu=allocation.gpu,
            resources_per_worker={
                "CPU": allocation.cpus_per_worker
            },  # `use_gpu` adds a GPU
        ),
        run_config=ray_config.RunConfig(
            name=run.name,
            storage_path=f"{path}/ray",  # a folder for Ray Train, which does not manage the run's checkpoints
            storage_filesystem=filesystem,
            failure_config=ray_config.FailureConfig(**failures),
            # raypipe's phases and policies log the work of the controller.
            logging_config=ray_config.LoggingConfig(log_level="WARNING"),
        ),
    )
    try:
        trainer.fit()
    except Exception as error:
        raise _as_run_error(error, run, run_uri) from error
    return read_json(join_address(run_uri, FIGURES_FILE))


def _as_run_error(error: Exception, run: RunConfig, run_uri: str) -> RaypipeError:
    """Return the error of a failed run, and leave it in its folder: raypipe's own, or one with a traceback."""
    cause: BaseException = cause_of(error)
    if not isinstance(cause, RaypipeError) and is_head_lost():
        cause = RunError(
            f"the head of the Ray cluster no longer answers ({explanation(error)}): restart the cluster, then "
            f"continue with: {_command(run, run_uri)}"
        )
    if isinstance(cause, RaypipeError):
        _record_error(run_uri, str(cause))
        return cause
    problem = _record_error(
        run_uri, f"{explanation(error)}\n\n{''.join(traceback.format_exception(error))}"
    )
    address = join_address(run_uri, ERROR_FILE).removeprefix("file://")
    if problem:
        hint = f"traceback lost: {problem}"
    else:
        hint = f"traceback: {address}"
    return RunError(f"{explanation(error)} ({hint})")


def _record_error(run_uri: str, text: str) -> str:
    """Leave an error in the run's folder, for `raypipe status`; return why it cannot be written, if so."""
    try:
        write_error(run_uri, without_credentials(text))
    except (ConfigError, OutageError) as error:
        return str(error)
    return ""
