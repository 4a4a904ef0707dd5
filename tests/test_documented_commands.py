"""Every command that README.md and docs/ show is run, as it stands there, in a folder that has what it names.

Streams are made small by further options behind those of the page.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import yaml
from documented import PAGES, ROOT, blocks, commands

from raypipe.commands import cli
from raypipe.kernel import is_seekable
from raypipe.launch.run_folder import CONFIG_HEAD
from raypipe.storage.filesystem import open_filesystem
from raypipe.stores import open_store
from raypipe.stores.destination import write_atomically
from raypipe.streaming.run_log import RunLog

import foreign_lmdbs  # isort: skip
import without_ray  # isort: skip
from pictures import CLASSES, picture, samples, write_tar  # isort: skip
from s3_server import environment, make_bucket, s3_server  # isort: skip
from small_runs import small_run  # isort: skip

pytestmark = [pytest.mark.cluster, pytest.mark.pages]

COMMAND = Path(sys.executable).parent / "raypipe"
SIZES = ["--transform.size=32", "--plan.micro_batch_size=16"]
SMALL = {
    "bench": ["--seconds=1", "--repeats=1", "--pool.max_actors=1", *SIZES],
    "digest": ["--pool.max_actors=1", "--plan.global_batch_size=64", *SIZES],
}
ONE_EPOCH = [
    "--plan.epochs=1",
    "--plan.micro_batch_size=8",
    "--plan.global_batch_size=16",
    "--transform.size=32",
]
ONE_CPU = ["--pool.max_actors=1", "--train.num_workers=1", "--train.cpus_per_worker=1"]
JOB = [*ONE_EPOCH, *ONE_CPU, "--train.model=small", "--train.num_classes=5"]
TUNE = ["--trials=2", "--seeds=2", "--storage_path=runs"]
ELSEWHERE = {
    **{("README.md", name): "test_jobs.py" for name in ("train", "jobs/train.py")},
    ("README.md", "digest"): "test_docs.py",
    ("llms.txt", "digest"): "here, of concepts.md",
    ("reproducibility.md", "digest"): "test_docs.py",
    **{
        ("targets.md", name): "test_docs.py" for name in ("verify", "digest", "preview")
    },
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


def run_alone(words: list[str]) -> dict[str, Any]:
    """The same in a process of its own, which starts a cluster of its own."""
    program = (
        [str(COMMAND)]
        if words[0] == "raypipe"
        else [sys.executable, str(ROOT / words[0])]
    )
    command = [*program, *words[1:], *SMALL.get(words[1], [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and this process in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def s3(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The buckets of the pages, on a server of their own."""
    with s3_server() as endpoint:
        for name, value in environment(endpoint).items():
            monkeypatch.setenv(name, value)
        for name in ("bucket", "my-bucket"):
            make_bucket(endpoint, name)
        yield


def write_folder(path: Path, num: int = 40) -> None:
    for i in range(num):
        place = path / CLASSES[i % 5] / f"{i}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(picture(i))


TESTED: set[tuple[str, str]] = set(ELSEWHERE)


def runs(
    *what: tuple[str, str],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Say which commands a test runs: pages and names."""
    TESTED.update(what)
    return lambda test: test


@runs(
    *(("quickstart.md", name) for name in ("convert", "verify", "preview")),
    ("failures.md", "verify"),
)
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


@runs(*(("look-inside.md", name) for name in ("replay", "when", "audit")))
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


@runs(("quickstart.md", "stop"), ("quickstart.md", "status"), ("failures.md", "status"))
@pytest.mark.usefixtures("s3")
def test_docs_quickstart_stops_a_run_and_tells_where_it_stands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Here it is a run in a bucket."""
    (words,), (status,) = of("quickstart.md", "stop"), of("quickstart.md", "status")
    assert words[2] == status[2] == "runs/first"
    words[2] = status[2] = "s3://my-bucket/runs/first"
    filesystem, path = open_filesystem(words[2])
    with filesystem.open_output_stream(f"{path}/config.yaml") as file:
        file.write(CONFIG_HEAD.encode())
    assert run(words, capsys)["stop_requested"]
    filesystem.open_input_stream(f"{path}/stop").close()
    run_log = RunLog(1, 0, (filesystem, path))
    run_log.begin(False, lambda: {"to_step": 90}, None)
    first = "train-e0000-s000000-m000"
    run_log.asked("train", first, lambda: "idle and wait for the reader")
    run_log._look(time.time())
    assert run(status, capsys)["waits_for"] == first
    (elsewhere,) = of("failures.md", "status")
    assert elsewhere[:-1] == status[:-1] == ["raypipe", "status"]
    run_log.closed()


@runs(("concepts.md", "digest"))
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


@pytest.mark.usefixtures("ray_cluster", "folder", "s3")
def test_docs_formats_converts_into_a_bucket(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_tar("photos.tar", samples(100))
    (convert,) = (
        words for words in of("formats.md", "convert") if words[3].startswith("s3://")
    )
    assert run(convert, capsys)["samples"] == 100 == len(open_store(convert[3]))


@runs(("performance.md", "bench"), ("clusters.md", "bench"))
@pytest.mark.soak  # tests/commands/test_bench.py has shorter ones
@pytest.mark.usefixtures("folder", "s3")
def test_the_benches_of_docs_measure_and_size_a_cluster() -> None:
    write_tar("photos.tar", samples(100))
    for words in [
        words
        for page in ("performance.md", "clusters.md")
        for words in of(page, "bench")
    ]:
        run_alone(["raypipe", "convert", "photos.tar", words[2], "--overwrite"])
        found = run_alone(words)  # it ends the cluster that it is connected to
        assert found["ratio"] > 0 and found["store"].endswith(words[2])
        assert found.get("cpus_needed", 0) > 0 or not any(
            "images-per-s" in word for word in words
        )


@pytest.mark.usefixtures("ray_cluster", "folder")
def test_the_option_seekable_of_docs_formats(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "`--seekable`" in (ROOT / "docs" / "formats.md").read_text()
    write_tar("photos.tar", samples(20))
    assert (
        run(["raypipe", "convert", "photos.tar", "train.lmdb", "--seekable"], capsys)[
            "samples"
        ]
        == 20
    )
    assert all(
        map(
            is_seekable,
            open_store("train.lmdb").read(np.arange(20), ("image",))["image"],
        )
    )


@runs(("moving.md", "convert"))
@pytest.mark.usefixtures("ray_cluster", "folder")
def test_docs_moving_converts_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(Path("train"))
    # the other is of MDS, as tests/stores/sources has it
    words, _ = of("moving.md", "convert")
    assert run(words, capsys)["samples"] == 40 == len(open_store(words[3]))


@runs(("transforms.md", "preview"), ("transforms.md", "digest"))
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


# What others wrote


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


GIVEN: dict[str, Callable[[], None]] = {
    "imagenet/train-*-of-01024": write_tfrecords,
    "my_data:samples": write_program,
    "train.h5": write_hdf5,
    "data/train-*.parquet": write_hugging_face,
    "photos.tar": lambda: write_tar("photos.tar", samples(30)),
    "train.lmdb": lambda: write_atomically("train.lmdb", samples(30), CLASSES),
}


READS = ("convert", "inspect", "preview")


@runs(*(("formats.md", name) for name in READS))
@pytest.mark.usefixtures("ray_cluster", "folder")
@pytest.mark.parametrize(
    "words",
    [
        words
        for words in of("formats.md", *READS)
        if "s3://bucket" not in " ".join(words)
    ],
    ids=" ".join,
)
def test_docs_formats_reads_what_others_wrote(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if "fine_label" in words:
        write_hugging_face("img", "fine_label")
    else:
        GIVEN[words[2]]()
    found = run(words, capsys)
    assert found["samples"] == (6 if words[1] == "preview" else 30)
    if words[1] == "convert":
        store = open_store(words[3])
        assert len(store) == 30 and "label" in tuple(store.schema.names)


LMDBS: dict[str, Callable[[list[bytes], list[int]], object]] = {
    "imagenet.lmdb": lambda images, labels: foreign_lmdbs.write_values(
        Path("imagenet.lmdb"), images, labels, foreign_lmdbs.DUMPS["pickle"]
    ),
    "lsun/*_train_lmdb": lambda images, labels: foreign_lmdbs.write_lsun(
        Path("lsun"), images, labels, CLASSES
    ),
}


@runs(*(("lmdb.md", name) for name in READS))
@pytest.mark.usefixtures("ray_cluster", "folder")
@pytest.mark.parametrize("words", of("lmdb.md", *READS), ids=" ".join)
def test_docs_lmdb_reads_those_of_others(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = samples(30)
    LMDBS[words[2]](
        [sample["image"] for sample in given], [sample["label"] for sample in given]
    )
    assert run(words, capsys)["samples"] == (6 if words[1] == "preview" else 30)


# Jobs: all that they do is done by shorter tests too

RUN_ID = "20261121-104600-3fa2"


def write_stores(*names: str) -> None:
    for i, name in enumerate(names):
        write_atomically(name, samples(160, first=1000 * i), CLASSES)


def job(words: list[str], *options: str) -> dict[str, Any]:
    """What the last line of a small run says."""
    return run_alone([*words, *JOB, *options])


@runs(("quickstart.md", "train"), ("quickstart.md", "jobs/train.py"))
@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("folder", "s3")
def test_the_runs_of_docs_quickstart_run() -> None:
    """The first, on the digits, is that of test_jobs.py."""
    _, first, resume, mine = of("quickstart.md", "train")
    write_stores("train.lmdb", "val.lmdb")
    assert job(first)["steps"] == 10
    assert run_alone(resume)["run_dir"].endswith("/runs/first")
    (verify,) = of("quickstart.md", "verify")
    run_alone(verify)
    Path("run.yaml").write_text(blocks("yaml", ROOT / "docs" / "quickstart.md")[0])
    for words in (mine, *of("quickstart.md", "jobs/train.py")):
        assert job(words)["run_dir"].startswith("s3://my-bucket/runs/")


@runs(("clusters.md", "jobs/train.py"))
@pytest.mark.soak
@pytest.mark.usefixtures("folder", "s3")
def test_the_jobs_of_docs_clusters_run() -> None:
    write_stores("val.parquet")
    for name in ("train", "val"):
        run_alone(
            ["raypipe", "convert", "val.parquet", f"s3://my-bucket/{name}.parquet"]
        )
    standing, words = of("clusters.md", "jobs/train.py")
    assert job(words)["run_dir"] == "s3://my-bucket/runs/first"
    assert job(standing, "--storage_path=runs", "--train.num_classes=10")[
        "run_dir"
    ].endswith("/runs/first")  # the digits


@runs(
    ("formats.md", "train"),
    ("transforms.md", "train"),
    ("transforms.md", "jobs/tune.py"),
)
@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("folder", "s3")
def test_the_runs_of_docs_formats_and_transforms_run() -> None:
    write_stores("train.lmdb", "val.lmdb", "val.parquet")
    local, in_bucket = of("formats.md", "train")
    assert job(local)["steps"] == 10
    for name in ("train.lmdb", "val.parquet"):
        run_alone(["raypipe", "convert", name, f"s3://bucket/{name}"])
    assert job(in_bucket)["run_dir"].startswith("s3://bucket/runs/")
    settings = yaml.safe_load(blocks("yaml", ROOT / "docs" / "transforms.md")[0])
    Path("run.yaml").write_text(
        yaml.safe_dump(
            {"store": {"train": "train.lmdb", "val": "train.lmdb"}, **settings}
        )
    )
    (words,) = of("transforms.md", "train")
    assert job(words, "--transform.val=none")["steps"] == 10
    (tune,) = of("transforms.md", "jobs/tune.py")
    assert job(tune, *TUNE, "--transform.val=none", "--transform.train=none")[
        "config"
    ].endswith("best.yaml")


def test_every_command_has_a_test() -> None:
    shown = {
        (page.name, words[1] if words[0] == "raypipe" else words[0])
        for page in PAGES
        for words in commands(page)
    }
    assert shown == TESTED
