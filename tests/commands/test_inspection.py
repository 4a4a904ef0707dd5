"""What a store is; its bad samples, found on Ray and left out of a run."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from small_runs import run_command

from raypipe.commands import cli
from raypipe.commands.checked_samples import check_samples
from raypipe.commands.inspection import describe
from raypipe.commands.verify import print_verified, verify
from raypipe.config import PlanConfig
from raypipe.stores import open_store
from raypipe.stores.destination import write_atomically
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.opening import open_stream

from pictures import CLASSES, picture  # isort: skip

BAD: dict[int, bytes] = {3: b"", 300: picture(300)[:-100], 599: b"no image"}
NUM = 600


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An LMDB store of 600 samples, three of them bad."""
    path = tmp_path_factory.mktemp("damaged") / "train.lmdb"
    samples = [
        {"image": BAD.get(i, picture(i % 50)), "label": i % 5} for i in range(NUM)
    ]
    write_atomically(str(path), samples, CLASSES)
    return path


# A description


def test_a_description_names_what_the_store_is(stores: dict[str, Path]) -> None:
    for name, kind, groups in (("train", "lmdb", None), ("parquet", "parquet", 10)):
        store = open_store(stores[name])
        found = describe(store)
        sizes = found.pop("image_bytes")
        assert 100 * sizes[0] <= found.pop("bytes") <= 100 * sizes[2]
        assert sizes == sorted(sizes) and 100 < sizes[0] < sizes[2] < 10_000
        assert found == {
            "store": str(stores[name]),
            "kind": kind,
            "samples": 100,
            "columns": {"image": "images", "label": "int64", "name": "text"},
            "classes": 5,
            "groups": groups,
            "fingerprint": store.fingerprint,
            "sampled": 64 if groups is None else found["sampled"],
            "formats": {"JPEG": found["sampled"]},
            "height_px": [40, 40, 40],
            "width_px": [48, 48, 48],
            "bad_samples": 0,
        }
        assert 40 <= found["sampled"] <= 64


def test_bad_samples_and_empty_stores_are_described_as_well() -> None:
    found = describe(MemoryStore([None, b"x", picture(0)], None))
    assert (found["sampled"], found["bad_samples"], found["formats"]) == (
        3,
        2,
        {"unknown": 2, "JPEG": 1},
    )
    assert (
        found["image_bytes"][0] == 0
        and found["classes"] is None
        and [*found["columns"]] == ["image", "name"]
    )
    found = describe(MemoryStore([], []))
    assert (
        found["samples"],
        found["sampled"],
        found["height_px"],
        found["image_bytes"],
    ) == (0, 0, None, None)


# The command without Ray


def test_the_command_prints_the_description(
    stores: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_command(capsys, "inspect", stores["train"])
    assert found == describe(open_store(stores["train"]))
    cli.print_result(found)
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading == str(stores["train"]) and not any("groups" in row for row in rows)
    shown = {"  formats      64 JPEG", "  height       40–40 px (median 40)"}
    assert shown <= set(rows)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["inspect", "/nowhere.lmdb"], "error: /nowhere.lmdb does not exist"),
        (["verify", "/nowhere.lmdb"], "error: /nowhere.lmdb does not exist"),
        (["verify", "BROKEN"], "error: .*broken.parquet is truncated or not Parquet"),
        (
            ["verify", "STORE", "-o", "/nowhere/x.json"],
            "error: /nowhere/x.json cannot be written",
        ),
    ],
)
def test_an_error_is_told_at_once_with_code_1(
    args: list[str],
    message: str,
    stores: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import re

    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    paths = {"STORE": str(stores["train"]), "BROKEN": str(tmp_path / "broken.parquet")}
    with pytest.raises(SystemExit) as caught:
        cli.main([paths.get(arg, arg) for arg in args])
    assert caught.value.code == 1
    captured = capsys.readouterr()
    assert (
        re.match(message, captured.err)
        and captured.out == ""
        and "Traceback" not in captured.err
    )


# A verification


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_every_bad_sample_is_listed_and_can_be_left_out(
    damaged: Path,
    stores: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    found = run_command(capsys, "verify", stores["parquet"])
    assert (found["samples"], found["bad_samples"], found["list"]) == (100, 0, None)
    images = open_store(stores["parquet"]).read(np.arange(100))["image"]
    assert found["classes"] == 5 and found["bytes"] == sum(map(len, images))
    assert list(tmp_path.iterdir()) == []
    found = run_command(capsys, "verify", damaged)
    output = tmp_path / "train.lmdb.bad.json"
    assert (found["samples"], found["bad_samples"], found["list"]) == (
        NUM,
        3,
        output.name,
    )
    assert found["images_per_s"] == NUM / found["seconds"]
    written = json.loads(output.read_text())
    assert (written["store"], written["num_samples"]) == (str(damaged), NUM)
    bad = {entry["index"]: entry for entry in written["bad"]}
    assert [*bad] == sorted(BAD) and all(entry["error"] for entry in bad.values())
    assert bad[3]["name"] == f"{damaged}, key 3"
    assert found["reasons"] == [entry | {"samples": 1} for entry in written["bad"]]
    print_verified(found)
    shown = capsys.readouterr().out
    assert "--store.exclude train.lmdb.bad.json" in shown and "sample 300" in shown
    plan = PlanConfig(micro_batch_size=3)
    spec = open_stream(str(damaged), plan=plan, exclude=output)
    assert spec.plan.num_train == NUM - 3
    found = verify(MemoryStore([], []), "none.json")
    assert (found["samples"], found["list"]) == (0, "none.json")
    assert json.loads((tmp_path / "none.json").read_text())["bad"] == []


def test_images_of_16_bits_are_told(tmp_path: Path) -> None:
    for name, largest in (("dark", 4095), ("plain", 255)):
        (tmp_path / name).mkdir()
        dtype = np.uint16 if largest > 255 else np.uint8
        pixels = np.linspace(0, largest, 64).astype(dtype).reshape(8, 8)
        (tmp_path / name / "a.png").write_bytes(
            cv2.imencode(".png", pixels)[1].tobytes()
        )
    note = describe(open_store(tmp_path))["16_bits"]
    assert note.startswith("1 of the sampled images have 16 bits, largest value 4095")
    assert note.endswith("set transform.decode: array")


def test_a_broken_link_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a.png").symlink_to("nowhere.png")
    (sample,) = check_samples(open_store(tmp_path), np.array([0]))
    assert sample.error == "a broken link, to nowhere.png"
