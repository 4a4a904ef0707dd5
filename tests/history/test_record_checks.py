"""Folders of runs that are damaged, or that a stranger has made: one clear error, no hang, none of their code."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pictures import picture
from without_ray import every_batch

import raypipe
from raypipe.commands.audit import audit
from raypipe.commands.replays import replay_steps
from raypipe.commands.when import print_when, when
from raypipe.config import AugmentConfig, PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import RaypipeError
from raypipe.storage.filesystem import open_filesystem
from raypipe.streaming.record.digest_log import sum_of


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with bad samples, flags and hashes."""
    root = tmp_path_factory.mktemp("runs")
    for number in range(24):
        path = root / "a" / f"class{number % 3}" / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = b"no image" if number in (4, 9) else picture(number, 8, 10)
        path.write_bytes(image)
    run = root / "run"
    spec = raypipe.open_stream(
        str(root / "a"),
        str(root / "a"),
        plan=PlanConfig(epochs=2, micro_batch_size=4, global_batch_size=8),
        transform=TransformConfig(train="small", size=8, max_bad_fraction=0.5),
        pool=PoolConfig(engine="inline"),
        quarantine=str(run / "quarantine"),
    )
    augment = AugmentConfig(preset="standard", mixup_alpha=0.4)
    with raypipe.loader(spec, run_dir=run, log_digest=True, augment=augment) as loader:
        for batch in every_batch(loader):
            loader.flag(batch, "looks odd")
    return run


@pytest.fixture
def run(sound: Path, tmp_path: Path) -> Path:
    """A copy of it, to alter."""
    copy = tmp_path / "run"
    shutil.copytree(sound, copy)
    return copy


def used(run: Path) -> list[str]:
    """The errors of all commands that look at a run."""
    folder = str(run)
    output = str(run.parent / "rows.jsonl")
    commands: list[Callable[[], Any]] = [
        lambda: replay_steps(folder, step="1..2", output=output),
        lambda: replay_steps(folder, step="2", output=str(run.parent / "step.png")),
        lambda: when(folder, "3"),
        lambda: when(folder, bad=True),
        lambda: print_when(when(folder, flagged=True)),
        lambda: audit(folder, samples=2),
    ]
    errors = []
    for command in commands:
        try:
            command()
        except RaypipeError as error:
            errors.append(str(error))
    return errors


def test_a_sound_run_has_no_errors(run: Path) -> None:
    assert used(run) == []
    assert audit(str(run), all=True)["ok"]


def altered_start(run: Path, path: tuple[Any, ...], value: Any) -> None:
    """Change a value of the run's start."""
    file = run / "metrics.jsonl"
    first, *others = file.read_text().split("\n")
    record = json.loads(first)
    inner = record
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file.write_text("\n".join([json.dumps(record), *others]))


ARGUMENTS = ("stream", "arguments")
ALTERED = [
    (("stream",), 10**30),
    (("stream", "arguments"), []),
    (("stream", "stores"), float("-inf")),
    (("stream", "stores", "train", 0), 5),
    (("stream", "stores", "train", 0, "samples"), 10**30),
    (("stream", "dtype"), "ops"),
    (("stream", "code"), {"raypipe": 5}),
    (("stream", "augment", "settings"), "x"),
    (("workers",), 0),
    (("workers",), "2"),
    ((*ARGUMENTS, "plan"), {"settings": {"unknown": 1}}),
    ((*ARGUMENTS, "plan", "settings", "epochs"), -1),
    ((*ARGUMENTS, "plan", "settings", "mixture"), {"store": 5}),
    ((*ARGUMENTS, "plan", "settings", "mixture"), {"map": [1]}),
    ((*ARGUMENTS, "filter"), {"array": "|O", "shape": [1], "bytes": "AAAAAAAAAAA="}),
    ((*ARGUMENTS, "filter"), {"array": "<i8", "shape": [10**12], "bytes": ""}),
    ((*ARGUMENTS, "columns"), {"import": "os.path"}),
    ((*ARGUMENTS, "train"), {"store": "raypipe.stores.base:Nope", "address": "/"}),
]


@pytest.mark.parametrize(("path", "value"), ALTERED, ids=map(str, range(len(ALTERED))))
def test_an_altered_start_is_a_clear_error(
    path: tuple[Any, ...], value: Any, run: Path
) -> None:
    altered_start(run, path, value)
    try:
        found = replay_steps(str(run), step="2", output="")
    except RaypipeError as error:
        told = str(error)
    else:  # its order can still be told
        told = " ".join(found["differences"])
    assert told and len(told) < 1500
    used(run)


def first_file(run: Path, folder: str) -> Path:
    return min((run / folder).glob("*.jsonl"))


CONTENTS = {
    "no text": b"\xff\xfe\0" * 100,
    "deep": b"[" * 200_000 + b"\n",
    "no numbers": b'{"index": "\\ud800", "substitute": Infinity, "error": 1, "step": NaN}\n',
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize("folder", ["quarantine", "flags"])
def test_a_damaged_file_is_named(folder: str, content: bytes, run: Path) -> None:
    file = first_file(run, folder)
    file.write_bytes(content)
    errors = used(run)
    assert errors and all(file.name in error for error in errors)


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_a_damaged_status_is_named(content: bytes, run: Path) -> None:
    (run / "status.json").write_bytes(content)
    errors = used(run)
    assert errors and all("status.json" in error for error in errors)


@pytest.mark.parametrize("target", ["/dev/zero", "itself", "a pipe"])
def test_a_link_to_a_device_is_an_error_and_is_not_read(target: str, run: Path) -> None:
    file = first_file(run, "quarantine")
    file.unlink()
    if target == "a pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(file.name if target == "itself" else target)
    assert used(run)


def test_places_that_the_run_does_not_have_are_findings_not_a_hang(run: Path) -> None:
    line = {"micro_batch": f"train-e0000-s{10**18}-m000", "hash": "0" * 32}
    line["finished"] = line["hash"]
    with first_file(run, "digests").open("a") as file:
        file.write(json.dumps(line) + "\n")
    for ending, text in (("jsonl", ""), ("json", json.dumps(sum_of(b"")))):
        path = run / "digests" / f"epoch-{10**12}-rank-0000-a.{ending}"
        path.write_text(text)
    result = audit(str(run), samples=0)
    (foreign,) = result["findings"]
    assert f"s{10**18}" in foreign["text"]


def test_a_step_of_any_size_in_the_records_is_not_a_hang(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        for step in (10**15, 10**400, "NaN"):
            file.write(f'{{"kind": "train", "step": {step}}}\n')
    result = audit(str(run), samples=0)
    assert {finding["kind"] for finding in result["findings"]} <= {"lines"}


def test_code_that_a_run_names_needs_the_word_of_trust(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "planted_here.py").write_text(
        f"open({str(run.parent / 'ran')!r}, 'w')\n\ndef crop(image):\n    return image\n"
    )
    altered_start(
        run, (*ARGUMENTS, "transform", "settings", "train"), "planted_here:crop"
    )
    monkeypatch.syspath_prepend(str(run))
    found = replay_steps(str(run), step="2", output="")
    told = " ".join(found["differences"])
    assert f"would run {run / 'planted_here.py'}" in told
    assert "--trust-run-code" in told
    assert not (run.parent / "ran").exists()
    replay_steps(str(run), step="2", output="", trust_run_code=True)
    assert (run.parent / "ran").exists()


@pytest.mark.parametrize("place", [(*ARGUMENTS, "train"), ("stream", "quarantine")])
def test_an_address_that_a_run_names_is_called_by_the_word_of_trust(
    place: tuple[str, ...], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def opened(address: str) -> Any:
        called.extend([address] * ("stranger" in address))
        return open_filesystem(address)

    for module in ("stores.addresses", "storage.files"):
        monkeypatch.setattr(f"raypipe.{module}.open_filesystem", opened)
    altered_start(run, place, "gone://stranger/a.tar")
    shutil.rmtree(run / "quarantine")
    told = str([used(run), audit(str(run), samples=0)])
    assert "names the address gone://stranger/a.tar" in told and not called
    with contextlib.suppress(RaypipeError):
        when(str(run), bad=True, trust_run_code=True)
    assert called
