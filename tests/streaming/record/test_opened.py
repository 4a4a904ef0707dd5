"""The record of a stream: stores whose files were written since."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from pictures import picture
from rewritten import rewrite
from small_streams import spec_of

import raypipe
from raypipe.config import PlanConfig
from raypipe.streaming.record import opened

IMAGE = picture(0)
SAID = "were written or replaced since the run"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / "store" / name).mkdir(parents=True)
        for number in range(4):
            (tmp_path / "store" / name / f"{number}.png").write_bytes(IMAGE)
    return tmp_path / "store"


def train_on(store: Path) -> int:
    """Continue a run, by an own loop, for two steps; returns how many it has had."""
    spec = spec_of(store, plan=PlanConfig(epochs=2, micro_batch_size=2))
    with raypipe.loader(spec, run_dir=store.parent / "run") as loader:
        for epoch in loader.epochs():
            for batch in epoch.train:
                if batch.ends_step and loader.global_step % 2 == 0:
                    loader.checkpoint()
                    return loader.global_step
    return 0


def written_in_place(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite(store / "b" / "3.png", IMAGE[-9:], bytes(9))


def replaced_by_a_copy(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(store, store.with_name("copy"))
    shutil.rmtree(store)
    store.with_name("copy").rename(store)


def on_another_machine(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced_by_a_copy(store, monkeypatch)
    monkeypatch.setattr(opened, "gethostname", lambda: "another")


def left_alone(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "is_said"),
    [
        (written_in_place, True),
        (replaced_by_a_copy, True),
        (on_another_machine, False),
        (left_alone, False),
    ],
)
def test_a_resume_and_a_replay_say_that_files_were_written_and_go_on(
    change: Any,
    is_said: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert train_on(folder) == 2 and SAID not in caplog.text
    change(folder, monkeypatch)
    differences = raypipe.replay(folder.parent / "run").differences
    assert [SAID in sentence for sentence in differences] == [True] * is_said
    caplog.clear()
    assert train_on(folder) == 4
    assert (SAID in caplog.text) == is_said


@pytest.mark.parametrize(
    "then", [None, 3, {}, {"written": 3}, {"written": {"a on another": "v"}}]
)
def test_a_record_that_tells_nothing_of_files_is_not_compared(then: Any) -> None:
    now = {"written": {"a on m": "w"}}
    assert opened.rewritten(then, now) == opened.rewritten(then, {}) == []
    assert opened.rewritten({"written": {"a on m": "v"}}, now)
