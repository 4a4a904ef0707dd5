"""Trainings side by side, as trials of Ray Tune: who gets what, who is stopped early, and what came of each."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from raypipe.config import RunConfig
from raypipe.errors import RaypipeError, ResourceError
from raypipe.failures import cause_of
from raypipe.rayext.cluster import Resources
from raypipe.storage.filesystem import open_filesystem

_ENV = {
    "RAY_AIR_NEW_OUTPUT": "0",  # tables of what the lines of progress say
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",  # epochs may be short
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # it does not say afterwards that there was a signal
}


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
    """Share out what a cluster has free between trainings with one worker each. Pure.

    There is one per GPU, or per CPU where there are none; all of them fit at one time, with their actors, so that
    no model waits for actors that wait for the CPUs of another model. Where CPUs are short the reservations
    shrink, and trainings take turns on the cores.

    Args:
        offer: what there is.
        run: what a training would have alone.
        most: trainings at one time.
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
    if run.pool.max_actors:
        actors = min(actors, run.pool.max_actors)
    return Share(concurrent, gpu, cpus, actors, per_actor)


@dataclass(frozen=True)
class Outcome:
    """Of one training.

    Attributes:
        number: its place in the list.
        epochs: that it was trained for.
        done: whether that is all of them.
        accuracy, loss: of the last validation.
        error: why it failed; empty = it did not.
    """

    number: int
    epochs: int
    done: bool
    accuracy: float
    loss: float
    error: str = ""


def train_all(
    folder: str,
    runs: list[RunConfig],
    names: list[str],
    share: Share,
    milestones: tuple[int, int, float] | None = None,
) -> list[Outcome]:
    """Train runs, and go on with those that an earlier call with the same folder has begun.

    Args:
        folder: URI of Ray Tune's records.
        runs: with `train.workers=1`.
        names: of the runs, for people.
        share: what each has.
        milestones: stop a run, after so many epochs of so many, and after each so many times as many, that is not
            among the best that have come there: (first, epochs, factor). None = all of them end by themselves.

    Raises:
        KeyboardInterrupt: after Ctrl-C or SIGTERM; what was begun is kept. A second one aborts.
    """
    os.environ.update(_ENV)
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    from raypipe.commands.trial import Progress, Trial

    filesystem, path = open_filesystem(folder)
    resources = {"CPU": share.cpus, **({"GPU": 1} if share.gpu else {})}
    trainable: Any = tune.with_resources(
        tune.with_parameters(Trial, runs=runs, max_actors=share.actors), resources
    )
    space = {"number": tune.grid_search(list(range(len(runs))))}
    if tune.Tuner.can_restore(path, storage_filesystem=filesystem):
        tuner = tune.Tuner.restore(
            path, trainable, resume_errored=True, param_space=space, storage_filesystem=filesystem
        )
    else:
        scheduler = None
        if milestones:
            first, epochs, factor = milestones
            scheduler = ASHAScheduler(
                time_attr="epochs",
                max_t=epochs,
                grace_period=first,
                reduction_factor=factor,
                stop_last_trials=False,
            )
        storage, _, name = path.rpartition("/")
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
                verbose=0,
                callbacks=[Progress(names)],
                failure_config=tune.FailureConfig(max_failures=runs[0].train.max_failures),
                checkpoint_config=tune.CheckpointConfig(num_to_keep=1, checkpoint_frequency=1),
            ),
        )
    with _stoppable() as stopped:
        results = tuner.fit()
    if stopped.is_set():
        raise KeyboardInterrupt
    return sorted((_outcome(results[i], runs) for i in range(len(results))), key=lambda outcome: outcome.number)


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


def _outcome(result: Any, runs: list[RunConfig]) -> Outcome:
    metrics, number = result.metrics or {}, result.config["number"]
    epochs = metrics.get("epochs", 0)
    return Outcome(
        number=number,
        epochs=epochs,
        done=epochs == runs[number].plan.epochs,  # Ray Tune calls those done as well that it has stopped
        accuracy=metrics.get("val_accuracy") or 0.0,
        loss=metrics.get("val_loss") or math.inf,
        error=_reason(result.error) if result.error else "",
    )


def _reason(error: Exception) -> str:
    """What is wrong, without the trace of how Ray came by it."""
    cause = cause_of(error)
    if isinstance(cause, RaypipeError):
        return f"{type(cause).__name__}: {cause}"
    return str(error).strip().splitlines()[-1]
