"""Search for an augmentation policy on your own store.

    uv run --extra kornia jobs/tune.py                          on the digits that raypipe ships
    uv run --extra kornia jobs/tune.py --config run.yaml --trials 24 --transforms '[light, heavy]'
    uv run --extra kornia jobs/tune.py --resume runs/tune-20261121-104600-3fa2    continues a search
    uv run --extra kornia jobs/train.py --config runs/tune-20261121-104600-3fa2/best.yaml

ASHA (Li et al. 2020, arXiv:1810.05934) stops a trial at half of its epochs unless it is in the better half so far.
The best of many is also the luckiest, so it and the run's own policy are trained again with new seeds and compared
seed by seed. A resume unpickles Ray Tune's records, which runs code: use folders that only you can write to.
"""

import json
import os
from dataclasses import replace
from statistics import mean, stdev
from typing import Any

import numpy as np
from ray import tune
from ray.tune.schedulers import ASHAScheduler

from raypipe.commands.cli import run_job
from raypipe.config import AugmentConfig, RunConfig
from raypipe.device.augment import PRESETS
from raypipe.errors import ConfigError, RunError
from raypipe.launch.run_checks import check_augment, check_code, num_classes_of
from raypipe.launch.run_folder import (
    CONFIG_FILE,
    CONFIG_HEAD,
    as_plain,
    located,
    store_config,
)
from raypipe.rayext.allocation import cluster_resources, preflight
from raypipe.rayext.cluster import connect
from raypipe.rayext.failures import cause_of
from raypipe.rayext.trainer import train_alone
from raypipe.storage.files import write_json, write_text
from raypipe.streaming.opening import spec_of
from raypipe.train.loop import Trainer
from raypipe.transform.presets import build_transform

_JITTER = {
    "op": "ColorJitter",
    "brightness": 0.2,
    "contrast": 0.2,
    "saturation": 0.2,
    "p": 0.8,
}
_ERASE = {"op": "RandomErasing", "p": 0.25, "scale": [0.02, 0.2]}
WITHOUT_FLIP: list[
    list[dict[str, Any]]
] = [  # the presets by Kornia's operations: a flip makes other digits
    [],
    [],
    [_JITTER | {"order": [0, 1, 2]}, _ERASE],
    [
        {
            "op": "RandomAffine",
            "degrees": 15.0,
            "translate": [0.1, 0.1],
            "scale": [0.8, 1.2],
            "p": 0.5,
        },
        _JITTER | {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
        {"op": "RandomGrayscale", "p": 0.1},
        {
            "op": "RandomGaussianBlur",
            "kernel_size": [5, 5],
            "sigma": [0.1, 2.0],
            "p": 0.2,
        },
        _ERASE,
    ],
    [{"op": "RandAugment", "n": 2, "m": 9}],
    [{"op": "TrivialAugment"}],
]


def policies(
    run: RunConfig, trials: int, transforms: tuple[Any, ...]
) -> list[RunConfig]:
    """The run with each policy: its own, none, and policies drawn from its seed; more trials only add policies."""
    rng = np.random.default_rng(run.plan.seed)
    plain = AugmentConfig(mean=run.augment.mean, std=run.augment.std)
    sets = [plain, run.augment, *(replace(plain, preset=preset) for preset in PRESETS)]  # type: ignore[arg-type]
    sets += [replace(plain, ops=ops) for ops in WITHOUT_FLIP]
    runs = [run]
    drawn = replace(run, augment=plain)
    while len(runs) < trials:
        runs += [drawn] if drawn not in runs else []
        mixup, cutmix = (
            rng.integers(0, 2, 2) * round(10 ** rng.uniform(-1, 0), 2)
        ).tolist()
        strength = float(rng.choice([0.4, 0.7, 1.0]))
        augment = replace(
            sets[rng.integers(len(sets))],
            mixup_alpha=mixup,
            cutmix_alpha=cutmix,
            strength=strength,
        )
        transform = [run.transform.train, *transforms][
            rng.integers(1 + len(transforms))
        ]
        drawn = replace(
            run, transform=replace(run.transform, train=transform), augment=augment
        )
    return runs


class Trial(tune.Trainable):
    """Trains one of `runs` in its own process. A step of Ray Tune's is an epoch; checkpoints are the run's own."""

    def setup(  # type: ignore[override]
        self, config: dict[str, Any], runs: list[RunConfig], **options: Any
    ) -> None:
        train_alone("trial")
        run = runs[config["number"]]
        folder = f"{run.storage_path}/{run.name}"
        store_config(run, folder)
        self._trainer = Trainer(
            run, spec_of(run, folder), run.train.num_classes, run_uri=folder, **options
        )
        self._epochs = self._trainer.epochs()

    def step(self) -> dict[str, Any]:
        done = next(self._epochs, "ended") == "ended"
        figures = self._trainer.figures()
        plan = self._trainer.plan
        # not Tune's steps: a resumed trial has done some before
        epochs = figures["steps"] // plan.steps_per_epoch
        return {
            "epochs": epochs,
            "accuracy": figures.get("val_accuracy") or 0.0,
            "done": done,
        }


def train_all(folder: str, runs: list[RunConfig], first: int) -> list[Any]:
    """Train runs side by side, continuing those of an earlier call; ASHA stops poor ones from epoch `first` on."""
    # a store's path is relative to this folder
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    run = runs[0]
    offer = cluster_resources()
    least = runs[0].pool.least_actors
    # resources of a single run
    share = preflight(run.pool, run.train, run.plan.per_step)
    if share.gpu:
        most = offer.free_gpus
    else:
        most = offer.free_cpus / (share.cpus_per_worker + least)
    at_once = max(1, min(int(most), len(runs)))
    own = {
        "max_actors": max(least, share.max_actors // at_once),
        "device": "" if share.gpu else "cpu",
    }
    trial: Any = tune.with_parameters(Trial, runs=runs, **own)
    trial = tune.with_resources(
        trial, {"CPU": share.cpus_per_worker, "GPU": int(share.gpu)}
    )
    if tune.Tuner.can_restore(folder):
        tuner = tune.Tuner.restore(folder, trial, resume_errored=True)
    else:
        asha = ASHAScheduler(
            "epochs",
            "accuracy",
            "max",
            run.plan.epochs,
            first,
            2,
            stop_last_trials=False,
        )
        search = tune.TuneConfig(scheduler=asha, max_concurrent_trials=at_once)
        storage, _, name = folder.rpartition("/")
        none = tune.CheckpointConfig(checkpoint_at_end=False)  # a run has its own
        place = tune.RunConfig(
            name=name, storage_path=storage, checkpoint_config=none, verbose=1
        )
        numbers = {"number": tune.grid_search(list(range(len(runs))))}
        tuner = tune.Tuner(
            trial, param_space=numbers, tune_config=search, run_config=place
        )
    fitted: Any = tuner.fit()
    # their paths end in their numbers
    results: list[Any] = sorted(fitted, key=lambda result: result.path)
    if len(results) < len(runs) or not all(
        result.error or (result.metrics or {}).get("done") for result in results
    ):
        raise KeyboardInterrupt  # Ray Tune has caught one, and has kept the trials
    return results


def judge(first: list[float], second: list[float]) -> dict[str, Any]:
    """Compare two policies seed by seed; with three seeds one in eleven equal policies is called `better`."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    gain = mean(differences)
    error = stdev(differences) / len(differences) ** 0.5
    return {"better": gain > 2 * error, "gain": gain, "standard_error": error}


def search(
    run: RunConfig,
    *,
    trials: int = 12,
    seeds: int = 3,
    transforms: tuple[Any, ...] = (),
) -> Any:
    """Search, and keep the better of the best policy and the run's own.

    Args:
        run: A trial has half of plan.epochs. plan.seed draws the policies too.
        trials: policies to try, at least 2; the first two are the run's own and no augmentation.
        seeds: seeds of the final comparison, at least 2.
        transforms: CPU transforms to choose from, besides transform.train.
    """
    if (
        min(trials, seeds) < 2
        or not run.plan.val_interval
        or (run.store.train and not run.store.val)
    ):
        raise ConfigError(
            "a search needs 2 trials, 2 seeds and a validation: store.val and plan.val_interval"
        )
    check_code(run.train, len(run.augment.mean))
    check_augment(AugmentConfig(ops=[_ERASE]))  # whether Kornia is there
    for transform in transforms:
        build_transform(transform, run.transform.final_size)
    with located(run, "tune-") as (run, folder, _):
        own = {"trials": trials, "seeds": seeds, "transforms": transforms}
        write_text(
            f"{folder}/{CONFIG_FILE}", CONFIG_HEAD + json.dumps(as_plain(run) | own)
        )
        print(f"search     {folder}; continue it with --resume", flush=True)
        name, arguments = run.train.named("model")
        num_classes = num_classes_of(run, spec_of(run))
        model = {"name": name, **arguments, "num_classes": num_classes}
        train = replace(run.train, num_workers=1, model=model)
        chosen = policies(
            replace(run, storage_path=f"{folder}/trials", train=train),
            trials,
            transforms,
        )
        connect()
        plan = replace(run.plan, epochs=max(1, run.plan.epochs // 2), val_interval=1)
        runs = [
            replace(policy, plan=plan, name=f"search-{i}")
            for i, policy in enumerate(chosen)
        ]
        results = train_all(f"{folder}/tune/search", runs, max(1, plan.epochs // 2))
        none = {"error": "", "epochs": 0, "accuracy": 0.0}
        tried = [
            none | (trial.metrics or {}) | {"error": str(trial.error or "")}
            for trial in results
        ]
        order = [
            (not trial["error"], trial["epochs"], trial["accuracy"]) for trial in tried
        ]
        best = max(range(1, trials), key=lambda i: order[i])
        new = np.random.SeedSequence(run.plan.seed).generate_state(seeds).tolist()
        plans = [
            replace(run.plan, val_interval=run.plan.epochs, seed=seed) for seed in new
        ]
        runs = [
            replace(chosen[i], plan=p, name=f"final-{i}-{p.seed}")
            for i in (best, 0)
            for p in plans
        ]
        results = train_all(f"{folder}/tune/final", runs, run.plan.epochs)
        if errors := [result.error for result in results if result.error]:
            raise RunError(f"a run of the comparison failed: {cause_of(errors[0])}")
        first, second = np.reshape(
            [result.metrics["accuracy"] for result in results], (2, seeds)
        ).tolist()
        verdict = judge(first, second) | {
            "best": first,
            "default": second,
            "config": f"{folder}/best.yaml",
        }
        kept = chosen[best if verdict["better"] else 0]
        kept = replace(run, name="", transform=kept.transform, augment=kept.augment)
        write_json(f"{folder}/best.yaml", as_plain(kept))  # JSON is YAML
        write_json(
            f"{folder}/report.json",
            verdict | {"trials": tried, "policies": list(map(as_plain, chosen))},
        )
        return verdict


if __name__ == "__main__":
    run_job(search, __doc__)
