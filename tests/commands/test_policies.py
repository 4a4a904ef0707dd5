from __future__ import annotations

import dataclasses
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from raypipe.commands.settings import parse_job, parse_run
from raypipe.commands.tune import TuneConfig, policies, told
from raypipe.config import AugmentConfig, PlanConfig, RunConfig, StrengthConfig, TransformConfig
from raypipe.train.launch import check_augment
from raypipe.train.run_folder import as_plain

JOB: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "jobs" / "tune.py"))
judge, seeds = JOB["judge"], JOB["seeds"]
RUN = parse_run([], None)  # of the digits
PLAIN = RunConfig(transform=TransformConfig(train="light"), augment=AugmentConfig(mean=(0.1, 0.2, 0.3)))


# Settings


def test_the_defaults_are_described_and_frozen() -> None:
    for field in dataclasses.fields(TuneConfig):
        assert f"        {field.name}: " in (TuneConfig.__doc__ or ""), field.name
    with pytest.raises(dataclasses.FrozenInstanceError):
        TuneConfig().trials = 3  # type: ignore[misc]


@pytest.mark.parametrize(("name", "value"), [("trials", 1), ("repeats", 1), ("epochs", -1), ("seed", -1)])
def test_a_bad_number_is_wrong_usage_that_names_its_field(
    name: str, value: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_job([f"--tune.{name}={value}"], None, tune=TuneConfig)
    assert caught.value.code == 2 and f"tune.{name}" in capsys.readouterr().err


def test_the_command_line_has_the_settings_of_the_run_and_of_the_search() -> None:
    arguments = ["--tune.trials=5", "--tune.transforms=[light,heavy]", "--plan.epochs=7"]
    run, own = parse_job(arguments, None, tune=TuneConfig)
    assert own == {"tune": TuneConfig(trials=5, transforms=["light", "heavy"])}
    assert run == dataclasses.replace(RUN, plan=dataclasses.replace(RUN.plan, epochs=7))


# The list of policies


def test_the_same_seed_gives_the_same_policies_and_more_trials_only_add() -> None:
    found = policies(TuneConfig(trials=20, seed=4), RUN)
    assert found == policies(TuneConfig(trials=20, seed=4), RUN)
    assert found[:7] == policies(TuneConfig(trials=7, seed=4), RUN)
    assert found[2:] != policies(TuneConfig(trials=20, seed=5), RUN)[2:]


def test_the_runs_own_policy_and_none_are_the_first_and_none_comes_twice() -> None:
    found = policies(TuneConfig(trials=40), RUN)
    nothing = AugmentConfig(mean=RUN.augment.mean, std=RUN.augment.std)
    assert found[:2] == [RUN, dataclasses.replace(RUN, augment=nothing)]
    assert all(found.count(policy) == 1 for policy in found)
    # A run that does nothing has both in one.
    assert policies(TuneConfig(trials=2), PLAIN)[0] == PLAIN
    assert policies(TuneConfig(trials=2), PLAIN)[1].augment != PLAIN.augment


def test_every_preset_is_tried_with_and_without_its_flip_before_one_comes_again() -> None:
    presets = ["light", "standard", "strong", "randaugment", "trivialaugment"]
    found = [policy.augment for policy in policies(TuneConfig(trials=2 + 11), RUN)[2:]]
    assert sorted(augment.preset for augment in found) == sorted(["none"] * 6 + presets)
    bare = [augment.ops for augment in found if augment.preset == "none"]
    assert sorted(len(ops) for ops in bare) == [0, 1, 1, 1, 2, 5]
    assert RUN.augment.ops in bare
    assert not any(entry["op"] == "RandomHorizontalFlip" for ops in bare for entry in ops)


def test_each_policy_can_be_run_and_keeps_the_normalisation() -> None:
    for policy in policies(TuneConfig(trials=30, transforms=["heavy"]), PLAIN):
        assert (policy.augment.mean, policy.augment.std) == (PLAIN.augment.mean, PLAIN.augment.std)
        assert policy.transform.train in ("light", "heavy")
        check_augment(policy.augment)
        assert told(policy)


def test_a_transform_may_be_steps_or_a_file_of_them(tmp_path: Path) -> None:
    steps = [{"RandomResizedCrop": {"size": [8, 8]}}, {"HorizontalFlip": None}]
    (tmp_path / "mine.json").write_text(json.dumps([{"Transpose": None}]))
    given = ["heavy", steps, f"{tmp_path}/mine.json", "heavy", steps]
    _, own = parse_job([f"--tune.transforms={json.dumps(given)}", "--tune.trials=30"], None, tune=TuneConfig)
    assert own["tune"].transforms == given
    found = policies(own["tune"], PLAIN)
    texts = {json.dumps(policy.transform.train) for policy in found}
    assert texts == {json.dumps(transform) for transform in ("light", "heavy", steps, [{"Transpose": None}])}
    assert any(told(policy).startswith("RandomResizedCrop+HorizontalFlip, ") for policy in found)
    assert all(found.count(policy) == 1 for policy in found)


def test_the_strength_of_a_policy_is_that_of_its_operations() -> None:
    found = [policy.augment for policy in policies(TuneConfig(trials=60), RUN)]
    assert {augment.strength.peak for augment in found} == {0.4, 0.7, 1.0}
    assert StrengthConfig(peak=0.4, ramp_up=0.2, ramp_down=0.3).at(0.1) == pytest.approx(0.2)
    assert StrengthConfig(peak=0.4, ramp_up=0.2, ramp_down=0.4).at(0.8) == pytest.approx(0.2)
    assert StrengthConfig(peak=0.4).at(0.5) == 0.4


def test_a_policy_comes_back_from_the_yaml_of_its_run(tmp_path: Path) -> None:
    steps = [{"RandomResizedCrop": {"size": [8, 8], "scale": [1e-05, 1.0]}}]
    for number, policy in enumerate(policies(TuneConfig(trials=6, transforms=["resize", steps]), RUN)):
        run = dataclasses.replace(policy, plan=PlanConfig(epochs=3, seed=9))
        path = tmp_path / f"{number}.yaml"
        path.write_text("# why\n" + yaml.safe_dump(as_plain(run), sort_keys=False))
        assert parse_run([f"--config={path}"], None) == run


def test_policies_read_as_what_they_do() -> None:
    assert told(PLAIN) == "light, nothing else"
    assert told(RUN).startswith("small, ops Erasing, mixup_alpha 0.2, mix_prob 0.5, strength {'ramp_up': 0.0, ")
    strong = AugmentConfig(preset="strong", module="my:own")
    heavy = RunConfig(transform=TransformConfig(train="heavy"), augment=strong)
    assert told(heavy) == "heavy, preset strong, module my:own"


# The comparison


def test_the_final_seeds_are_new_and_their_own() -> None:
    found = seeds(TuneConfig(repeats=5), RUN)
    assert len(set(found)) == 5 and RUN.plan.seed not in found
    assert found[:3] == seeds(TuneConfig(repeats=3), RUN)
    other = dataclasses.replace(RUN, plan=dataclasses.replace(RUN.plan, seed=1))
    assert not set(found) & set(seeds(TuneConfig(repeats=5), other))


def test_a_gain_that_every_seed_shows_is_better() -> None:
    verdict, text = judge([0.98, 0.99, 0.985], [0.97, 0.982, 0.975])
    assert verdict["better"] and verdict["gain"] == pytest.approx(0.028 / 3)
    assert verdict["spread"] == pytest.approx(0.001155, abs=1e-6)
    assert "is better: 0.9850 against 0.9757 over 3 seeds, a gain of +0.93 points" in text
    assert "standard error of 0.07" in text


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([0.99, 0.97, 0.98], [0.97, 0.98, 0.97]),  # as likely luck
        ([0.97, 0.97, 0.97], [0.98, 0.98, 0.98]),
        ([0.98, 0.98, 0.98], [0.98, 0.98, 0.98]),
    ],
)
def test_what_may_be_luck_or_is_worse_is_not_better(first: list[float], second: list[float]) -> None:
    verdict, text = judge(first, second)
    assert not verdict["better"] and "not better by more than chance" in text


def test_differences_are_taken_seed_by_seed() -> None:
    # The seeds differ by far more than the policies.
    assert judge([0.71, 0.81, 0.91], [0.70, 0.80, 0.90])[0]["better"]
    assert not judge([0.71, 0.81, 0.91], [0.90, 0.70, 0.80])[0]["better"]
