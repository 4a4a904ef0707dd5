"""Trainings side by side as trials of Ray Tune, each a whole run in the process of its trial.

A trial has one device and W = 1. What a run learns does not depend on W, so trials side by side are worth as much
as one trial after another on all devices, without their meetings.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.train.v2._internal.execution.train_fn_utils import LocalTrainFnUtils, set_train_fn_utils
from ray.tune.schedulers import ASHAScheduler

from raypipe.config import RunConfig
from raypipe.errors import RaypipeError, ResourceError
from raypipe.failures import cause_of
from raypipe.rayext.cluster import Resources
from raypipe.storage.filesystem import as_uri, join, open_filesystem
from raypipe.streaming.spec import spec_of
from raypipe.train.learning import num_classes_of
from raypipe.train.loop import Trainer
from raypipe.train.run_folder import store_config


class TrialSession(LocalTrainFnUtils):
    """Stands where Ray Train stands in a run: keeps what the loop reports, and has a folder for checkpoints."""

    def __init__(self) -> None:
        super().__init__(experiment_name="trial")
        self.metrics: dict[str, Any] = {}
        self.folder = tempfile.TemporaryDirectory(prefix="raypipe-trial-")

    def report(self, metrics: dict[str, Any], *_: Any, **__: Any) -> None:
        self.metrics = metrics


class Trial(tune.Trainable):
    """Trains one of `runs`, the one that its configuration has the `number` of; a step of it is an epoch.

    It is no function, since the loop reports to Ray Train, which Ray refuses within a function of Ray Tune's.
    """

    def setup(  # type: ignore[override]  # what `tune.with_parameters` gives
        self, config: dict[str, Any], runs: list[RunConfig], max_actors: int
    ) -> None:
        # It would tell of every checkpoint and every execution.
        for name in ("ray.train", "ray.data._internal.execution.streaming_executor"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self._run, self._max_actors = runs[config["number"]], max_actors
        self._session = TrialSession()
        self._trainer: Trainer | None = None

    def step(self) -> dict[str, Any]:
        # Without the loop's lines of progress: RUN/metrics.jsonl has them all.
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            if self._trainer is None:
                self._trainer = self._started()
                self._epochs = self._trainer.epochs()
            next(self._epochs)
            metrics = self._session.metrics
            # Not Tune's number of steps: what goes on from a checkpoint validates that once more.
            epochs = metrics["steps"] // self._trainer.plan.steps_per_epoch
            done = epochs == self._run.plan.epochs
            if done:
                next(self._epochs, None)  # to the end of the stream, and of the log
                self._trainer = None
        return {**metrics, "epochs": epochs, "done": done}

    def _started(self) -> Trainer:
        run, run_uri = self._run, join(as_uri(self._run.runs), self._run.name)
        spec = spec_of(run, run_uri)
        store_config(run, run_uri)
        set_train_fn_utils(self._session)
        # Ray hides the host's GPUs only from processes that have one of them.
        device = "" if ray.get_gpu_ids() else "cpu"
        checkpoints = Path(self._session.folder.name).as_uri()
        classes = num_classes_of(run, spec)
        return Trainer(run, spec, classes, self._max_actors, run_uri, device=device, checkpoints=checkpoints)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        shutil.copytree(self._session.folder.name, checkpoint_dir, dirs_exist_ok=True)

    def load_checkpoint(self, checkpoint: Any) -> None:
        self.cleanup()
        self._session = TrialSession()
        shutil.copytree(checkpoint, self._session.folder.name, dirs_exist_ok=True)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """The next trial, in the same process."""
        self.cleanup()
        self.setup(new_config)  # type: ignore[call-arg]  # `tune.with_parameters` gives the rest here too
        return True

    def cleanup(self) -> None:
        if self._trainer is not None:
            self._epochs.close()  # type: ignore[attr-defined]
            self._trainer.close()
            self._trainer = None
        self._session.folder.cleanup()


@dataclass(frozen=True)
class Share:
    """What each of the trainings that run at one time has.

    Attributes:
        concurrent: trainings at one time.
        gpu: whether each has a GPU.
        cpus: that Ray reserves for the model.
        actors: transform actors.
        cpus_per_actor: that Ray reserves for each of them.
    """

    concurrent: int
    gpu: bool
    cpus: float
    actors: int
    cpus_per_actor: float

    def __str__(self) -> str:
        return (
            f"{self.concurrent} at a time, each with {'a GPU and ' if self.gpu else ''}{self.cpus:g} CPUs and "
            f"{self.actors} transform actors of {self.cpus_per_actor:g} CPUs"
        )


def share_out(offer: Resources, run: RunConfig, most: int) -> Share:
    """Share out what a cluster has free between trainings with one worker each, `most` at one time. Pure.

    There is one per GPU, or per CPU where there are none; all of them fit at one time, with their actors, so that
    no model waits for actors that wait for the CPUs of another model. Where CPUs are short the reservations
    shrink, and trainings take turns on the cores.
    """
    gpu = run.train.gpu == "yes" or (run.train.gpu == "auto" and offer.gpus >= 1)
    concurrent = max(1, min(most, int(offer.free_gpus if gpu else offer.free_cpus)))
    cpus, per_actor = run.train.cpus_per_worker or 1.0, run.pool.cpus_per_actor
    whole = offer.free_cpus / concurrent
    least = cpus + run.pool.min_actors * per_actor
    if least > whole:
        cpus, per_actor = (math.floor(x * whole / least * 100) / 100 for x in (cpus, per_actor))
        if min(cpus, per_actor) <= 0:
            raise ResourceError(
                f"{concurrent} trainings at one time leave {whole:g} CPUs to each, too few for a model and "
                f"{run.pool.min_actors} transform actors: lower tune.max_concurrent or pool.min_actors"
            )
    actors = max(run.pool.min_actors, int((whole - cpus) / per_actor + 1e-9))
    return Share(concurrent, gpu, cpus, min(actors, run.pool.max_actors or actors), per_actor)


@dataclass(frozen=True)
class Outcome:
    """Of one training: its place in the list, epochs, whether that is all, its last validation, why it failed."""

    number: int
    epochs: int
    done: bool
    accuracy: float
    loss: float
    error: str = ""


def train_all(
    folder: str, runs: list[RunConfig], share: Share, scheduler: ASHAScheduler | None = None
) -> list[Outcome]:
    """Train runs, and go on with those that an earlier call with the same folder has begun.

    Args:
        folder: URI of Ray Tune's records.
        runs: with `train.workers=1`.
        share: what each has.
        scheduler: which stops some early, by "epochs"; None = all of them end by themselves.

    Raises:
        KeyboardInterrupt: after Ctrl-C or SIGTERM; what was begun is kept. A second one aborts.
    """
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # which takes no columns
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # it does not say afterwards that there was a signal
    filesystem, path = open_filesystem(folder)
    trainable: Any = tune.with_resources(
        tune.with_parameters(Trial, runs=runs, max_actors=share.actors),
        {"CPU": share.cpus, **({"GPU": 1} if share.gpu else {})},
    )
    space = {"number": tune.grid_search(list(range(len(runs))))}
    if tune.Tuner.can_restore(path, storage_filesystem=filesystem):
        tuner = tune.Tuner.restore(
            path, trainable, resume_errored=True, param_space=space, storage_filesystem=filesystem
        )
    else:
        storage, _, name = path.rpartition("/")
        columns = {"epochs": "epochs", "val_accuracy": "validation accuracy"}
        tuner = tune.Tuner(
            trainable,
            param_space=space,
            tune_config=tune.TuneConfig(
                metric="val_accuracy",
                mode="max",
                scheduler=scheduler,
                max_concurrent_trials=share.concurrent,
                reuse_actors=True,  # a process takes some seconds to start
            ),
            run_config=tune.RunConfig(
                name=name,
                storage_path=storage,
                storage_filesystem=filesystem,
                verbose=1,
                progress_reporter=tune.CLIReporter(metric_columns=columns, max_report_frequency=30),
                failure_config=tune.FailureConfig(max_failures=runs[0].train.max_failures),
                checkpoint_config=tune.CheckpointConfig(num_to_keep=1, checkpoint_frequency=1),
            ),
        )
    with _stoppable() as stopped:
        results = tuner.fit()
    if stopped.is_set():
        raise KeyboardInterrupt
    return sorted((outcome(results[i], runs) for i in range(len(runs))), key=lambda found: found.number)


@contextlib.contextmanager
def _stoppable() -> Iterator[threading.Event]:
    """Within, the first Ctrl-C or SIGTERM makes Ray Tune save its state and end; sets what it yields."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # signals are not for others
        yield stopped
        return
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)

    def stop(signum: int, frame: Any) -> None:
        for each, handler in before.items():
            signal.signal(each, handler)
        if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:  # Ray Tune has not begun
            raise KeyboardInterrupt
        stopped.set()
        os.kill(os.getpid(), signal.SIGUSR1)  # its own sign to end

    for signum in before:
        signal.signal(signum, stop)
    try:
        yield stopped
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def outcome(result: tune.Result, runs: list[RunConfig]) -> Outcome:
    """What came of a trial."""
    metrics, number = result.metrics or {}, (result.config or {})["number"]
    cause = cause_of(result.error) if result.error else None
    error = f"{type(cause).__name__}: {cause}" if isinstance(cause, RaypipeError) else str(result.error or "")
    return Outcome(
        number=number,
        epochs=metrics.get("epochs", 0),
        done=metrics.get("epochs", 0) == runs[number].plan.epochs,  # Ray Tune calls those done that it has stopped
        accuracy=metrics.get("val_accuracy") or 0.0,
        loss=metrics.get("val_loss") or math.inf,
        # Without the trace of how Ray came by it.
        error=error if isinstance(cause, RaypipeError) else (error.strip().splitlines() or [""])[-1],
    )
