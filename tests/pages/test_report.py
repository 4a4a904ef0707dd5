from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from recorded_runs import RECORDS, make_run, train

from raypipe.commands.audit import print_report
from raypipe.commands.cli import main
from raypipe.errors import ConfigError
from raypipe.pages import COLOURS
from raypipe.pages.report import read_run, render, write_report


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / "one")


def test_the_page_has_the_figures_charts_events_diagnosis_and_settings(run: Path) -> None:
    found = write_report(str(run))
    text = (run / "report.html").read_text()
    assert found["report"] == f"file://{run}/report.html" and found["against"] is None
    assert (found["steps"], found["images_per_s"], found["wait_fraction"]) == (30, 120.0, 0.25)
    assert (found["val_accuracy"], found["best_val_accuracy"], found["faults"]) == (0.4, 0.5, 1)
    for title in (
        "images/s",
        "waiting for data, %",
        "training loss",
        "validation accuracy",
        "of the time that is",
    ):
        assert f'aria-label="{title}' in text
    assert (
        "1 → 3 transform actors" in text
        and "The model limits the run." in text
        and "epochs: 2" in text
        and "2 trainers" in text
    )
    assert "died &lt;at&gt; train-0-1-2" in text


def test_a_run_that_goes_on_has_a_page_of_what_is_there(tmp_path: Path) -> None:
    run = make_run(tmp_path / "young", RECORDS[:2])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # being written
    assert write_report(str(run))["steps"] == 10
    make_run(tmp_path / "started", RECORDS[:1])
    found = write_report(str(tmp_path / "started"))
    assert found["steps"] == 0 and found["images_per_s"] is None


def test_bad_samples_are_counted_once_and_named(run: Path) -> None:
    record = {"step": 0, "store": "a.lmdb", "index": 7, "name": "a.lmdb, key <7>", "error": "truncated JPEG"}
    (run / "quarantine").mkdir()
    for place in ("train-0-0-1", "train-1-4-0"):
        (run / "quarantine" / f"{place}.jsonl").write_text(json.dumps(record) + "\n")
    assert write_report(str(run))["bad_samples"] == 1
    assert "a.lmdb sample 7 (a.lmdb, key &lt;7&gt;)" in (run / "report.html").read_text()


def test_two_runs_share_their_charts_and_differ_by_their_settings(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "two", [train(10), train(40)], plan={"epochs": 2, "seed": 5}, extra="<b>")
    found = write_report(str(run), str(other), str(tmp_path / "both.html"))
    text = (tmp_path / "both.html").read_text()
    assert found["against"]["steps"] == 40 and not (run / "report.html").exists()
    assert "plan.seed" in text and "plan.epochs" not in text and "&lt;b&gt;" in text
    assert text.count(f"stroke: {COLOURS[1]}") > render([read_run(str(run))]).count(f"stroke: {COLOURS[1]}")


def test_lines_that_cannot_be_read_are_left_out_and_the_page_says_so(run: Path) -> None:
    whole = write_report(str(run))
    assert whole["unreadable_lines"] == 0 and "left out" not in (run / "report.html").read_text()
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'nonsense\n[1]\n\xff\n{"kind": "val", "ste')
    (run / "quarantine").mkdir()
    (run / "quarantine" / "one.jsonl").write_text('{"store": "s", "index": 1, "step": 2}\n{"store": "s", "ind')
    (run / "quarantine" / "two.jsonl").write_text('{"store": "s", "index": 2, "step": 2}\n')
    found = write_report(str(run))
    assert found == whole | {"unreadable_lines": 4, "bad_samples": 2}
    assert "left out 4 lines that are no record, cut off or damaged" in (run / "report.html").read_text()


def test_what_is_no_run_or_a_damaged_one_is_one_error_with_its_file(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.yaml: give the folder of a run"):
        read_run(str(tmp_path))
    (run / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="it has not begun to train"):
        read_run(str(run))


def test_the_command_ends_with_the_figures_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["report", str(run), "-o", str(run / "page.html")])
    found = json.loads(capsys.readouterr().out)
    assert found["report"] == f"file://{run}/page.html" and (run / "page.html").exists()
    print_report(found)
    assert re.search(r"^  wait fraction +0\.25$", capsys.readouterr().out, re.MULTILINE)
    main(["report", f"--storage_path={run.parent}", f"--name={run.name}"])
    assert (run / "report.html").exists()
    with pytest.raises(SystemExit):
        main(["report"])
    assert capsys.readouterr().err.startswith("error: the report needs a run: give its folder")
