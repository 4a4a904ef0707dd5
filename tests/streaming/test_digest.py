from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import without_ray

from raypipe.commands import cli
from raypipe.commands.verify import verify
from raypipe.config import PlanConfig, RunConfig, StoreConfig, TransformConfig
from raypipe.errors import ConfigError, RaypipeError
from raypipe.launch.run_folder import store_config
from raypipe.stores import open_store
from raypipe.stores.destination import write_atomically
from raypipe.streaming.digest import (
    DigestFile,
    compare,
    iterate_digests,
    plain_settings,
)
from raypipe.streaming.hashes import combine
from raypipe.streaming.opening import open_stream, spec_of
from raypipe.streaming.pipeline import splits

from pictures import CLASSES, samples  # isort: skip

# Files

STREAM = {
    "train-e0000-s000000-m000": "aa",
    "train-e0000-s000001-m000": "bb",
    "val-e0000-s000000-m000": "cc",
}
SETTINGS = {"plan": "1234", "workers": 1, "version.numpy": "2.4"}
ONE = DigestFile("one.json", SETTINGS, STREAM)


def other(settings: dict[str, object] | None = None, **changed: str) -> DigestFile:
    changes = {name.replace("_", "-"): digest for name, digest in changed.items()}
    return DigestFile("other.json", SETTINGS | (settings or {}), STREAM | changes)


def test_the_same_streams_are_equal() -> None:
    assert compare(ONE, other()) == {
        "equal": True,
        "compared": 3,
        "different": 0,
        "first_different": None,
        "settings": {},
    }


def test_settings_that_differ_are_named_even_if_streams_are_equal() -> None:
    settings: dict[str, object] = {"workers": 4, "machine": "arm64"}
    found = compare(ONE, other(settings))
    assert found["equal"] and found["settings"] == {
        "workers": [1, 4],
        "machine": [None, "arm64"],
    }
    assert compare(other(settings), ONE)["settings"] == {
        "workers": [4, 1],
        "machine": ["arm64", None],
    }


def test_the_first_that_differs_is_the_first_of_the_stream() -> None:
    found = compare(
        ONE, other(train_e0000_s000001_m000="xx", val_e0000_s000000_m000="yy")
    )
    assert (found["equal"], found["compared"], found["different"]) == (False, 3, 2)
    assert found["first_different"] == "train-e0000-s000001-m000"


def test_only_what_both_have_is_compared() -> None:
    names = list(STREAM)
    head = DigestFile("head.json", SETTINGS, {name: STREAM[name] for name in names[:2]})
    tail = DigestFile("tail.json", SETTINGS, {name: STREAM[name] for name in names[1:]})
    assert compare(head, tail)["compared"] == compare(tail, head)["compared"] == 1
    nothing = DigestFile("x.json", SETTINGS, {"train-e0009-s000000-m000": "aa"})
    with pytest.raises(
        ConfigError,
        match=r"nothing to compare: .*one\.json and this stream cover different steps .*from-step",
    ):
        compare(ONE, nothing)


def test_what_is_written_is_read_in_the_order_of_the_stream(tmp_path: Path) -> None:
    file = DigestFile(str(tmp_path / "one.json"), SETTINGS, STREAM)
    file.write()
    assert DigestFile.read(file.address) == file
    assert list(DigestFile.read(file.address).micro_batches) == list(STREAM)


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
        DigestFile.read(tmp_path / "x.json")


def test_the_settings_of_a_stream_are_what_fixes_it_and_what_must_not(
    stores: dict[str, Path],
) -> None:
    config = PlanConfig(epochs=2, micro_batch_size=8, seed=3)
    spec = open_stream(
        stores["train"], stores["val"], plan=config, transform=TransformConfig(size=32)
    )
    found = plain_settings(spec, workers=2, actors=3, from_step=4, to_step=9)
    assert json.loads(json.dumps(found)) == found
    assert {
        name: found[name] for name in ("workers", "actors", "from_step", "to_step")
    } == {
        "workers": 2,
        "actors": 3,
        "from_step": 4,
        "to_step": 9,
    }
    assert (found["plan.seed"], found["transform.size"], found["transform.train"]) == (
        3,
        32,
        "light",
    )
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


def test_the_settings_have_the_steps(stores: dict[str, Path]) -> None:
    steps = [{"Resize": {"height": 8, "width": 8}}]
    plan = PlanConfig(micro_batch_size=8)
    spec = open_stream(
        stores["train"], plan=plan, transform=TransformConfig(train=steps)
    )
    assert spec.transforms["train"] == spec.transform.train == steps
    found = plain_settings(spec, workers=1, actors=1, from_step=0, to_step=1)
    assert json.loads(json.dumps(found))["transform.train"] == steps


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
    stores: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    import re

    with pytest.raises(SystemExit) as caught:
        cli_main(
            "digest",
            stores["train"],
            "--plan.micro_batch_size",
            "8",
            "--plan.epochs",
            "1",
            *args,
        )
    assert caught.value.code == 1
    assert re.match(f"error: {message}", capsys.readouterr().err)


def cli_main(*args: object) -> None:
    # The cluster is all tests'.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "_shutdown", lambda: None)
        cli.main([str(arg) for arg in args])


def test_the_command_makes_the_stream_without_ray_where_it_is_asked_to(
    stores: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "raypipe.rayext.cluster.connect",
        lambda *_, **__: pytest.fail("a cluster was asked for"),
    )
    options = [
        "--plan.epochs",
        2,
        "--plan.micro_batch_size",
        10,
        "--plan.global_batch_size",
        20,
    ]
    options += ["--transform.size", 16, "--from-step", 3]
    cli_main("digest", stores["train"], *options, "--pool.engine", "inline")
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    plan = PlanConfig(epochs=2, micro_batch_size=10, global_batch_size=20)
    spec = open_stream(stores["train"], plan=plan, transform=TransformConfig(size=16))
    assert found["digest"] == combine(without_ray.digests(spec, 3))


def test_the_digest_of_a_run_needs_its_configuration_alone(
    stores: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = PlanConfig(epochs=2, micro_batch_size=10, global_batch_size=20, seed=4)
    store = StoreConfig(str(stores["train"]), str(stores["val"]))
    run = RunConfig(
        store, plan, TransformConfig(train="small", val="resize", size=16), name="mine"
    )
    store_config(run, (tmp_path / "mine").as_uri())
    expected = without_ray.digests(spec_of(run, tmp_path.as_uri()), 3)
    cli_main(
        "digest",
        "--config",
        tmp_path / "mine" / "config.yaml",
        "--from-step",
        3,
        "--pool.engine",
        "inline",
    )
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["digest"] == combine(
        expected
    )
    expected = without_ray.digests(
        spec_of(replace(run, plan=replace(plan, seed=3)), tmp_path.as_uri()), 3
    )
    cli_main(
        "digest",
        "--config",
        tmp_path / "mine" / "config.yaml",
        "--plan.seed",
        3,
        "--from-step",
        3,
        "--pool.engine",
        "inline",
    )
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["digest"] == combine(
        expected
    )


def test_a_wrong_address_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli_main("digest", "foo://bucket/train.lmdb", "--pool.engine", "inline")
    assert capsys.readouterr().err.startswith(
        "error: unsupported scheme in foo://bucket/train.lmdb"
    )


# Ranges of a stream

PLAN = PlanConfig(epochs=2, micro_batch_size=8, global_batch_size=16, seed=5)
SMALL = TransformConfig(train="light", val="center", size=16)


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
class TestRanges:
    def test_a_stream_of_too_few_micro_batches_is_an_error(
        self, stores: dict[str, Path]
    ) -> None:
        spec = open_stream(str(stores["train"]), plan=PLAN, transform=SMALL)
        cut = replace(spec, plan=spec.plan.until(1))

        start = spec.plan.start()
        with pytest.raises(
            RaypipeError,
            match="rank 0 expected train-e0000-s000001-m000, the stream ended",
        ):
            list(iterate_digests(spec.plan, start, splits(cut, start, max_actors=1)))

    def test_the_command_writes_and_compares_files(
        self,
        stores: dict[str, Path],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def run(*args: object, code: int = 0) -> dict[str, Any]:
            options = [
                "--plan.epochs",
                2,
                "--plan.micro_batch_size",
                10,
                "--plan.global_batch_size",
                20,
                "--transform.size",
                16,
                "--pool.max_actors",
                1,
            ]
            with (
                pytest.raises(SystemExit)
                if code
                else contextlib.nullcontext() as caught
            ):
                cli_main("digest", stores["train"], *options, *args)
            assert caught is None or caught.value.code == code
            return json.loads(capsys.readouterr().out.splitlines()[-1])

        one, other = tmp_path / "one.json", tmp_path / "other.json"
        found = run("--to-step", 7, "--output", one, "--pool.engine", "inline")
        counts = {"samples": 140, "micro_batches": 14, "output": str(one)}
        assert found == {
            "store": str(stores["train"]),
            "digest": found["digest"],
            **counts,
        }
        written = json.loads(one.read_text())
        assert (
            combine(bytes.fromhex(d) for d in written["micro_batches"].values())
            == found["digest"]
        )
        found = run(
            "--from-step",
            5,
            "--train.num_workers",
            2,
            "--compare",
            one,
            "--output",
            other,
        )
        assert (
            found["equal"] and found["compared"] == 4 and found["micro_batches"] == 10
        )
        changed = {
            "workers": [1, 2],
            "actors": [0, 1],
            "from_step": [0, 5],
            "to_step": [7, 10],
        }
        assert found["settings"] == changed
        found = run(
            "--to-step",
            1,
            "--transform.train",
            "center",
            "--compare",
            one,
            "--pool.engine",
            "inline",
            code=1,
        )
        assert (found["equal"], found["compared"], found["different"]) == (False, 2, 2)
        assert found["first_different"] == "train-e0000-s000000-m000"
        assert found["settings"]["transform.train"] == ["light", "center"]
        assert compare(DigestFile.read(one), DigestFile.read(other))["compared"] == 4

    def test_a_stream_without_its_bad_samples(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        damaged = [
            {**s, "image": b"x"} if i in (3, 30) else s
            for i, s in enumerate(samples(50))
        ]
        write_atomically(str(tmp_path / "train.lmdb"), damaged, CLASSES)
        store = open_store(tmp_path / "train.lmdb")
        verify(store, str(tmp_path / "bad.json"))
        cli_main(
            *("digest", store.address, "--store.val", store.address),
            *("--plan.epochs", 1, "--plan.micro_batch_size", 8, "--transform.size", 16),
            *(
                "--store.exclude",
                f"{{train: {tmp_path}/bad.json, val: {tmp_path}/bad.json}}",
            ),
            *("--pool.engine", "inline"),
        )
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (found["samples"], found["micro_batches"]) == (48 + 48, 6 + 6)
