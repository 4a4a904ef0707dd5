"""The parts of `jobs/tune.py`: augmentation policies, and trainings as trials of Ray Tune.

A policy is the CPU transform of training and the augmentation, normalisation apart; here it is a run with them.
The policies of a search are drawn by its seed alone, before it begins: nothing of how it goes changes the list.

A trial is a whole run in a process of its own, with one device and W = 1. What a run learns does not depend on W,
so trials side by side are worth as much as one after another on all devices, without their meetings.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from jsonargparse.typing import NonNegativeInt, restricted_number_type
from ray import tune
from ray.tune.schedulers import ASHAScheduler

from raypipe.config import AugmentConfig, RunConfig, StrengthConfig
from raypipe.device.augment import PRESETS
from raypipe.errors import ResourceError
from raypipe.rayext.cluster import Allocation, Resources, allocate
from raypipe.rayext.failures import cause_of
from raypipe.rayext.trainer import train_alone
from raypipe.storage.filesystem import as_uri, join, open_filesystem
from raypipe.storage.patient import PatientFileSystem
from raypipe.streaming.spec import spec_of
from raypipe.train.learning import num_classes_of
from raypipe.train.loop import Trainer
from raypipe.train.run_folder import store_config
from raypipe.transform.transform_steps import brief, without_files

AtLeast2: Any = restricted_number_type("AtLeast2", int, (">=", 2))
_MIXING = [(), (), ("mixup_alpha",), ("cutmix_alpha",), ("mixup_alpha", "cutmix_alpha")]


@dataclass(frozen=True)
class TuneConfig:
    """A search for an augmentation policy.

    Attributes:
        trials: policies to try, of which the first are the run's own and none at all.
        epochs: of a trial; 0 = half of plan.epochs. None is stopped in its first half: what is strong starts slow.
        repeats: seeds with which the best policy and the run's own are compared in the end.
        transforms: CPU transforms of training to choose from, beside transform.train, each as that may be.
        seed: of the list of policies; plan.seed is that of all trials.
    """

    trials: AtLeast2 = 12
    epochs: NonNegativeInt = 0
    repeats: AtLeast2 = 3  # two seeds have a spread
    transforms: list[str | list[dict[str, Any]]] = field(default_factory=list)
    seed: NonNegativeInt = 0


def policies(settings: TuneConfig, run: RunConfig) -> list[RunConfig]:
    """The policies that a search tries: the run's own, none, and what is drawn; all normalise as the run does."""
    rng = np.random.default_rng(settings.seed)
    transforms = [run.transform.train, *map(without_files, settings.transforms)]
    plain = AugmentConfig(mean=run.augment.mean, std=run.augment.std)
    own = replace(plain, preset=run.augment.preset, ops=run.augment.ops, module=run.augment.module)
    sets = [plain, own]
    for preset, ops in PRESETS.items():
        # Digits and letters are others when they are flipped.
        unflipped = [dict(entry) for entry in ops if entry["op"] != "RandomHorizontalFlip"]
        sets += [replace(plain, preset=preset), replace(plain, ops=unflipped)]  # type: ignore[arg-type]
    sets = [each for number, each in enumerate(sets) if each not in sets[:number]]
    found = [run]
    drawn = replace(run, augment=plain)
    for operations in itertools.cycle(rng.permutation(np.array(sets, object))):  # each before one comes again
        if drawn not in found:
            found.append(drawn)
        if len(found) == settings.trials:
            break
        # Alphas of the papers are 0.1 to 1, on a scale of ratios.
        mixing = dict.fromkeys(_MIXING[rng.integers(len(_MIXING))], round(10 ** rng.uniform(-1, 0), 2))
        strength = StrengthConfig(peak=float(rng.choice([0.4, 0.7, 1.0])))
        transform = replace(run.transform, train=transforms[rng.integers(len(transforms))])
        if mixing or operations != plain:  # else there is nothing to be strong
            drawn = replace(run, transform=transform, augment=replace(operations, strength=strength, **mixing))
    return found


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

    def setup(self, config: dict[str, Any], runs: list[RunConfig], max_actors: int) -> None:  # type: ignore[override]
        train_alone("trial")
        run = runs[config["number"]]
        run_uri = join(as_uri(run.storage_path), run.name)
        spec = spec_of(run, run_uri)
        store_config(run, run_uri)
        # Ray hides the host's GPUs only from processes that have one of them.
        device = "" if ray.get_gpu_ids() else "cpu"
        self._trainer = Trainer(run, spec, num_classes_of(run, spec), max_actors, run_uri, device=device)
        self._epochs = self._trainer.epochs()

    def step(self) -> dict[str, Any]:
        # Without the loop's lines of progress: RUN/metrics.jsonl has them all.
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            next(self._epochs, None)
            metrics, plan = self._trainer.figures(), self._trainer.plan
            # Not Tune's number of steps: what goes on from a checkpoint has done some before.
            epochs = metrics["steps"] // plan.steps_per_epoch
            if done := epochs == plan.config.epochs:
                next(self._epochs, None)  # to the end of the stream, and of the log
        return {**metrics, "epochs": epochs, "done": done}

    def cleanup(self) -> None:
        self._trainer.close()


def share_out(offer: Resources, run: RunConfig, most: int) -> tuple[int, Allocation]:
    """How many trainings run at one time, up to `most`, and what each has of what is free. Pure.

    All of them fit with their actors, so that no model waits for actors that wait for the CPUs of another model.
    """
    for at_once in range(most, 1, -1):
        cpus, gpus = offer.free_cpus / at_once, offer.free_gpus // at_once
        with contextlib.suppress(ResourceError):
            return at_once, allocate(Resources(cpus, gpus, cpus, gpus), run.pool, run.train, run.plan.per_step)
    return 1, allocate(offer, run.pool, run.train, run.plan.per_step)


def train_all(
    folder: str, runs: list[RunConfig], at_once: int, share: Allocation, first: int
) -> list[dict[str, Any]]:
    """Train runs with W = 1, and go on with those that an earlier call with the same folder has begun.

    Args:
        folder: URI of Ray Tune's records.
        at_once, share: see `share_out`.
        first: epoch from which on ASHA stops those that are poor.

    Returns:
        Of each, in their order, its number, epochs, last validation accuracy, and why it failed.

    Raises:
        KeyboardInterrupt: after Ctrl-C or SIGTERM; what was begun is kept. A second one aborts.
    """
    (filesystem, path), epochs = open_filesystem(folder), runs[0].plan.epochs
    # Ray Tune copies whole folders in threads, but for a file system that it knows as S3.
    filesystem = filesystem.inner if isinstance(filesystem, PatientFileSystem) else filesystem
    trainable: Any = tune.with_resources(
        tune.with_parameters(Trial, runs=runs, max_actors=share.max_actors),
        {"CPU": share.cpus_per_worker, "GPU": int(share.gpu)},
    )
    space = {"number": tune.grid_search(list(range(len(runs))))}
    if tune.Tuner.can_restore(path, storage_filesystem=filesystem):
        tuner = tune.Tuner.restore(
            path, trainable, resume_errored=True, param_space=space, storage_filesystem=filesystem
        )
    else:
        asha = ASHAScheduler("epochs", "val_accuracy", "max", epochs, first, 2, stop_last_trials=False)
        storage, _, name = path.rpartition("/")
        tuner = tune.Tuner(
            trainable,
            param_space=space,
            tune_config=tune.TuneConfig(scheduler=asha, max_concurrent_trials=at_once),
            run_config=tune.RunConfig(
                name=name,
                storage_path=storage,
                storage_filesystem=filesystem,
                verbose=1,
                failure_config=tune.FailureConfig(max_failures=runs[0].train.max_failures),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            ),
        )
    # Ray Tune stops its trials at the first Ctrl-C, and so, with this, at `ray job stop`.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    results = tuner.fit()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ray Tune's would stay, and swallow the next
    found = [results[number] for number in range(len(results))]
    ended = [result.error or (result.metrics or {}).get("done") for result in found]
    if len(ended) < len(runs) or not all(ended):
        raise KeyboardInterrupt
    outcomes = [
        {
            "number": (result.config or {})["number"],
            "epochs": (result.metrics or {}).get("epochs", 0),
            "accuracy": (result.metrics or {}).get("val_accuracy") or 0.0,
            "error": str(cause_of(result.error)) if result.error else "",
        }
        for result in found
    ]
    return sorted(outcomes, key=lambda each: each["number"])
