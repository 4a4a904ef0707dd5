"""Augmentation policies: which ones a search tries, and whether one is better than another. Pure.

A policy is the CPU transform of training and what AugmentConfig says, normalisation apart. The policies of a
search are drawn by its seed alone, before it begins: nothing of how it goes changes the list.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from raypipe.config import AugmentConfig, RunConfig, StrengthConfig
from raypipe.errors import ConfigError
from raypipe.transform.transform_steps import Steps, brief, without_files


@dataclass(frozen=True)
class TuneConfig:
    """A search for an augmentation policy.

    Attributes:
        trials: policies to try, of which the first are the run's own and none at all.
        epochs: of a trial; 0 = half of plan.epochs.
        repeats: seeds with which the best policy and the run's own are compared in the end.
        final_epochs: of each run of that comparison; 0 = plan.epochs.
        final_val: store on which they are compared, of samples that the search has not seen; empty = store.val.
        transforms: CPU transforms of training to choose from, beside transform.train, each as that may be.
        grace_epochs: epochs before a trial may be stopped; 0 = half of its own. What is strong is slow at first.
        keep: share of the trials, by their accuracy, that go on at each milestone: grace_epochs, and 1 / keep, …
            times as many.
        seed: of the list of policies; plan.seed is that of all trials.
        max_concurrent: trials at one time; 0 = one per GPU, or per CPU where there are no GPUs.
    """

    trials: int = 12
    epochs: int = 0
    repeats: int = 3
    final_epochs: int = 0
    final_val: str = ""
    transforms: list[str | list[dict[str, Any]]] = field(default_factory=list)
    grace_epochs: int = 0
    keep: float = 0.5
    seed: int = 0
    max_concurrent: int = 0

    def __post_init__(self) -> None:
        least = {"trials": 2, "repeats": 2}  # two seeds have a spread
        for name in ("trials", "repeats", "epochs", "final_epochs", "grace_epochs", "seed", "max_concurrent"):
            if getattr(self, name) < least.get(name, 0):
                raise ConfigError(f"tune.{name} must be at least {least.get(name, 0)}, got {getattr(self, name)}")
        if not 0 < self.keep < 1:
            raise ConfigError(f"tune.keep must be in (0, 1), got {self.keep}")

    def without_files(self) -> TuneConfig:
        """The same with the steps in place of the files that hold them, see `config_without_files`."""
        return replace(self, transforms=[without_files(transform) for transform in self.transforms])


@dataclass(frozen=True)
class Policy:
    """How the training images of a run are changed.

    The transform is on the CPU, see `transform.train`, and the augmentation on the device.
    """

    transform: str | Steps
    augment: AugmentConfig

    @staticmethod
    def of(run: RunConfig) -> Policy:
        return Policy(run.transform.train, run.augment)

    def applied(self, run: RunConfig) -> RunConfig:
        """A run with this policy."""
        return replace(run, transform=replace(run.transform, train=self.transform), augment=self.augment)

    def __str__(self) -> str:
        plain = AugmentConfig(mean=self.augment.mean, std=self.augment.std)
        parts = [f"{name} {value}" for name, value in _changes(self.augment, plain).items()]
        return ", ".join([brief(self.transform), *(parts or ["nothing else"])])


def _changes(settings: Any, default: Any) -> dict[str, Any]:
    """The settings that are not the default ones, for people: strength by its own, operations by their names."""
    found = {name: value for name, value in vars(settings).items() if value != getattr(default, name)}
    if "ops" in found:
        found["ops"] = "+".join(str(entry["op"]).removeprefix("Random") for entry in found["ops"])
    if "strength" in found:
        of_strength = _changes(found["strength"], StrengthConfig()).items()
        found["strength"] = " ".join(f"{name} {value:g}" for name, value in of_strength)
    return found


def policies(tune: TuneConfig, run: RunConfig) -> list[Policy]:
    """The policies that a search tries: the run's own, none, and what is drawn; all have the run's normalisation.

    Raises:
        ConfigError: there are not so many different ones.
    """
    nothing = Policy(run.transform.train, AugmentConfig(mean=run.augment.mean, std=run.augment.std))
    found = {_meaning(policy): policy for policy in (Policy.of(run), nothing)}
    rng = np.random.default_rng(tune.seed)
    transforms = unlike([run.transform.train, *tune.transforms])
    rounds: list[AugmentConfig] = []
    for _ in range(100 * tune.trials):
        if len(found) >= tune.trials:
            return list(found.values())[: tune.trials]
        if not rounds:  # each set of operations once, before one comes again
            rounds = _operation_sets(run.augment)
            rng.shuffle(rounds)  # type: ignore[arg-type]
        policy = Policy(transforms[int(rng.integers(len(transforms)))], _drawn(rounds.pop(), rng))
        found.setdefault(_meaning(policy), policy)
    raise ConfigError(f"tune.trials={tune.trials}: only {len(found)} different policies were found")


def unlike(transforms: Iterable[str | Steps]) -> list[str | Steps]:
    """Each transform once, in their order."""
    return list({json.dumps(transform, sort_keys=True): transform for transform in transforms}.values())


def _operation_sets(own: AugmentConfig) -> list[AugmentConfig]:
    """The run's own operations, none, and Kornia's presets with and without their flip; nothing is mixed."""
    from raypipe.device.augment import PRESETS  # seconds of imports

    plain = AugmentConfig(mean=own.mean, std=own.std)
    sets = [plain]
    if own.preset != "none" or own.ops or own.module:
        sets.append(replace(plain, preset=own.preset, ops=own.ops, module=own.module))
    for name, ops in PRESETS.items():
        without = [entry for entry in ops if entry["op"] != "RandomHorizontalFlip"]
        if ops:
            sets.append(replace(plain, preset=name))  # type: ignore[arg-type]
        if without:  # digits and letters are others when they are flipped
            sets.append(replace(plain, ops=json.loads(json.dumps(without))))
    return sets


def _drawn(operations: AugmentConfig, rng: np.random.Generator) -> AugmentConfig:
    """A set of operations with mixing and a strength; every call draws the same number of values."""
    kind = ("", "", "mixup", "cutmix", "both")[int(rng.integers(5))]
    # Alphas of the papers are 0.1 to 1, and their scale is one of ratios.
    mixup, cutmix = (round(float(10**exponent), 2) for exponent in rng.uniform(-1, 0, 2))
    mix_prob, peak = float(rng.choice([0.5, 1.0])), float(rng.choice([0.4, 0.7, 1.0]))
    ramp_up, ramp_down = float(rng.choice([0.0, 0.2])), float(rng.choice([0.0, 0.3]))
    mixed = replace(
        operations,
        mixup_alpha=mixup if kind in ("mixup", "both") else 0.0,
        cutmix_alpha=cutmix if kind in ("cutmix", "both") else 0.0,
        mix_prob=mix_prob if kind else 1.0,
    )
    if mixed == replace(mixed, preset="none", ops=[], module="", mixup_alpha=0.0, cutmix_alpha=0.0):
        return mixed  # there is nothing to be strong
    return replace(mixed, strength=StrengthConfig(peak=peak, ramp_up=ramp_up, ramp_down=ramp_down))


def _meaning(policy: Policy) -> str:
    return json.dumps([policy.transform, asdict(policy.augment)], sort_keys=True)


def seeds(tune: TuneConfig, run: RunConfig) -> list[int]:
    """The seeds of the final comparison, none of which is that of the trials."""
    drawn = np.random.SeedSequence([run.plan.seed, tune.seed]).generate_state(tune.repeats)
    return [int(seed) for seed in drawn]


# A mean of so many standard errors above zero counts as more than chance: with three seeds one of eleven such
# comparisons of equals says so, with five one of seventeen (Student's t).
_ERRORS = 2.0


@dataclass(frozen=True)
class Verdict:
    """Of two policies that were trained with the same seeds.

    Attributes:
        better: whether the first is better, by more than chance.
        gain, spread: mean and standard deviation of the differences in accuracy, first minus second.
        text: the same in a sentence.
    """

    better: bool
    gain: float
    spread: float
    text: str


def judge(first: list[float], second: list[float]) -> Verdict:
    """Compare the accuracies of two policies, in [0, 1], with the same seeds in the same order, at least two."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    gain, spread = statistics.mean(differences), statistics.stdev(differences)
    error = spread / len(differences) ** 0.5
    better = gain > _ERRORS * error
    figures = (
        f"{statistics.mean(first):.4f} against {statistics.mean(second):.4f} over {len(first)} seeds, a gain of "
        f"{100 * gain:+.2f} points with a standard error of {100 * error:.2f}"
    )
    verdict = "better" if better else "not better by more than chance"
    return Verdict(better, gain, spread, f"the best policy of the search is {verdict}: {figures}")
