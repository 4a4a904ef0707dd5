"""The command `replay`, in this process; tests/history has what it shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import raypipe
from raypipe.commands.replays import print_replay, replay_steps
from raypipe.config import AugmentConfig, PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import ConfigError


@pytest.fixture(scope="module")
def run(stores: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs") / "first"
    spec = raypipe.open_stream(
        stores["train"],
        stores["val"],
        plan=PlanConfig(epochs=2, micro_batch_size=8, global_batch_size=16),
        transform=TransformConfig(train="small", val="resize", size=16),
        pool=PoolConfig(engine="inline"),
    )
    with raypipe.loader(
        spec, run_dir=folder, augment=AugmentConfig(mixup_alpha=1.0)
    ) as loader:
        for epoch in loader.epochs():
            assert len(list(epoch.train)) == 12
    return str(folder)


def names(result: dict[str, Any]) -> list[tuple[int, int]]:
    places = {(row["step"], row["micro"]): 0 for row in result["samples"]}
    return list(places)


def test_a_step_is_a_table_and_a_picture(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "step.png"
    result = replay_steps(run, step="3", output=str(picture))
    assert names(result) == [(3, 0), (3, 1)] and result["pictured"] == 16
    assert result["differences"] == []
    # Six samples a line, each with two tiles of 160 pixels.
    assert Image.open(picture).width > 12 * 160
    print_replay(result)
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == [
        *("step", "micro", "row", "index", "label", "weight", "seed", "drawn", "name")
    ]
    assert (
        "mixed with partner" in rows[0]
        and f", key {result['samples'][0]['index']}" in rows[0]
    )


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ({"step": "2..4", "micro": 1}, [(2, 1), (3, 1), (4, 1)]),
        ({"epoch": 1, "step": "2"}, [(8, 0), (8, 1)]),
        ({"epoch": 1, "rank": 0, "micro": 0}, [(step, 0) for step in range(7, 13)]),
        ({"step": "train-e0001-s000002-m001"}, [(9, 1)]),
        ({"step": "val-e0000-s000001-m000"}, [(6, 0)]),
    ],
)
def test_steps_are_named_in_several_ways(
    run: str, options: dict[str, Any], places: list[tuple[int, int]]
) -> None:
    assert names(replay_steps(run, output="", **options)) == places


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "name a step, --step N, from 1 to 12, or --epoch E"),
        ({"step": "13"}, "has the steps 1 to 12"),
        ({"step": "4..2"}, "must be a step, N, or several"),
        ({"step": "x"}, "must be a step, N, or several"),
        ({"step": "7", "epoch": 0}, "epoch 0 has the steps 1 to 6, and no step 7"),
        ({"step": "train-e0002-s000000-m000"}, "has no micro-batch train-e0002"),
        ({"step": "1", "output": "x.gif"}, "must be a .png or a .jsonl"),
    ],
)
def test_wrong_options_are_errors(
    run: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        replay_steps(run, **options)


def test_all_rows_of_a_run_go_to_a_file(run: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    result = replay_steps(run, step="1..12", output=str(file))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert result["rows"] == len(rows) == 12 * 16
    assert rows[-1]["step"] == 12


def test_a_comparison_is_printed(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = replay_steps(run, compare=run)
    assert result["equal"] is True
    print_replay(result)
    assert capsys.readouterr().out.splitlines() == [
        f"{run} and {run}",
        "  equal           yes",
        "  compared steps  12",
        "  made steps      1, 7",
    ]
