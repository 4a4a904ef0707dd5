from __future__ import annotations

import json
from pathlib import Path

import pytest

from raypipe.commands.cli import main
from raypipe.train.run_folder import RunLog

from test_measured import CONTENT  # isort: skip


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(CONTENT))
    return path


def run(*args: object) -> None:
    main(["plan-capacity", *map(str, args)])


def test_the_table_is_for_people_and_the_last_line_is_json(
    report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(report, "--target-images-per-s", 1000, "--gpus=8", "--headroom=0")
    *shown, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert (found["actors"], found["cpu_nodes"], found["first_limit"]) == (16, 1, "execution")
    assert found["limits"]["execution"] == pytest.approx(8000 / 100 / 60)
    assert shown[-1] == found["verdict"] and "CPU nodes, by their CPUs" in "\n".join(shown)


def test_the_target_may_be_a_run(report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog((tmp_path / "run").as_uri(), 0, workers=4)
    for step in (1, 2, 3):
        log.write("train", step, images_per_s=2000.0, wait_fraction=0.5)
    log.close()
    for address in (tmp_path / "run", (tmp_path / "run").as_uri() + "/"):
        run(report, "--run", address)
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert found["images_per_s"] == 4 * 1000
    run(report, "--run", tmp_path / "run", "--gpus", 64)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["images_per_s"] == 64 * 1000


def test_what_is_missing_is_one_line_with_what_to_do(
    report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.json").write_text(json.dumps({"ceiling_images_per_s": 1000.0}))
    (tmp_path / "metrics.jsonl").write_text("no JSON\n")
    for args, message in (
        ((report,), "no target: give --target-images-per-s"),
        ((tmp_path / "old.json", "--target-images-per-s=1"), "has no field 'stream_images_per_s'"),
        ((tmp_path / "none.json", "--target-images-per-s=1"), "none.json cannot be read"),
        ((report, "--run", tmp_path / "none"), "none has no metrics.jsonl"),
        ((report, "--run", tmp_path), "has recorded no training"),
    ):
        with pytest.raises(SystemExit) as caught:
            run(*args)
        (line,) = capsys.readouterr().err.splitlines()
        assert caught.value.code == 1 and message in line
