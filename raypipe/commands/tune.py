"""The parts of `jobs/tune.py`: augmentation policies, and trainings as trials of Ray Tune.

A policy is the CPU transform of training and the augmentation, normalisation apart; here it is a run with them.
The policies of a search are drawn by its seed alone, before it begins: nothing of how it goes changes the list.

A trial is a whole run in a process of its own, with one device and W = 1. What a run learns does not depend on W,
so trials side by side are worth as much as one after another on all devices, without their meetings.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from jsonargparse.typing import NonNegativeInt, restricted_number_type
from ray import tune
from ray.train.v2._internal.execution.train_fn_utils import LocalTrainFnUtils, set_train_fn_utils
from ray.tune.schedulers import ASHAScheduler

from raypipe.config import AugmentConfig, RunConfig, StrengthConfig
from raypipe.device.augment import PRESETS
from raypipe.errors import RaypipeError, ResourceError
from raypipe.failures import cause_of
from raypipe.rayext.cluster import Allocation, Resources, allocate
from raypipe.storage.filesystem import as_uri, join, open_filesystem
from raypipe.streaming.spec import spec_of
from raypipe.train.learning import num_classes_of
from raypipe.train.loop import Trainer
from raypipe.train.run_folder import store_config
from raypipe.transform.transform_steps import brief, without_files

AtLeast2: Any = restricted_number_type("AtLeast2", int, (">=", 2))

# What is drawn for each policy, beside its operations. Alphas of the papers are 0.1 to 1, on a scale of ratios.
_SPACE: dict[str, Any] = {
    "mixing": tune.choice([(), (), ("mixup_alpha",), ("cutmix_alpha",), ("mixup_alpha", "cutmix_alpha")]),
    "alpha": tune.qloguniform(0.1, 1, 0.01),
    "strength": tune.choice([0.4, 0.7, 1.0]),
}


@dataclass(frozen=True)
class TuneConfig:
    """A search for an augmentation policy.

    Attributes:
        trials: policies to try, of which the first are the run's own and none at all.
        epochs: of a trial; 0 = half of plan.epochs. None is stopped in its first half: what is strong starts slow.
        repeats: seeds with which the best policy and the run's own are compared in the end.
        final_val: store on which they are compared, of samples that the search has not seen; empty = store.val.
        transforms: CPU transforms of training to choose from, beside transform.train, each as that may be.
        seed: of the list of policies; plan.seed is that of all trials.
        max_concurrent: trials at one time; 0 = as many as GPUs, or where there are none CPUs, have room for.
    """

    trials: AtLeast2 = 12
    epochs: NonNegativeInt = 0
    repeats: AtLeast2 = 3  # two seeds have a spread
    final_val: str = ""
    transforms: list[str | list[dict[str, Any]]] = field(default_factory=list)
    seed: NonNegativeInt = 0
    max_concurrent: NonNegativeInt = 0


def policies(settings: TuneConfig, run: RunConfig) -> list[RunConfig]:
    """The policies that a search tries: the run's own, none, and what is drawn; all normalise as the run does."""
    nothing = replace(run, augment=AugmentConfig(mean=run.augment.mean, std=run.augment.std))
    found: list[RunConfig] = []
    for policy in itertools.chain([run, nothing], _drawn(settings, run, nothing.augment)):
        if policy not in found:
            found.append(policy)
        if len(found) == settings.trials:
            break
    return found


def _drawn(settings: TuneConfig, run: RunConfig, plain: AugmentConfig) -> Iterator[RunConfig]:
    """Policies without end; each set of operations comes once before one comes again."""
    rng = np.random.default_rng(settings.seed)
    transforms = [run.transform.train, *map(without_files, settings.transforms)]
    own = replace(plain, preset=run.augment.preset, ops=run.augment.ops, module=run.augment.module)
    sets = [plain, *([own] if own != plain else [])]
    for name, ops in PRESETS.items():
        if ops:
            # Digits and letters are others when they are flipped.
            unflipped = [dict(entry) for entry in ops if entry["op"] != "RandomHorizontalFlip"]
            sets.append(replace(plain, preset=name))  # type: ignore[arg-type]
            sets += [replace(plain, ops=unflipped)] if unflipped else []
    while True:
        for operations in rng.permutation(np.array(sets, object)):
            drawn = {name: domain.sample(random_state=rng) for name, domain in _SPACE.items()}
            mixing: dict[str, Any] = dict.fromkeys(drawn["mixing"], drawn["alpha"])
            if mixing or operations != plain:  # else there is nothing to be strong
                augment = replace(operations, strength=StrengthConfig(peak=drawn["strength"]), **mixing)
                transform = replace(run.transform, train=transforms[int(rng.integers(len(transforms)))])
                yield replace(run, transform=transform, augment=augment)


def told(policy: RunConfig) -> str:
    """A policy for people: what it is beside the defaults, operations by their names."""
    default = asdict(AugmentConfig(mean=policy.augment.mean, std=policy.augment.std))
    found = {name: value for name, value in asdict(policy.augment).items() if value != default[name]}
    if "ops" in found:
        found["ops"] = "+".join(str(entry["op"]).removeprefix("Random") for entry in found["ops"])
    parts = [f"{name} {value}" for name, value in found.items()]
    return ", ".join([brief(policy.transform.train), *(parts or ["nothing else"])])


class Trial(tune.Trainable):
    """Trains one of `runs`, the one that its configuration has the `number` of; a step of it is an epoch.

    Its checkpoints are the run's, in the run's folder, so Ray Tune needs none. It is no function, since the loop
    reports to Ray Train, which Ray refuses within a function of Ray Tune's.
    """

    def setup(  # type: ignore[override]  # what `tune.with_parameters` gives
        self, config: dict[str, Any], runs: list[RunConfig], max_actors: int
    ) -> None:
        # It would tell of every execution.
        logging.getLogger("ray.data._internal.execution.streaming_executor").setLevel(logging.WARNING)
        self._run, self._max_actors = runs[config["number"]], max_actors
        self._trainer: Trainer | None = None

    def step(self) -> dict[str, Any]:
        # Without the loop's lines of progress: RUN/metrics.jsonl has them all.
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            if self._trainer is None:
                self._trainer = self._started()
                self._epochs = self._trainer.epochs()
            next(self._epochs, None)
            metrics = self._trainer.figures()
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
        set_train_fn_utils(LocalTrainFnUtils("trial"))
        # Ray hides the host's GPUs only from processes that have one of them.
        device = "" if ray.get_gpu_ids() else "cpu"
        return Trainer(run, spec, num_classes_of(run, spec), self._max_actors, run_uri, device=device)

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


def share_out(offer: Resources, run: RunConfig, most: int) -> tuple[int, Allocation]:
    """How many trainings run at one time, up to `most`, and what each of them has. Pure.

    All of them fit with their actors, so that no model waits for actors that wait for the CPUs of another model.

    Args:
        offer: what the cluster has free is shared out.
        run: with `train.workers=1`, and a `train.gpu` that is not "auto".
    """
    for at_once in range(most, 1, -1):
        cpus, gpus = offer.free_cpus / at_once, offer.free_gpus // at_once
        with contextlib.suppress(ResourceError):
            return at_once, allocate(Resources(cpus, gpus, cpus, gpus), run.pool, run.train, run.plan.per_step)
    return 1, allocate(offer, run.pool, run.train, run.plan.per_step)


@dataclass(frozen=True)
class Outcome:
    """Of one training: its place in the list, epochs, whether that is all, its last validation, why it failed."""

    number: int
    epochs: int
    done: bool
    accuracy: float
    loss: float
    error: str = ""


def tuner(folder: str, runs: list[RunConfig], at_once: int, share: Allocation, *, stop: bool) -> tune.Tuner:
    """What trains runs, and goes on with those that an earlier one with the same folder has begun.

    Args:
        folder: URI of Ray Tune's records.
        runs: with `train.workers=1`.
        at_once, share: see `share_out`.
        stop: those that are poor after half of their epochs, by ASHA; else all of them end by themselves.
    """
    filesystem, path = open_filesystem(folder)
    trainable: Any = tune.with_resources(
        tune.with_parameters(Trial, runs=runs, max_actors=share.max_actors),
        {"CPU": share.cpus_per_worker, "GPU": int(share.gpu)},
    )
    space = {"number": tune.grid_search(list(range(len(runs))))}
    if tune.Tuner.can_restore(path, storage_filesystem=filesystem):
        return tune.Tuner.restore(
            path, trainable, resume_errored=True, param_space=space, storage_filesystem=filesystem
        )
    storage, _, name = path.rpartition("/")
    epochs = runs[0].plan.epochs
    return tune.Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(
            metric="val_accuracy",
            mode="max",
            scheduler=ASHAScheduler(
                time_attr="epochs",
                max_t=epochs,
                grace_period=max(1, epochs // 2) if stop else epochs,
                reduction_factor=2,
                stop_last_trials=False,
            ),
            max_concurrent_trials=at_once,
            reuse_actors=True,  # a process takes some seconds to start
        ),
        run_config=tune.RunConfig(
            name=name,
            storage_path=storage,
            storage_filesystem=filesystem,
            verbose=1,
            failure_config=tune.FailureConfig(max_failures=runs[0].train.max_failures),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
        ),
    )


def outcome(result: tune.Result, runs: list[RunConfig]) -> Outcome:
    """What came of a trial."""
    metrics, number = result.metrics or {}, (result.config or {})["number"]
    error = ""
    if result.error:
        cause = cause_of(result.error)
        ours = isinstance(cause, RaypipeError)
        # Else without the trace of how Ray came by it.
        error = f"{type(cause).__name__}: {cause}" if ours else str(result.error).strip().rpartition("\n")[2]
    return Outcome(
        number=number,
        epochs=metrics.get("epochs", 0),
        done=metrics.get("epochs", 0) == runs[number].plan.epochs,  # Ray Tune calls those done that it has stopped
        accuracy=metrics.get("val_accuracy") or 0.0,
        loss=metrics.get("val_loss") or math.inf,
        error=error,
    )
