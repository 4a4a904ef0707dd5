"""Search for an augmentation policy on your own store.

    uv run jobs/tune.py                                            on the digits that scikit-learn ships
    uv run jobs/tune.py --store.train train.lmdb --store.val val.lmdb --tune.trials 24 --tune.epochs 10
    uv run jobs/tune.py --config run.yaml --tune.transforms '[light, heavy]'
    uv run jobs/tune.py --resume runs/tune-20261121-104600-3fa2    go on where it stopped
    uv run jobs/train.py --config runs/tune-20261121-104600-3fa2/best.yaml

    FOLDER/config.yaml     settings of the run and of the search
    FOLDER/trials/NAME/    what each training leaves behind, see raypipe/train/run_folder.py
    FOLDER/tune/           Ray Tune's records of the trials, which a resume needs
    FOLDER/best.yaml       the winner, for `jobs/train.py --config`
    FOLDER/report.json     the result, with every trial

ASHA (Li et al. 2020, arXiv:1810.05934) stops a trial at a milestone unless it is among the best that have come so
far. What is best of many is so by luck as well: so it is trained again, with seeds that the search has not seen,
and so is the run's own policy, and the two are compared seed by seed.

--resume unpickles Ray Tune's records, and a pickle runs code: give it only folders that nobody else can write to.

The last line of standard output is one JSON object: better, val_accuracy, default_val_accuracy, gain, spread,
policy, config, trials, stopped_early, failed, seconds, run_dir.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import yaml

from raypipe.commands.cli import run_job
from raypipe.commands.tune import Outcome, TuneConfig, outcome, policies, share_out, told, tuner
from raypipe.config import RunConfig
from raypipe.errors import ConfigError, RaypipeError, ResourceError
from raypipe.rayext.cluster import Allocation, cluster_resources, connect, preflight
from raypipe.storage.files import write_json, write_text
from raypipe.streaming.pipeline import check_memory
from raypipe.streaming.spec import spec_of
from raypipe.train.launch import Interrupts, check_augment
from raypipe.train.learning import num_classes_of
from raypipe.train.run_folder import as_plain, located
from raypipe.transform.presets import build_transform


def search(run: RunConfig, tune: TuneConfig) -> dict[str, Any]:
    """Search for an augmentation policy on a run's own stores, and keep the better one of it and the run's.

    Args:
        run: what is trained; its policy is the one to beat. `resume` names the folder of a search to go on with.
        tune: the search.

    Returns:
        `better`: whether the search has found a better policy than the run's, by more than chance; `val_accuracy`
        of the policy that was kept and `default_val_accuracy` of the run's own, means over the seeds; `gain` of
        the best of the search over the run's own, and its `spread` over the seeds; `policy`; `config`: a YAML for
        jobs/train.py; `trials`, `stopped_early`, `failed`, `seconds`, `run_dir`.

    Raises:
        RaypipeError: what is wrong with the configuration, a store, the cluster or a training.
    """
    with located(run, "tune-") as (run, folder, _):
        return _search(run, tune, folder)


def absolute(address: str) -> str:
    """A local path as one that a process in any folder understands; a URI, and what is empty, as it is."""
    return str(Path(address).absolute()) if address and "://" not in address else address


def _search(run: RunConfig, tune: TuneConfig, folder: str) -> dict[str, Any]:
    started = time.monotonic()
    # Trials have folders of their own to run in.
    store = {name: absolute(getattr(run.store, name)) for name in ("train", "val", "leave_out", "val_leave_out")}
    run = replace(run, store=replace(run.store, **store))
    chosen = policies(tune, run)
    num_classes = check(run, tune, chosen, folder)
    connect()
    alone = replace(run.train, workers=1, min_workers=0, num_classes=num_classes)
    gpu = preflight(run.pool, alone, run.plan.per_step).gpu
    alone = replace(alone, gpu="yes" if gpu else "no")
    base = replace(run, runs=f"{folder}/trials", train=alone)
    at_once, share = share_out(cluster_resources(), base, tune.max_concurrent or tune.trials)
    if run.resume and at_once < tune.max_concurrent:
        raise ResourceError(
            f"the search was begun with {tune.max_concurrent} trials at a time, and the cluster has room for "
            f"{at_once}: go on where there are as many CPUs and GPUs free, or begin anew"
        )
    check_memory(spec_of(run, folder), share.max_actors, 1, at_once)
    searched = json.loads(json.dumps(asdict(replace(tune, max_concurrent=at_once))))  # plain numbers
    write_text(f"{folder}/config.yaml", yaml.safe_dump({**as_plain(run), "tune": searched}, sort_keys=False))
    print(f"search     {folder}\ntrials     {len(chosen)} policies, {at_once} at a time", flush=True)
    for number, policy in enumerate(chosen):
        print(f"{number:>10} {told(policy)}", flush=True)
    try:
        trials = train_all(f"{folder}/tune/search", search_runs(base, tune, chosen), at_once, share, True)
        best = best_of(trials)
        finals = final_runs(base, tune, chosen[best])
        print(f"final      {told(chosen[best])}, and the run's own, with {tune.repeats} seeds each", flush=True)
        compared = train_all(f"{folder}/tune/final", finals, at_once, share, False)
    except KeyboardInterrupt:
        print(f"stopped; go on with --resume {folder.removeprefix('file://')}", flush=True)
        raise
    if failed := [each for each in compared if each.error]:
        raise RaypipeError(f"{finals[failed[0].number].name} failed: {failed[0].error}")
    accuracies = [each.accuracy for each in compared]
    first, second = accuracies[: tune.repeats], accuracies[tune.repeats :]
    verdict = judge(first, second)
    kept = chosen[best] if verdict["better"] else run
    text = verdict.pop("text")
    print(f"{text}\nkept: {told(kept)}", flush=True)
    write_text(
        f"{folder}/best.yaml", f"# {text}.\n{yaml.safe_dump(as_plain(replace(kept, name='')), sort_keys=False)}"
    )
    result = {
        **verdict,
        "val_accuracy": mean(first if verdict["better"] else second),
        "default_val_accuracy": mean(second),
        "policy": told(kept),
        "config": f"{folder}/best.yaml".removeprefix("file://"),
        "trials": len(trials),
        "stopped_early": sum(not each.done and not each.error for each in trials),
        "failed": sum(bool(each.error) for each in trials),
        "seconds": round(time.monotonic() - started, 1),
        "run_dir": folder.removeprefix("file://"),
    }
    tried = [
        {"transform": policy.transform.train, "augment": asdict(policy.augment), **asdict(trial)}
        for policy, trial in zip(chosen, trials, strict=True)
    ]
    comparison = {"seeds": seeds(tune, run), "best": first, "default": second}
    write_json(f"{folder}/report.json", {**result, "best": best, "comparison": comparison, "all_trials": tried})
    return result


def check(run: RunConfig, tune: TuneConfig, chosen: list[RunConfig], folder: str) -> int:
    """What is wrong is told here, before the cluster starts anything; returns the number of classes."""
    if not run.store.val or not run.plan.val_every:
        raise ConfigError("a search needs a validation: set store.val, and plan.val_every above 0")
    for policy in chosen:
        build_transform(policy.transform.train, run.transform.size)
        check_augment(policy.augment)
        spec_of(policy, folder)
    final = final_runs(run, tune, run)[0]
    return num_classes_of(final, spec_of(final, folder))


def search_runs(base: RunConfig, tune: TuneConfig, chosen: list[RunConfig]) -> list[RunConfig]:
    """The trials: equal in all but their policies, validated after each epoch."""
    plan = replace(base.plan, epochs=tune.epochs or max(1, base.plan.epochs // 2), val_every=1)
    return [
        replace(base, transform=policy.transform, augment=policy.augment, plan=plan, name=f"search-{number}")
        for number, policy in enumerate(chosen)
    ]


def final_runs(base: RunConfig, tune: TuneConfig, best: RunConfig) -> list[RunConfig]:
    """The trainings that are compared: of the best policy with each seed, then of the run's own with each."""
    if tune.final_val:
        base = replace(base, store=replace(base.store, val=absolute(tune.final_val), val_leave_out=""))
    return [
        replace(
            base,
            transform=policy.transform,
            augment=policy.augment,
            plan=replace(base.plan, val_every=base.plan.epochs, seed=seed),
            name=f"final-{name}-{number}",
        )
        for name, policy in (("best", best), ("default", base))
        for number, seed in enumerate(seeds(tune, base))
    ]


def seeds(tune: TuneConfig, run: RunConfig) -> list[int]:
    """The seeds of the final comparison, none of which is that of the trials."""
    return np.random.SeedSequence([run.plan.seed, tune.seed]).generate_state(tune.repeats).tolist()


def train_all(folder: str, runs: list[RunConfig], at_once: int, share: Allocation, stop: bool) -> list[Outcome]:
    """What comes of the trainings that `tuner` makes of its arguments, in their order.

    Raises:
        KeyboardInterrupt: after Ctrl-C or SIGTERM; what was begun is kept. A second one aborts.
    """
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # it does not say afterwards that there was a signal
    with Interrupts() as interrupts:
        signal.signal(signal.SIGUSR1, signal.default_int_handler)  # until Ray Tune has begun; its own sign to end
        interrupts.hand_over(lambda: os.kill(os.getpid(), signal.SIGUSR1))
        results = tuner(folder, runs, at_once, share, stop=stop).fit()
        interrupts.check()
    return sorted((outcome(results[i], runs) for i in range(len(runs))), key=lambda found: found.number)


def best_of(trials: list[Outcome]) -> int:
    """The number of the best trial that is not the run's own policy.

    Raises:
        RaypipeError: all of them failed.
    """
    candidates = [trial for trial in trials if trial.number and not trial.error]
    if not candidates:
        raise RaypipeError(f"every trial failed, the last one so: {trials[-1].error}")
    return max(candidates, key=lambda trial: (trial.epochs, trial.accuracy, -trial.loss)).number


def judge(first: list[float], second: list[float]) -> dict[str, Any]:
    """Compare the accuracies of two policies, in [0, 1], with the same seeds in the same order, at least two.

    Returns:
        `better`: whether the first is, by more than chance; `gain` and `spread`: mean and standard deviation of
        the differences, first minus second; `text`: the same in a sentence.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    gain, spread = mean(differences), stdev(differences)
    error = spread / len(differences) ** 0.5
    # With three seeds one of eleven comparisons of equals passes this by chance, with five one of seventeen
    # (Student's t).
    better = gain > 2 * error
    text = (
        f"the best policy of the search is {'better' if better else 'not better by more than chance'}: "
        f"{mean(first):.4f} against {mean(second):.4f} over {len(first)} seeds, a gain of "
        f"{100 * gain:+.2f} points with a standard error of {100 * error:.2f}"
    )
    return {"better": better, "gain": gain, "spread": spread, "text": text}


if __name__ == "__main__":
    run_job(search, __doc__, tune=TuneConfig)
