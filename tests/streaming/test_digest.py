from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import without_ray
from small_runs import Capture, run_command

from raypipe.config import PlanConfig, RunConfig, StoreConfig, TransformConfig
from raypipe.errors import ConfigError
from raypipe.launch.run_folder import store_config
from raypipe.streaming.digest import (
    Digests,
    compare,
    plain_settings,
    read_digests,
)
from raypipe.streaming.hashes import combine
from raypipe.streaming.opening import open_stream, spec_of

Stores = dict[str, Path]

# Files

STREAM = {
    "train-e0000-s000000-m000": "aa",
    "train-e0000-s000001-m000": "bb",
    "val-e0000-s000000-m000": "cc",
}
SETTINGS = {"plan": "1234", "workers": 1, "version.numpy": "2.4"}
ONE = Digests(SETTINGS, STREAM)


def test_streams_are_compared_over_what_both_have_and_settings_are_named() -> None:
    settings = {"plan": "1234", "workers": 4, "machine": "arm64"}
    changed = {**dict(list(STREAM.items())[1:]), "val-e0000-s000000-m000": "yy"}
    assert compare(ONE, Digests(settings, changed), "one.json") == {
        "equal": False,
        "compared": 2,
        "different": 1,
        "first_different": "val-e0000-s000000-m000",
        "settings": {
            "workers": (1, 4),
            "version.numpy": ("2.4", None),
            "machine": (None, "arm64"),
        },
    }
    assert compare(ONE, ONE, "one.json")["equal"]
    nothing = Digests(SETTINGS, {"train-e0009-s000000-m000": "aa"})
    with pytest.raises(
        ConfigError,
        match=r"nothing to compare: .*one\.json and this stream cover different steps .*from-step",
    ):
        compare(ONE, nothing, "one.json")


@pytest.mark.parametrize(
    "text",
    ["null", "[]", "{}", '{"settings": {}}', '{"settings": 1, "micro_batches": {}}'],
)
def test_a_file_that_holds_no_digests(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(
        ConfigError,
        match=r"x\.json holds no digests .*raypipe digest STORE --output FILE",
    ):
        read_digests(tmp_path / "x.json")


def test_the_settings_of_a_stream_are_what_fixes_it_and_what_must_not(
    stores: Stores,
) -> None:
    config = PlanConfig(epochs=2, micro_batch_size=8, seed=3)
    spec = open_stream(
        stores["train"], stores["val"], plan=config, transform=TransformConfig(size=32)
    )
    found = plain_settings(spec, workers=2, actors=3, from_step=4, to_step=9)
    assert json.loads(json.dumps(found)) == found
    expected = {"workers": 2, "actors": 3, "from_step": 4, "to_step": 9}
    expected |= {"plan.seed": 3, "transform.size": 32, "transform.train": "light"}
    assert found.items() >= expected.items()
    assert len(str(found["plan"])) == 16 and len(str(found["val.fingerprint"])) == 32
    for name in (
        "raypipe",
        "numpy",
        "albumentations",
        "simplejpeg",
        "opencv-python-headless",
        "python",
    ):
        assert found[f"version.{name}"], name
    assert found["machine"]


# The command without Ray


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--from-step", "12"],
            "--from-step 12 --to-step 12 is empty or outside the run's 12 steps",
        ),
        (
            ["--from-step", "4", "--to-step", "4"],
            "--from-step 4 --to-step 4 is empty or outside the run's 12 steps",
        ),
        (["--to-step", "13"], "--from-step 0 --to-step 13 is empty or outside"),
        (["--output", "/nowhere/x.json"], "/nowhere/x.json cannot be written"),
        (["--compare", "/nowhere/x.json"], "/nowhere/x.json cannot be read"),
        (
            ["--store.exclude", "/nowhere/x.json"],
            "store.exclude: /nowhere/x.json cannot be read",
        ),
        (
            ["--store.exclude", "{val: /nowhere/x.json}"],
            "store.exclude: there is '/nowhere/x.json' for validation",
        ),
    ],
)
def test_a_range_or_a_file_that_cannot_be_is_told_before_ray_starts(
    args: list[str],
    message: str,
    stores: Stores,
    capsys: Capture,
) -> None:
    options = ["--plan.micro_batch_size", "8", "--plan.epochs", "1"]
    with pytest.raises(SystemExit) as caught:
        run_command(capsys, "digest", stores["train"], *options, *args)
    assert caught.value.code == 1
    assert re.match(f"error: {message}", capsys.readouterr().err)


def test_the_command_makes_the_stream_without_ray_where_it_is_asked_to(
    stores: Stores,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "raypipe.rayext.cluster.connect",
        lambda *_, **__: pytest.fail("a cluster was asked for"),
    )
    options = "--plan.epochs 2 --plan.micro_batch_size 10 --plan.global_batch_size 20 "
    options += "--transform.size 16 --from-step 3 --pool.engine inline"
    found = run_command(capsys, "digest", stores["train"], *options.split())
    plan = PlanConfig(epochs=2, micro_batch_size=10, global_batch_size=20)
    spec = open_stream(stores["train"], plan=plan, transform=TransformConfig(size=16))
    assert found["digest"] == combine(without_ray.digests(spec, 3))


def test_the_digest_of_a_run_needs_its_configuration_alone(
    stores: Stores, tmp_path: Path, capsys: Capture
) -> None:
    plan = PlanConfig(epochs=2, micro_batch_size=10, global_batch_size=20, seed=4)
    store = StoreConfig(str(stores["train"]), str(stores["val"]))
    run = RunConfig(
        store, plan, TransformConfig(train="small", val="resize", size=16), name="mine"
    )
    store_config(run, (tmp_path / "mine").as_uri())
    expected = without_ray.digests(spec_of(run, tmp_path.as_uri()), 3)
    config = tmp_path / "mine" / "config.yaml"
    options = ["--from-step", "3", "--pool.engine", "inline"]
    found = run_command(capsys, "digest", "--config", config, *options)
    assert found["digest"] == combine(expected)
