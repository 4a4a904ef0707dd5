"""Commands that docs/ show are run, as they stand there, in folders that have what they name.

Streams are made small by further options behind those of the page.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import pytest
from documented import PAGES, ROOT, blocks, commands

from raypipe.stores import open_store
from raypipe.stores.destination import write_atomically

import without_ray  # isort: skip
from pictures import CLASSES, picture, samples  # isort: skip
from small_runs import run_command, small_run  # isort: skip

pytestmark = [pytest.mark.cluster, pytest.mark.pages]

SIZES = ["--transform.size=32", "--plan.micro_batch_size=16"]
SMALL = {
    "bench": ["--seconds=1", "--repeats=1", "--pool.max_actors=1", *SIZES],
    "digest": ["--pool.max_actors=1", "--plan.global_batch_size=64", *SIZES],
}


def of(page: str, *names: str) -> list[list[str]]:
    """The commands of a page, of these names. docs/README.md has none."""
    path = next(path for path in PAGES if path.name == page)
    return [
        words
        for words in commands(path)
        if words[1 if words[0] == "raypipe" else 0] in names
    ]


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What a command's last line says."""
    assert words[0] == "raypipe"
    return run_command(capsys, *words[1:], *SMALL.get(words[1], []))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and this process in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def write_folder(path: Path, num: int = 40) -> None:
    for i in range(num):
        place = path / CLASSES[i % 5] / f"{i}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(picture(i))


@pytest.mark.usefixtures("ray_cluster", "folder")
def test_docs_quickstart_converts_verifies_and_shows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train, val = of("quickstart.md", "convert")
    for words, num in ((train, 40), (val, 20)):
        write_folder(Path(words[2]), num)
        assert run(words, capsys)["samples"] == num == len(open_store(words[3]))
    for verify in of("quickstart.md", "verify") + of("failures.md", "verify"):
        assert run(verify, capsys)["bad_samples"] == 0 and Path("bad.json").exists()
        Path("bad.json").unlink()
    (preview,) = of("quickstart.md", "preview")
    assert (
        run(preview, capsys)["samples"] == 6 and Path("grid.png").stat().st_size > 1000
    )
    exec(blocks("python", ROOT / "docs" / "quickstart.md")[0], {})
    assert "torch.Size([16, 3, 64, 64])" in capsys.readouterr().out


@pytest.mark.usefixtures("folder")
def test_docs_quickstart_uses_the_model_of_a_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_stores("train.lmdb", "val.lmdb")
    write_folder(Path("photos/val"), 1)
    small = small_run("runs", "train.lmdb", "val.lmdb", 1, 1)
    train = replace(small.train, model="resnet18")
    without_ray.train(replace(small, name="first", train=train))
    (code,) = (
        code
        for code in blocks("python", ROOT / "docs" / "quickstart.md")
        if "read_checkpoint" in code
    )
    exec(compile(code, "quickstart.md", "exec"), {})
    path, name = capsys.readouterr().out.split()[-2:]
    assert path.startswith("photos/val/") and name in CLASSES


@pytest.mark.usefixtures("folder")
def test_docs_look_inside_finds_the_planted_label(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By its three commands, as they stand there, and by what a script makes of their results."""
    program, again = blocks("python", ROOT / "docs" / "look-inside.md")
    with without_ray.one_thread():
        exec(compile(program, "look-inside.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1] == "488"
    replayed = of("look-inside.md", "replay")
    first, second = (run(words, capsys)["samples"] for words in replayed)
    in_both = {row["index"] for row in first} & {row["index"] for row in second}
    assert in_both == {977}
    # eight digits of 160 px side by side, mostly black, on white
    replayed_images = cv2.imread("replay.png")
    assert replayed_images.shape[1] > 8 * 160
    assert (replayed_images < 10).sum() > 3 * 160 * 8 * 160 / 4
    (when,) = of("look-inside.md", "when")
    (planted,) = run(when, capsys)["samples"]
    assert [draw["step"] for draw in planted["draws"]] == [168, 249, 488]
    exec(compile(again, "look-inside.md", "exec"), {})
    assert "torch.Size([8, 3, 16, 16]) 977" in capsys.readouterr().out
    for audit in of("look-inside.md", "audit"):
        result = run(audit, capsys)
        assert result.get("ok") is not False and not result.get("findings"), result


# Jobs: all that they do is done by shorter tests too


def write_stores(*names: str) -> None:
    for i, name in enumerate(names):
        write_atomically(name, samples(160, first=1000 * i), CLASSES)
