"""A search for an augmentation policy with Ray Tune: trials that end early, then the best against the run's own.

    FOLDER/config.yaml     settings of the run and of the search
    FOLDER/trials/NAME/    what each training leaves behind, see run_folder.py
    FOLDER/tune/           Ray Tune's records and the checkpoints of the trials: all that a resume needs. It
                           unpickles them, and a pickle runs code: see owner.py
    FOLDER/best.yaml       the winner, for `jobs/train.py --config`
    FOLDER/report.json     the result, with every trial

ASHA (Li et al. 2020, arXiv:1810.05934) stops a trial at a milestone unless it is among the best that have come so
far. What is best of many is so by luck as well: so it is trained again, with seeds that the search has not seen,
and so is the run's own policy, and the two are compared seed by seed.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from statistics import mean
from typing import Any

import yaml

from raypipe.commands.policies import Policy, TuneConfig, as_report, judge, policies, seeds, unlike
from raypipe.commands.trial_queue import Outcome, Share, share_out, train_all
from raypipe.config import RunConfig, StoreConfig
from raypipe.errors import ConfigError, RaypipeError, ResourceError
from raypipe.logs import table
from raypipe.rayext.cluster import cluster_resources, connect, preflight
from raypipe.storage.filesystem import absolute
from raypipe.storage.whole_file import read_json, write_json, write_text
from raypipe.streaming.pipeline import check_memory
from raypipe.train.launch import check_augment, num_classes_of, spec_of
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
    trials = _trained(
        f"{folder}/tune/search",
        search_runs(base, tune, chosen),
        [str(p) for p in chosen],
        share,
        milestones(run, tune),
    )
    best = best_of(trials)
    _show(chosen, trials)
    finals = final_runs(base, tune, chosen[best])
    names = [f"{each.name}, seed {each.plan.seed}" for each in finals]
    compared = _trained(f"{folder}/tune/final", finals, names, share)
    if failed := [each for each in compared if each.error]:
        raise RaypipeError(f"{names[failed[0].number]} failed: {failed[0].error}")
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
    rows = [{"policy": as_report(chosen[each.number]), **asdict(each)} for each in trials]
    comparison = {"seeds": seeds(tune, run), "best": first, "default": second}
    write_json(f"{folder}/report.json", {**result, "best": best, "comparison": comparison, "all_trials": rows})
    return result


def _anywhere(store: StoreConfig) -> StoreConfig:
    """The same for trials, whose processes have folders of their own."""
    names = ("train", "val", "leave_out", "val_leave_out")
    return replace(store, **{name: absolute(getattr(store, name)) for name in names})


def _trained(folder: str, *arguments: Any) -> list[Outcome]:
    try:
        return train_all(folder, *arguments)
    except KeyboardInterrupt:
        search_folder = folder.removeprefix("file://").rpartition("/tune/")[0]
        print(f"stopped; go on with --resume {search_folder}", flush=True)
        raise


def milestones(run: RunConfig, tune: TuneConfig) -> tuple[int, int, float]:
    """Epochs before a trial may be stopped, epochs of a whole one, and from one milestone to the next how many
    times as many."""
    epochs = tune.epochs or max(1, run.plan.epochs // 2)
    return min(tune.grace_epochs or max(1, epochs // 2), epochs), epochs, 1 / tune.keep


def search_runs(base: RunConfig, tune: TuneConfig, chosen: list[Policy]) -> list[RunConfig]:
    """The trials: equal in all but their policies, validated after each epoch."""
    plan = replace(base.plan, epochs=milestones(base, tune)[1], val_every=1)
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


def _show(chosen: list[Policy], trials: list[Outcome]) -> None:
    order = sorted(trials, key=lambda trial: (trial.epochs, trial.accuracy), reverse=True)
    rows = [
        (
            f"{chosen[trial.number]}{' (the default)' if trial.number == 0 else ''}",
            "failed" if trial.error else f"{trial.accuracy:.4f} after {trial.epochs} epochs",
        )
        for trial in order
    ]
    table(f"{len(trials)} trials: validation accuracy", rows)
