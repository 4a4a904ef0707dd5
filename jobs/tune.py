"""Search for an augmentation policy on your own store.

    uv run jobs/tune.py                                            on the digits that scikit-learn ships
    uv run jobs/tune.py --store.train train.lmdb --store.val val.lmdb --tune.trials 24 --tune.epochs 10
    uv run jobs/tune.py --config run.yaml --tune.transforms '[light, heavy]'
    uv run jobs/tune.py --resume runs/tune-20261121-104600-3fa2    go on where it stopped
    uv run jobs/train.py --config runs/tune-20261121-104600-3fa2/best.yaml

    FOLDER/config.yaml     settings of the run and of the search
    FOLDER/trials/NAME/    what each training leaves behind, see raypipe/train/run_folder.py
    FOLDER/tune/           Ray Tune's records and the checkpoints of the trials: all that a resume needs
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

import time
from dataclasses import asdict, replace
from statistics import mean
from typing import Any

import yaml
from ray.tune.schedulers import ASHAScheduler

from raypipe.commands.cli import run_job
from raypipe.commands.policies import Policy, TuneConfig, judge, policies, seeds, unlike
from raypipe.commands.tune import Outcome, Share, share_out, train_all
from raypipe.config import RunConfig, StoreConfig
from raypipe.errors import ConfigError, RaypipeError, ResourceError
from raypipe.rayext.cluster import cluster_resources, connect, preflight
from raypipe.storage.filesystem import absolute
from raypipe.storage.whole_file import read_json, write_json, write_text
from raypipe.streaming.pipeline import check_memory
from raypipe.streaming.spec import spec_of
from raypipe.train.launch import check_augment
from raypipe.train.learning import num_classes_of
from raypipe.train.run_folder import as_plain, located, make_folder
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
        return _search(run, tune.without_files(), folder)


def _search(run: RunConfig, tune: TuneConfig, folder: str) -> dict[str, Any]:
    started = time.monotonic()
    chosen = policies(tune, run)
    num_classes = _check(run, tune, chosen, folder)
    connect()
    alone = replace(run.train, workers=1, min_workers=0, num_classes=num_classes)
    preflight(run.pool, alone, run.plan.per_step)
    make_folder(folder)
    share = _share(run, tune, folder)
    check_memory(spec_of(run, folder), share.actors, 1, share.concurrent)
    write_text(f"{folder}/config.yaml", yaml.safe_dump({**as_plain(run), "tune": asdict(tune)}, sort_keys=False))
    print(f"search     {folder}\ntrials     {len(chosen)} policies, {share}", flush=True)
    base = replace(
        run,
        store=_anywhere(run.store),
        runs=f"{folder}/trials",
        train=alone,
        pool=replace(run.pool, cpus_per_actor=share.cpus_per_actor),
    )
    for number, policy in enumerate(chosen):
        print(f"{number:>10} {policy}", flush=True)
    try:
        trials = train_all(f"{folder}/tune/search", search_runs(base, tune, chosen), share, scheduler(run, tune))
        best = best_of(trials)
        finals = final_runs(base, tune, chosen[best])
        print(f"final      {chosen[best]}, and the run's own, with {tune.repeats} seeds each", flush=True)
        compared = train_all(f"{folder}/tune/final", finals, share)
    except KeyboardInterrupt:
        print(f"stopped; go on with --resume {folder.removeprefix('file://')}", flush=True)
        raise
    if failed := [each for each in compared if each.error]:
        raise RaypipeError(f"{finals[failed[0].number].name} failed: {failed[0].error}")
    accuracies = [each.accuracy for each in compared]
    first, second = accuracies[: tune.repeats], accuracies[tune.repeats :]
    verdict = judge(first, second)
    kept = chosen[best] if verdict.better else chosen[0]
    print(f"{verdict.text}\nkept: {kept}", flush=True)
    plain = yaml.safe_dump(as_plain(replace(kept.applied(run), name="")), sort_keys=False)
    write_text(f"{folder}/best.yaml", f"# {verdict.text}.\n{plain}")
    result = {
        "better": verdict.better,
        "val_accuracy": mean(first if verdict.better else second),
        "default_val_accuracy": mean(second),
        "gain": verdict.gain,
        "spread": verdict.spread,
        "policy": str(kept),
        "config": f"{folder}/best.yaml".removeprefix("file://"),
        "trials": len(trials),
        "stopped_early": sum(not each.done and not each.error for each in trials),
        "failed": sum(bool(each.error) for each in trials),
        "seconds": round(time.monotonic() - started, 1),
        "run_dir": folder.removeprefix("file://"),
    }
    rows = [{"policy": asdict(chosen[each.number]), **asdict(each)} for each in trials]
    comparison = {"seeds": seeds(tune, run), "best": first, "default": second}
    write_json(f"{folder}/report.json", {**result, "best": best, "comparison": comparison, "all_trials": rows})
    return result


def _anywhere(store: StoreConfig) -> StoreConfig:
    """The same for trials, whose processes have folders of their own."""
    names = ("train", "val", "leave_out", "val_leave_out")
    return replace(store, **{name: absolute(getattr(store, name)) for name in names})


def scheduler(run: RunConfig, tune: TuneConfig) -> ASHAScheduler:
    """What stops the poor trials: first after grace_epochs, then after each 1 / keep times as many."""
    epochs = trial_epochs(run, tune)
    return ASHAScheduler(
        time_attr="epochs",
        max_t=epochs,
        grace_period=min(tune.grace_epochs or max(1, epochs // 2), epochs),
        reduction_factor=1 / tune.keep,
        stop_last_trials=False,
    )


def trial_epochs(run: RunConfig, tune: TuneConfig) -> int:
    return tune.epochs or max(1, run.plan.epochs // 2)


def search_runs(base: RunConfig, tune: TuneConfig, chosen: list[Policy]) -> list[RunConfig]:
    """The trials: equal in all but their policies, validated after each epoch."""
    plan = replace(base.plan, epochs=trial_epochs(base, tune), val_every=1)
    return [
        replace(policy.applied(base), plan=plan, name=f"search-{number}") for number, policy in enumerate(chosen)
    ]


def final_runs(base: RunConfig, tune: TuneConfig, best: Policy) -> list[RunConfig]:
    """The trainings that are compared: of the best policy with each seed, then of the run's own with each."""
    epochs = tune.final_epochs or base.plan.epochs
    store = base.store
    if tune.final_val:
        store = replace(store, val=absolute(tune.final_val), val_leave_out="")
    return [
        replace(
            policy.applied(base),
            store=store,
            plan=replace(base.plan, epochs=epochs, val_every=epochs, seed=seed),
            name=f"final-{name}-{number}",
        )
        for name, policy in (("best", best), ("default", Policy.of(base)))
        for number, seed in enumerate(seeds(tune, base))
    ]


def best_of(trials: list[Outcome]) -> int:
    """The number of the best trial that is not the run's own policy.

    Raises:
        RaypipeError: all of them failed.
    """
    candidates = [trial for trial in trials if trial.number and not trial.error]
    if not candidates:
        raise RaypipeError(f"every trial failed, the last one so: {trials[-1].error}")
    return max(candidates, key=lambda trial: (trial.epochs, trial.accuracy, -trial.loss)).number


def _check(run: RunConfig, tune: TuneConfig, chosen: list[Policy], folder: str) -> int:
    """What is wrong is told here, before the cluster starts anything; returns the number of classes."""
    if not run.store.val or not run.plan.val_every:
        raise ConfigError("a search needs a validation: set store.val, and plan.val_every above 0")
    for transform in unlike(policy.transform for policy in chosen):
        build_transform(transform, run.transform.size)
    for policy in chosen:
        check_augment(policy.augment)
        spec_of(policy.applied(run), folder)
    for final in final_runs(run, tune, chosen[-1]):
        num_classes = num_classes_of(final, spec_of(final, folder))
    return num_classes


def _share(run: RunConfig, tune: TuneConfig, folder: str) -> Share:
    """The share of a new search, or the one with which a search was begun."""
    offer = cluster_resources()
    if not run.resume:
        share = share_out(offer, run, min(tune.max_concurrent or tune.trials, tune.trials))
        write_json(f"{folder}/share.json", asdict(share))
        return share
    share = Share(**read_json(f"{folder}/share.json"))
    needed = share.concurrent * (share.cpus + share.actors * share.cpus_per_actor)
    if needed > offer.free_cpus + 1e-6 or (share.gpu and share.concurrent > offer.free_gpus):
        raise ResourceError(
            f"the search was begun with {share}: {needed:g} CPUs in all; the cluster has {offer.free_cpus:g} CPUs "
            f"and {offer.free_gpus:g} GPUs free. Go on where there are as many, or begin anew"
        )
    return share


if __name__ == "__main__":
    run_job(search, __doc__, tune=TuneConfig)
