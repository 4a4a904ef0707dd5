from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raypipe.commands import cli
from raypipe.config import PlanConfig, TransformConfig
from raypipe.errors import ConfigError
from raypipe.streaming.digest_file import Comparison, DigestFile, compare, settings_of
from raypipe.streaming.pipeline import StreamSpec

STREAM = {"train-e0000-s000000-m000": "aa", "train-e0000-s000001-m000": "bb", "val-e0000-s000000-m000": "cc"}
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


def test_settings_that_differ_are_named_whether_the_streams_are_equal_or_not() -> None:
    settings: dict[str, object] = {"workers": 4, "machine": "arm64"}
    found = compare(ONE, other(settings))
    assert found["equal"] and found["settings"] == {"workers": [1, 4], "machine": [None, "arm64"]}
    assert compare(other(settings), ONE)["settings"] == {"workers": [4, 1], "machine": ["arm64", None]}


def test_the_first_that_differs_is_the_first_of_the_stream() -> None:
    found = compare(ONE, other(train_e0000_s000001_m000="xx", val_e0000_s000000_m000="yy"))
    assert (found["equal"], found["compared"], found["different"]) == (False, 3, 2)
    assert found["first_different"] == "train-e0000-s000001-m000"


def test_only_what_both_have_is_compared() -> None:
    names = list(STREAM)
    head = DigestFile("head.json", SETTINGS, {name: STREAM[name] for name in names[:2]})
    tail = DigestFile("tail.json", SETTINGS, {name: STREAM[name] for name in names[1:]})
    assert compare(head, tail)["compared"] == compare(tail, head)["compared"] == 1
    nothing = DigestFile("x.json", SETTINGS, {"train-e0009-s000000-m000": "aa"})
    with pytest.raises(ConfigError, match=r"one\.json has no micro-batch of this stream: .*from_step"):
        compare(ONE, nothing)


def test_a_stream_is_compared_as_it_comes() -> None:
    comparison = Comparison(ONE)
    for number, (name, digest) in enumerate(STREAM.items()):
        comparison.add(name, digest)
        assert comparison.num_compared == number + 1 and comparison.first_different is None
    assert comparison.summary(SETTINGS)["equal"]


def test_what_is_written_is_read_in_the_order_of_the_stream(tmp_path: Path) -> None:
    file = DigestFile(str(tmp_path / "one.json"), SETTINGS, STREAM)
    file.write()
    assert DigestFile.read(file.address) == file
    assert list(DigestFile.read(file.address).micro_batches) == list(STREAM)


@pytest.mark.parametrize("text", ["null", "[]", "{}", '{"settings": {}}', '{"settings": 1, "micro_batches": {}}'])
def test_a_file_that_holds_no_digests(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json holds no digests .*raypipe digest STORE --output FILE"):
        DigestFile.read(tmp_path / "x.json")


def test_the_settings_of_a_stream_are_what_fixes_it_and_what_must_not(stores: dict[str, Path]) -> None:
    config = PlanConfig(epochs=2, micro_batch=8, seed=3)
    spec = StreamSpec.of(stores["train"], stores["val"], plan=config, transform=TransformConfig(size=32))
    found = settings_of(spec, workers=2, actors=3, from_step=4, to_step=9)
    assert json.loads(json.dumps(found)) == found
    assert {name: found[name] for name in ("workers", "actors", "from_step", "to_step")} == {
        "workers": 2,
        "actors": 3,
        "from_step": 4,
        "to_step": 9,
    }
    assert (found["plan.seed"], found["transform.size"], found["transform.train"]) == (3, 32, "light")
    assert len(str(found["plan"])) == 16 and len(str(found["val.fingerprint"])) == 32
    for name in ("raypipe", "numpy", "albumentations", "simplejpeg", "opencv-python-headless", "python"):
        assert found[f"version.{name}"], name
    assert found["machine"]


def test_the_settings_have_the_steps_of_a_file(stores: dict[str, Path], tmp_path: Path) -> None:
    steps = [{"Resize": {"height": 8, "width": 8}}]
    (tmp_path / "mine.json").write_text(json.dumps(steps))
    settings: dict[str, Any] = {"plan": PlanConfig(micro_batch=8)}
    for transform in (TransformConfig(train=str(tmp_path / "mine.json")), TransformConfig(train=steps)):
        spec = StreamSpec.of(stores["train"], transform=transform, **settings)
        assert spec.transforms["train"] == spec.transform.train == steps
        found = settings_of(spec, workers=1, actors=1, from_step=0, to_step=1)
        assert json.loads(json.dumps(found))["transform.train"] == steps
    spec = StreamSpec.of(stores["train"], train_transform=str(tmp_path / "mine.json"), **settings)
    assert spec.transforms["train"] == steps


def test_the_command_ends_with_code_1_where_streams_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(tmp_path / name) for name in ("one.json", "same.json", "different.json")]
    for path, file in zip(paths, (ONE, other({"workers": 4}), other(val_e0000_s000000_m000="x")), strict=True):
        DigestFile(path, file.settings, file.micro_batches).write()
    cli.main(["digest-diff", paths[0], paths[1]])
    out = capsys.readouterr().out
    assert "equal over 3 micro-batches" in out and "1 / 4" in out
    assert json.loads(out.splitlines()[-1])["equal"] is True
    with pytest.raises(SystemExit) as caught:
        cli.main(["digest-diff", paths[0], paths[2]])
    assert caught.value.code == 1
    captured = capsys.readouterr()
    assert "1 of 3 micro-batches differ" in captured.out and "val-e0000-s000000-m000" in captured.out
    assert json.loads(captured.out.splitlines()[-1])["equal"] is False and captured.err == ""
