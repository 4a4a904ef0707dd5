"""Commands that docs/ show are run, as they stand there, in folders that have what they name.

Streams are made small by further options behind those of the page.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from documented import PAGES, ROOT, blocks, commands

from raypipe.commands import cli
from raypipe.launch.run_folder import CONFIG_HEAD
from raypipe.stores import open_store
from raypipe.stores.destination import write_atomically

import foreign_lmdbs  # isort: skip
import without_ray  # isort: skip
from pictures import CLASSES, picture, samples, write_tar  # isort: skip
from small_runs import small_run  # isort: skip

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
    cli.main([*words[1:], *SMALL.get(words[1], [])])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


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


@pytest.mark.usefixtures("ray_cluster", "folder")
def test_docs_concepts_audits_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    write_atomically("train.lmdb", [samples(64)[i % 64] for i in range(1600)], CLASSES)
    Path("run.yaml").write_text("store: {train: train.lmdb}\nplan: {epochs: 2}")
    digits, whole, part, of_run = of("concepts.md", "digest")
    # of 128 on the page
    assert run([*digits, "--pool.engine=inline"], capsys)["samples"] == 2 * 64
    Path(of_run[3]).parent.mkdir(parents=True)
    Path(of_run[3]).write_text(CONFIG_HEAD + Path("run.yaml").read_text())
    hashed = run([*whole, "--pool.engine=inline"], capsys)
    assert hashed["micro_batches"] == 200
    assert run([*of_run, "--pool.engine=inline"], capsys)["digest"] == hashed["digest"]
    found = run(part, capsys)
    assert found["equal"] and found["compared"] == 40


@pytest.mark.usefixtures("ray_cluster", "folder")
def test_docs_transforms_draws_steps_and_views_and_hashes_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_atomically("train.lmdb", samples(64), CLASSES)
    Path("policy.yaml").write_text(
        "transform: {train: [{RandomResizedCrop: {size: [32, 32]}}, {HorizontalFlip: }]}"
    )
    previews = of("transforms.md", "preview")
    assert [run(words, capsys)["samples"] for words in previews] == [6, 6, 6, 2]
    for digest in of("transforms.md", "digest"):
        assert run([*digest, "--pool.engine=inline"], capsys)["samples"] == 64
    assert Path("grid.png").stat().st_size > 1000


# Jobs: all that they do is done by shorter tests too


def write_stores(*names: str) -> None:
    for i, name in enumerate(names):
        write_atomically(name, samples(160, first=1000 * i), CLASSES)


def write_hugging_face(image: str = "image", label: str = "label") -> None:
    Path("data").mkdir(exist_ok=True)
    images = [{"bytes": picture(i), "path": f"{i}.jpg"} for i in range(30)]
    for split in ("train", "validation"):
        table = pa.table(
            {image: images, label: pa.array([i % 5 for i in range(30)], pa.int64())}
        )
        pa.parquet.write_table(table, f"data/{split}-00000-of-00001.parquet")


def write_hdf5() -> None:
    images = [np.frombuffer(picture(i), np.uint8) for i in range(30)]
    with h5py.File("train.h5", "w") as file:
        file["y"] = [i % 5 for i in range(30)]
        encoded = file.create_dataset("frames", (30,), h5py.vlen_dtype(np.uint8))
        for number, image in enumerate(images):
            encoded[number] = image


def write_tfrecords() -> None:
    """30 samples: 8 of TensorFlow's in each of three files, and 6 in the last."""
    Path("imagenet").mkdir()
    records = (
        ROOT / "tests" / "stores" / "data" / "tensorflow-train.tfrecord"
    ).read_bytes()
    for number in range(3):
        Path(f"imagenet/train-{number:05d}-of-01024").write_bytes(records)
    starts = [0]
    for _ in range(6):
        (length,) = struct.unpack("<Q", records[starts[-1] : starts[-1] + 8])
        starts.append(starts[-1] + 8 + 4 + length + 4)
    Path("imagenet/train-00003-of-01024").write_bytes(records[: starts[6]])


def write_program() -> None:
    Path("my_data.py").write_text(
        "from pictures import samples as drawn\ndef samples():\n    yield from drawn(30)\n"
    )


IMAGES = [picture(i) for i in range(30)]
LABELS = [i % 5 for i in range(30)]

GIVEN: dict[str, Callable[[], object]] = {
    "imagenet/train-*-of-01024": write_tfrecords,
    "my_data:samples": write_program,
    "train.h5": write_hdf5,
    "data/train-*.parquet": write_hugging_face,
    "photos.tar": lambda: write_tar("photos.tar", samples(30)),
    "train.lmdb": lambda: write_atomically("train.lmdb", samples(30), CLASSES),
    "train": lambda: write_folder(Path("train"), 30),
    "imagenet.lmdb": lambda: foreign_lmdbs.write_values(
        Path("imagenet.lmdb"), IMAGES, LABELS, foreign_lmdbs.DUMPS["pickle"]
    ),
    "lsun/*_train_lmdb": lambda: foreign_lmdbs.write_lsun(
        Path("lsun"), IMAGES, LABELS, CLASSES
    ),
}

READS = ("convert", "inspect", "preview")


@pytest.mark.usefixtures("ray_cluster", "folder")
@pytest.mark.parametrize(
    "words",
    [
        words
        for page in ("formats.md", "lmdb.md", "moving.md")
        for words in of(page, *READS)
        if words[2] in GIVEN and "s3://" not in " ".join(words)
    ],
    ids=" ".join,
)
def test_commands_of_the_pages_read_what_others_wrote(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if "fine_label" in words:
        write_hugging_face("img", "fine_label")
    else:
        GIVEN[words[2]]()
    found = run(words, capsys)
    assert found["samples"] == (6 if words[1] == "preview" else 30)
    if words[1] == "convert":
        assert len(open_store(words[3])) == 30
