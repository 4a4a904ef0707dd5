from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import without_ray
import yaml
from small_runs import parse_run, small_run

from raypipe import logs
from raypipe.commands.cli import _finish
from raypipe.config import (
    AugmentConfig,
    PlanConfig,
    RunConfig,
    StoreConfig,
    TrainConfig,
    TransformConfig,
)
from raypipe.errors import ConfigError, CursorError, RaypipeError
from raypipe.launch.run import _as_run_error, _how_to_continue, _withdraw_stop, launch
from raypipe.launch.run_checks import check_model, num_classes_of
from raypipe.launch.run_folder import as_plain, store_config
from raypipe.launch.summary import changes, summarize
from raypipe.metrics.records import read_records
from raypipe.plan.places import Cursor
from raypipe.rayext.allocation import Allocation
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.opening import open_stream, spec_of
from raypipe.streaming.saving.checkpoints import write_checkpoint
from raypipe.streaming.saving.stateful import saved, states_of
from raypipe.streaming.spec import StreamSpec
from raypipe.train.learning import Learner

STEPS = [
    {"RandomResizedCrop": {"size": [8, 8], "scale": [1e-05, 1.0]}},
    {"HorizontalFlip": None},
]
RUN = RunConfig(
    store=StoreConfig(train="train.lmdb", val="val.lmdb"),
    transform=TransformConfig(train=STEPS, val=STEPS[:1]),
    plan=PlanConfig(epochs=1, micro_batch_size=2),
    augment=AugmentConfig(mean=(0.1, 0.2, 0.3)),
    name="mine",
    resume="runs/other",
)


def spec(*classes: str) -> StreamSpec:
    return open_stream(MemoryStore([b""] * 4, [0] * 4, classes), plan=RUN.plan)


# Credentials


@pytest.mark.parametrize(
    "setting",
    [
        "store.train={}",
        "store.val={}",
        "store.exclude={}",
        "store.exclude={{val: {}}}",
        "storage_path={}",
        "resume={}",
        "plan={}",
    ],
)
def test_credentials_in_an_address_are_neither_shown_nor_kept(
    setting: str,
    stores: dict[str, Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"store: {{train: {stores['train']}, val: {stores['val']}}}\nstorage_path: {tmp_path}/runs\n"
    )
    given = [
        f"--config={config}",
        "--" + setting.format("s3://AKIA:SE/CRET@bucket/a.yaml"),
    ]
    with pytest.raises(SystemExit):
        _finish(lambda: launch(parse_run(given, None)))
    shown = "".join(capfd.readouterr())
    assert "CRET@" not in shown and (
        setting == "plan={}" or "s3://…@bucket/a.yaml" in shown
    )
    assert (
        setting == "plan={}"
        or "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment" in shown
    )
    kept = [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and "CRET@" in path.read_text()
    ]
    assert not kept


# The stored configuration


def test_as_plain_is_safe_yaml_without_the_resume() -> None:
    plain = as_plain(RUN)
    assert yaml.safe_load(yaml.safe_dump(plain)) == plain
    assert plain["augment"]["mean"] == [0.1, 0.2, 0.3]
    assert plain.keys() == {field.name for field in dataclasses.fields(RunConfig)} - {
        "resume",
        "trust_run_code",
    }


def test_the_stored_configuration_is_the_one_that_a_resume_reads(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "runs" / "mine"
    store_config(RUN, folder.as_uri())
    assert parse_run([f"--resume={folder}"], None) == dataclasses.replace(
        RUN, resume=str(folder)
    )
    again = parse_run([f"--resume={folder}", "--transform.train=heavy"], None)
    assert (again.transform.train, again.transform.val) == ("heavy", STEPS[:1])


def test_a_run_that_leaves_gpus_idle_says_so_with_the_setting() -> None:
    allocation = Allocation(1, True, 1.0, 5, idle_gpus=7)
    shown = summarize(RUN, spec("a"), allocation, "file:///runs/mine")
    assert "trainers   1 x GPU\nidle GPUs  7 of 8" in shown
    assert (
        "set plan.global_batch_size to 16 or" in shown
        and "train.num_workers=1 if this is intended" in shown
    )


# The number of classes


def test_the_number_of_classes_is_the_stores_unless_it_is_set() -> None:
    named = spec("a", "b", "c")
    assert num_classes_of(RUN, named) == 3
    assert (
        num_classes_of(
            dataclasses.replace(
                RUN, train=TrainConfig(model={"name": "small", "num_classes": 9})
            ),
            named,
        )
        == 9
    )


# What is refused, and what is left


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


REFUSED: dict[str, tuple[str, Any, str]] = {
    "seed": ("plan", {"seed": 7}, "made under plan"),
    "batch": ("plan", {"micro_batch_size": 4}, "made under plan"),
    "skip": ("plan", {"skip": ["1..1"]}, "plan.skip before the checkpoint's step 1"),
    "store": ("store", {"train": "val"}, "made under plan"),
    "no store": ("store", {"train": "nowhere"}, "nowhere does not exist"),
    "filter": ("store", {"filter": "nothing > 3"}, "nothing"),
    "model": ("train", {"model": "resnet18"}, "has train.model=small: leave it out"),
    "outputs": (
        "train",
        {"model": {"name": "small", "num_classes": 9}},
        "its num_classes as they were",
    ),
    "own model": ("train", {"model": "lost:net"}, "train.model 'lost:net'"),
    "optimizer": ("train", {"optimizer": "adamw"}, "set train.optimizer to sgd"),
    "own optimizer": ("train", {"optimizer": "lost:sgd"}, "'lost:sgd' cannot be"),
    "loss": ("train", {"loss": "lost:loss"}, "'lost:loss' cannot be imported"),
    "transform": ("transform", {"train": "lost:make"}, "'lost:make' cannot be"),
    "module": ("augment", {"module": "lost:make"}, "'lost:make' cannot be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_of_a_resume_leaves_every_file_as_it_was(
    name: str, stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No refusal comes after the connection to Ray, before which nothing is written."""
    monkeypatch.setattr("raypipe.launch.run.connect", lambda **options: 1 / 0)
    store = StoreConfig(str(stores["train"]), str(stores["val"]))
    small = TrainConfig(model={"name": "small", "num_classes": 5})
    run = dataclasses.replace(
        RUN,
        store=store,
        train=small,
        storage_path=str(tmp_path),
        resume="",
        transform=TransformConfig(),
    )
    uri = (tmp_path / "mine").as_uri()
    store_config(run, uri)
    learner = Learner(run, 5, torch.device("cpu"), 1)
    for parameter in learner._model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    learner._optimizer.step()
    state = saved(states_of(learner.parts()))
    write_checkpoint(
        uri,
        Cursor(0, 1, spec_of(run, uri).plan.fingerprint),
        state,
        {"steps": 1},
        described={"model": "small"},
    )
    (tmp_path / "mine" / "error.txt").write_text("an earlier one\n")
    (tmp_path / "mine" / "stop").touch()
    found = tree(tmp_path)
    resumed = dataclasses.replace(run, resume=str(tmp_path / "mine"))
    section, values, told = REFUSED[name]
    if values.get("train") in stores:
        values = {"train": str(stores[values["train"]])}
    changed = dataclasses.replace(getattr(run, section), **values)
    with pytest.raises(RaypipeError, match=re.escape(told)):
        launch(dataclasses.replace(resumed, **{section: changed}))
    assert tree(tmp_path) == found
    with pytest.raises(ZeroDivisionError):
        launch(resumed)


def test_a_request_that_cannot_be_removed_hides_neither_result_nor_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _withdraw_stop("nowhere://bucket")
    assert (
        "cannot remove the request to stop: ConfigError: unsupported scheme"
        in caplog.text
    )


def test_a_stopped_run_is_told_how_to_continue(tmp_path: Path) -> None:
    uri = tmp_path.as_uri()
    command = f"Continue with: raypipe train --resume {tmp_path}"
    told = _how_to_continue(RunConfig(), uri)
    assert told == f"stopped before the first checkpoint. {command}"
    name = write_checkpoint(uri, Cursor(0, 1, "f" * 16), b"x", {})
    assert _how_to_continue(RunConfig(), uri) == f"stopped with {name}. {command}"
    told = _how_to_continue(
        dataclasses.replace(RunConfig(), train=TrainConfig(model="mine:net")), uri
    )
    assert told.endswith(" --trust-run-code")


def test_other_codes_errors_are_a_message_with_the_traceback_in_a_file(
    tmp_path: Path,
) -> None:
    try:
        raise ValueError("in the user's code")
    except ValueError as error:
        told = _as_run_error(error, RUN, tmp_path.as_uri())
    assert (
        str(told) == f"ValueError: in the user's code (traceback: {tmp_path}/error.txt)"
    )
    assert "Traceback (most recent call last)" in (tmp_path / "error.txt").read_text()
    ours = ConfigError("plan.epochs")
    assert _as_run_error(ours, RUN, tmp_path.as_uri()) is ours
    assert (tmp_path / "error.txt").read_text() == "plan.epochs\n"


def test_a_resume_with_other_settings_names_them_with_both_values(
    tmp_path: Path,
) -> None:
    uri = tmp_path.as_uri()
    store_config(RUN, uri)
    assert changes(RUN, uri) == ""
    plan, train = (
        dataclasses.replace(RUN.plan, seed=7),
        dataclasses.replace(RUN.train, lr=0.5),
    )
    changed = changes(dataclasses.replace(RUN, plan=plan, train=train), uri)
    assert changed == "plan.seed=7 (was 0), train.lr=0.5 (was 0.0)"
    (tmp_path / "config.yaml").write_text("{")
    assert changes(RUN, uri) == ""


@pytest.mark.parametrize(
    ("split", "steps"),
    [("train", [1, 16, 32]), ("val", [16, 16, 32])],  # and at the ends of the epochs
)
def test_a_notice_is_a_fault_and_leads_to_a_checkpoint_at_the_next_step(
    stores: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    split: str,
    steps: list[int],
) -> None:
    written: list[int] = []

    def write(run_uri: str, at: Cursor, *args: Any, **options: Any) -> str:
        written.append(at.epoch * 16 + at.step)
        return write_checkpoint(run_uri, at, *args, **options)

    notice = SimpleNamespace(
        preempted_node_ids=["abcdefghij"], preempted_ranks=[0], deadline_ms=None
    )
    noticed = lambda: notice if logs._place.get("split") == split else None  # noqa: E731
    monkeypatch.setattr("raypipe.rayext.trainer_notice.noticed", noticed)
    monkeypatch.setattr(
        "raypipe.streaming.saving.run_checkpoints.write_checkpoint", write
    )
    run = small_run(
        tmp_path, stores["train"], stores["val"], 2, 1, checkpoint_interval=0
    )
    result = without_ray.train(run)
    assert written == steps
    records = read_records(Path(result["run_dir"]).as_uri())
    faults = [
        (each["step"], each["text"]) for each in records if each["kind"] == "fault"
    ]
    assert faults == [
        (
            steps[0],
            "the node of trainers 0 is about to go (abcdefgh): making a checkpoint",
        )
    ]


def test_an_ended_run_says_so_and_has_its_result_without_ray(
    stores: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = dataclasses.replace(
        small_run(tmp_path, stores["train"], stores["val"], 1, 4), name="mine"
    )
    expected = without_ray.train(run)
    monkeypatch.setattr(
        "raypipe.launch.run.connect", lambda **_: pytest.fail("it starts Ray")
    )
    for resume in ("auto", str(tmp_path / "mine")):
        found = launch(dataclasses.replace(run, resume=resume))
        assert not found["stopped"]
        for name in ("steps", "val_accuracy", "run_dir"):
            assert found[name] == expected[name]
        assert (
            "this run has already ended, with checkpoint_0001_0000000_"
            in capsys.readouterr().out
        )
    last = max((tmp_path / "mine").glob("checkpoint_*")) / "state.pt"
    last.write_bytes(last.read_bytes()[:-1] + b"x")  # no trainer would read it
    with pytest.raises(
        ConfigError, match=r"no checkpoint of .* can be read \(.*state\.pt has changed"
    ):
        launch(dataclasses.replace(run, resume="auto"))


def test_a_new_run_says_its_starting_checkpoint_or_why_there_is_none(
    stores: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(**_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("raypipe.launch.run.connect", interrupted)
    (tmp_path / "old").mkdir()
    run = small_run(
        tmp_path, stores["train"], stores["val"], 1, 4, start_from=str(tmp_path / "old")
    )
    run = dataclasses.replace(run, name="new")
    with pytest.raises(ConfigError, match="start_from: no raypipe checkpoint"):
        launch(run)
    spec, old = spec_of(run, (tmp_path / "new").as_uri()), (tmp_path / "old").as_uri()
    name = write_checkpoint(old, spec.plan.cursor_at(4), b"x", {})  # its last
    with pytest.raises(KeyboardInterrupt):
        launch(run)
    assert f"starting from {old}/{name}" in capsys.readouterr().out
    with pytest.raises(CursorError, match="made under plan"):
        launch(dataclasses.replace(run, plan=dataclasses.replace(run.plan, seed=7)))


def test_four_channels_go_to_the_small_model_and_not_to_torchvisions() -> None:
    check_model("small", 4)
    with pytest.raises(
        ConfigError, match=r"train\.model='resnet18' needs three channels, .* has 4"
    ):
        check_model("resnet18", 4)
