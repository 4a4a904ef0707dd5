"""Search for an augmentation policy on your own store.

    uv run jobs/tune.py                                            on the digits that scikit-learn ships
    uv run jobs/tune.py --config run.yaml --tune.trials 24 --tune.transforms '[light, heavy]'
    uv run jobs/tune.py --resume runs/tune-20261121-104600-3fa2    go on where it stopped
    uv run jobs/train.py --config runs/tune-20261121-104600-3fa2/best.yaml

The search's folder has config.yaml, best.yaml, report.json with every trial, trials/NAME/ with what each training
leaves behind, and tune/ with Ray Tune's records, which a resume needs. It unpickles them, and a pickle runs code:
give it only folders that nobody else can write to.

ASHA (Li et al. 2020, arXiv:1810.05934) stops a trial at half of its epochs unless it is among the better half of
those that have come so far. What is best of many is so by luck as well: so it is trained again, with seeds that
the search has not seen, and so is the run's own policy, and the two are compared seed by seed.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import yaml

from raypipe.commands.cli import run_job
from raypipe.commands.tune import TuneConfig, policies, share_out, told, train_all
from raypipe.config import RunConfig
from raypipe.errors import ConfigError, RaypipeError
from raypipe.rayext.cluster import cluster_resources, connect, preflight
from raypipe.storage.files import write_json, write_text
from raypipe.streaming.pipeline import check_memory
from raypipe.streaming.spec import spec_of
from raypipe.train.launch import check_augment
from raypipe.train.learning import num_classes_of
from raypipe.train.run_folder import CONFIG_FILE, CONFIG_HEAD, as_plain, located
from raypipe.transform.presets import build_transform


def search(given: RunConfig, tune: TuneConfig) -> dict[str, Any]:
    """Search on a run's own stores, and keep the better one of the best policy and the run's own: `policy`.

    `val_accuracy` is its mean over the seeds, `default_val_accuracy` that of the run's own; `config` trains it.
    """
    if not given.plan.val_interval or (given.store.train and not given.store.val):
        raise ConfigError("a search needs a validation: set store.val, and plan.val_interval above 0")
    with located(given, "tune-") as (run, folder, _):
        # Trials have folders of their own to run in.
        names = ("train", "val", "exclude", "val_exclude")
        addresses: dict[str, Any] = {name: absolute(getattr(run.store, name)) for name in names}
        run = replace(run, store=replace(run.store, **addresses))
        chosen = policies(tune, run)
        for policy in chosen:  # what is wrong is told before anything starts
            build_transform(policy.transform.train, run.transform.final_size)
            check_augment(policy.augment)
        spec = spec_of(run, folder)
        if spec.columns.target is not None:
            raise ConfigError("a search compares accuracies, which only classes have: name another label_column")
        train = replace(run.train, num_workers=1, min_workers=0, num_classes=num_classes_of(run, spec))
        connect()
        gpu = preflight(run.pool, train, run.plan.per_step).gpu
        base = replace(run, storage_path=f"{folder}/trials", train=replace(train, use_gpu=gpu))
        at_once, share = share_out(cluster_resources(), base, tune.trials)
        check_memory(spec, share.max_actors, 1, at_once)
        settings = as_plain(run) | {"tune": json.loads(json.dumps(asdict(tune)))}
        write_yaml(f"{folder}/{CONFIG_FILE}", settings, CONFIG_HEAD)
        listed = "\n".join(f"{number:>10} {told(policy)}" for number, policy in enumerate(chosen))
        print(f"search     {folder}\ntrials     {at_once} at a time, of\n{listed}", flush=True)
        try:
            searched = search_runs(base, tune, chosen)
            trials = train_all(
                f"{folder}/tune/search", searched, at_once, share, searched[0].plan.epochs // 2 or 1
            )
            best = best_of(trials)
            print(f"final      {told(chosen[best])}, and the run's own, {tune.repeats} seeds each", flush=True)
            finals = final_runs(base, tune, chosen[best])
            compared = train_all(f"{folder}/tune/final", finals, at_once, share, run.plan.epochs)
        except KeyboardInterrupt:
            print(f"stopped; go on with --resume {folder.removeprefix('file://')}", flush=True)
            raise
        if failed := [each for each in compared if each["error"]]:
            raise RaypipeError(f"{finals[failed[0]['number']].name} failed: {failed[0]['error']}")
        accuracies = [each["accuracy"] for each in compared]
        first, second = accuracies[: tune.repeats], accuracies[tune.repeats :]
        verdict, text = judge(first, second)
        kept = chosen[best] if verdict["better"] else run
        print(f"{text}\nkept: {told(kept)}", flush=True)
        write_yaml(f"{folder}/best.yaml", as_plain(replace(kept, name="")), f"# {text}.\n")
        result = {
            **verdict,
            "val_accuracy": mean(first if verdict["better"] else second),
            "default_val_accuracy": mean(second),
            "policy": told(kept),
            "config": f"{folder}/best.yaml".removeprefix("file://"),
            "trials": len(trials),
            "failed": sum(bool(each["error"]) for each in trials),
            "run_dir": folder.removeprefix("file://"),
        }
        tried = [{"policy": told(policy)} | trial for policy, trial in zip(chosen, trials, strict=True)]
        comparison = {"seeds": seeds(tune, run), "best": first, "default": second}
        write_json(
            f"{folder}/report.json", {**result, "best": best, "comparison": comparison, "all_trials": tried}
        )
        return result


def absolute(address: str) -> str:
    """A local path as one that a process in any folder understands; a URI, and what is empty, as it is."""
    return str(Path(address).absolute()) if address and "://" not in address else address


def write_yaml(address: str, content: dict[str, Any], above: str = "") -> None:
    write_text(address, above + yaml.safe_dump(content, sort_keys=False))


def search_runs(base: RunConfig, tune: TuneConfig, chosen: list[RunConfig]) -> list[RunConfig]:
    """The trials: equal in all but their policies, validated after each epoch."""
    plan = replace(base.plan, epochs=tune.epochs or max(1, base.plan.epochs // 2), val_interval=1)
    return [
        replace(base, transform=policy.transform, augment=policy.augment, plan=plan, name=f"search-{number}")
        for number, policy in enumerate(chosen)
    ]


def final_runs(base: RunConfig, tune: TuneConfig, best: RunConfig) -> list[RunConfig]:
    """The trainings that are compared: of the best policy with each seed, then of the run's own with each."""
    plans = [replace(base.plan, val_interval=base.plan.epochs, seed=seed) for seed in seeds(tune, base)]
    return [
        replace(base, transform=policy.transform, augment=policy.augment, plan=plan, name=f"final-{name}-{number}")
        for name, policy in (("best", best), ("default", base))
        for number, plan in enumerate(plans)
    ]


def seeds(tune: TuneConfig, run: RunConfig) -> list[int]:
    """The seeds of the final comparison, none of which is that of the trials."""
    return np.random.SeedSequence([run.plan.seed, tune.seed]).generate_state(tune.repeats).tolist()


def best_of(trials: list[dict[str, Any]]) -> int:
    """The number of the best trial that is not the run's own policy, of those that went furthest.

    Raises:
        RaypipeError: all of them failed.
    """
    candidates = [trial for trial in trials if trial["number"] and not trial["error"]]
    if not candidates:
        raise RaypipeError(f"every trial failed, the last one so: {trials[-1]['error']}")
    return max(candidates, key=lambda trial: (trial["epochs"], trial["accuracy"]))["number"]


def judge(first: list[float], second: list[float]) -> tuple[dict[str, Any], str]:
    """Compare the accuracies of two policies, in [0, 1], with the same seeds in the same order, at least two.

    Returns:
        `better`: whether the first is, by more than chance; `gain` and `spread`: mean and standard deviation of
        the differences, first minus second; and the same in a sentence.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    gain, spread = mean(differences), stdev(differences)
    error = spread / len(differences) ** 0.5
    # With three seeds one of eleven comparisons of equals passes this by chance, with five one of seventeen
    # (Student's t).
    better = gain > 2 * error
    return {"better": better, "gain": gain, "spread": spread}, (
        f"the best policy of the search is {'better' if better else 'not better by more than chance'}: "
        f"{mean(first):.4f} against {mean(second):.4f} over {len(first)} seeds, a gain of "
        f"{100 * gain:+.2f} points with a standard error of {100 * error:.2f}"
    )


if __name__ == "__main__":
    run_job(search, __doc__, tune=TuneConfig)
