from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import psutil
import pytest
import ray
from patience import until
from PIL import Image
from small_runs import run_command

from raypipe import kernel
from raypipe.commands.convert import convert as _convert
from raypipe.errors import ConfigError, ResourceError, SampleError, StoreError
from raypipe.kernel import is_seekable
from raypipe.stores import open_store
from raypipe.stores.base import Store
from raypipe.stores.destination import new_path
from raypipe.stores.memory import MemoryStore
from raypipe.transform.decode.rgb import decode

from pictures import CLASSES, picture  # isort: skip

# More than two chunks, and classes in runs, as folders and tars have them.
NUM = 150
LABELS = [i * len(CLASSES) // NUM for i in range(NUM)]
IMAGES = [picture(i, 8, 8) for i in range(NUM)]


def convert(src: str | Store, dst: Path, **options: Any) -> dict[str, int]:
    return _convert(src, str(dst), **options)


def without_sizes(src: str | Store, dst: Path, **options: Any) -> dict[str, int]:
    return convert(src, dst, sizes=False, **options)


def contents(store: Store) -> dict[str, list[Any]]:
    """All columns but the names, which a copy has from its source."""
    columns = tuple(name for name in store.schema.names if name != "name")
    read = store.read(np.arange(len(store)), columns)
    return {name: list(values) for name, values in read.items()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def make_memory(folder: Path) -> Store:
    return MemoryStore(IMAGES, LABELS, CLASSES)


def make_folder(folder: Path) -> Store:
    for number, (image, label) in enumerate(zip(IMAGES, LABELS, strict=True)):
        file = folder / "source" / CLASSES[label] / f"{number:03d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(image)
    return open_store(folder / "source")


needs_kernel = pytest.mark.skipif(bool(kernel.why_no_kernel()), reason="no extension")


def cmyk(data: bytes) -> bytes:
    out = io.BytesIO()
    Image.open(io.BytesIO(data)).convert("CMYK").save(out, "JPEG")
    return out.getvalue()


def test_seekable_jpegs_need_the_extension(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "why_no_kernel", lambda: "not built")
    with pytest.raises(
        ConfigError, match=r"seekable JPEGs need the compiled extension, .*: not built"
    ):
        convert(
            MemoryStore(IMAGES[:3], LABELS[:3]), tmp_path / "copy.lmdb", seekable=True
        )
    assert names(tmp_path) == []


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
class TestConvert:
    @pytest.mark.parametrize(
        ("make", "suffix", "shards"),
        [(make_memory, ".parquet", 1), (make_folder, ".lmdb", 3)],
    )
    def test_the_copy_equals_the_source(
        self, make: Callable[[Path], Store], suffix: str, shards: int, tmp_path: Path
    ) -> None:
        source, dst = make(tmp_path), tmp_path / "out" / f"copy{suffix}"
        dst.parent.mkdir()
        found = convert(source, dst, shards=shards)
        assert found == {
            "samples": NUM,
            "classes": len(CLASSES),
            "bytes": sum(map(len, IMAGES)),
            "skipped": 0,
            "without_size": 0,
        }
        copy = open_store(dst)
        assert contents(copy) == {
            "image": IMAGES,
            "label": LABELS,
            "width": [8] * NUM,
            "height": [8] * NUM,
        }
        assert copy.classes == source.classes == CLASSES
        assert names(dst.parent) == [dst.name]
        assert (
            dst.is_file()
            if shards == 1
            else names(dst) == [f"{i:05d}{suffix}" for i in range(shards)]
        )

    def test_a_relative_destination_is_of_the_drivers_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        without_sizes(MemoryStore(IMAGES[:3], None), Path("copy.lmdb"))
        assert names(tmp_path) == ["copy.lmdb"]
        # a source without labels gives a copy without labels
        assert contents(open_store(tmp_path / "copy.lmdb")) == {"image": IMAGES[:3]}

    def test_reencoded_images_have_the_short_side_and_none_is_enlarged(
        self, tmp_path: Path
    ) -> None:
        sizes = [(40, 48), (100, 65), (65, 130), (300, 200), (64, 20)]
        images = [picture(i, *size) for i, size in enumerate(sizes)]
        source = MemoryStore(images, range(5), "abcde")
        num_bytes = []
        for quality in (30, 95):
            dst = tmp_path / f"q{quality}.lmdb"
            found = convert(source, dst, shards=2, short_side=64, quality=quality)
            copy = contents(open_store(dst))
            num_bytes.append(found["bytes"])
            assert found["bytes"] == sum(map(len, copy["image"]))
            assert copy["label"] == list(range(5))
            for image, size in zip(copy["image"], sizes, strict=True):
                assert image.startswith(b"\xff\xd8\xff")
                scale = min(64, *size) / min(size)
                expected = [side * scale for side in size]
                assert decode(image).shape[:2] == pytest.approx(expected, abs=1)
        assert num_bytes[0] < num_bytes[1] * 0.6

    @needs_kernel
    def test_seekable_jpegs_have_the_pixels_of_the_source(self, tmp_path: Path) -> None:
        png = cv2.imencode(".png", np.zeros((90, 70, 3), np.uint8))[1].tobytes()
        images = [
            picture(1, 50, 70),
            png,
            kernel.to_seekable(picture(2, 40, 20)),
            cmyk(picture(3, 9, 9)),
        ]
        convert(
            MemoryStore(images, range(4), "abcd"),
            tmp_path / "copy.lmdb",
            seekable=True,
        )
        copy = contents(open_store(tmp_path / "copy.lmdb"))["image"]
        assert is_seekable(copy[0]) and copy[1:] == images[1:]
        assert np.array_equal(decode(copy[0]), decode(images[0]))
        convert(
            MemoryStore(images, range(4)),
            tmp_path / "small.lmdb",
            seekable=True,
            short_side=16,
        )
        small = contents(open_store(tmp_path / "small.lmdb"))["image"]
        assert all(map(is_seekable, small)) and min(decode(small[0]).shape[:2]) == 16

    # Bad samples

    @pytest.mark.parametrize(("shards", "suffix"), [(1, ".lmdb"), (3, ".parquet")])
    def test_a_bad_sample_is_named_and_nothing_is_left(
        self, shards: int, suffix: str, tmp_path: Path
    ) -> None:
        source = MemoryStore([*IMAGES[:100], b"", *IMAGES[101:]], LABELS)
        with pytest.raises(
            SampleError, match=rf"{source.address}: sample 100: .*--on-bad-sample skip"
        ) as caught:
            convert(source, tmp_path / f"copy{suffix}", shards=shards)
        assert "\n" not in str(caught.value)
        assert names(tmp_path) == []

    def test_a_bad_sample_can_be_skipped(self, tmp_path: Path) -> None:
        bad = {0: b"", 70: None, 71: b"no image", 149: IMAGES[149][:100]}
        images = [bad.get(i, image) for i, image in enumerate(IMAGES)]
        source = MemoryStore(images, LABELS, CLASSES)
        skipped: dict[str, Any] = {"shards": 2, "on_bad_sample": "skip"}
        # Without decoding, a header is enough.
        for short_side in (0, 8):
            dst = tmp_path / f"{short_side}.lmdb"
            found = convert(source, dst, short_side=short_side, **skipped)
            assert (found["samples"], found["skipped"]) == (NUM - 4, 4)
            kept = [label for i, label in enumerate(LABELS) if i not in bad]
            assert contents(open_store(dst))["label"] == kept
        with pytest.raises(SampleError, match="sample 71: not an image"):
            few = MemoryStore([*IMAGES[:71], b"no image"], LABELS[:72])
            convert(few, tmp_path / "x.lmdb", short_side=8)

    # Refusals

    def test_an_existing_destination_is_kept_unless_overwritten(
        self, tmp_path: Path
    ) -> None:
        dst = tmp_path / "copy.parquet"
        first, second = (
            MemoryStore(images, LABELS[:5]) for images in (IMAGES[:5], IMAGES[5:10])
        )
        without_sizes(first, dst, shards=1)
        exists = rf"{re.escape(str(dst))} exists: .*--overwrite"
        with pytest.raises(StoreError, match=exists):
            convert(second, dst, shards=1)
        assert contents(open_store(dst)) == contents(first)
        for shards in (2, 1):  # a folder for a file, and back
            without_sizes(second, dst, shards=shards, overwrite=True)
            assert contents(open_store(dst)) == contents(second)
            assert dst.is_dir() == (shards == 2) and names(tmp_path) == [dst.name]
        convert(str(dst), dst, short_side=4, overwrite=True)  # onto itself
        images = contents(open_store(dst))["image"]
        assert {min(decode(image).shape[:2]) for image in images} == {4}

    @pytest.mark.parametrize(
        ("dst", "options", "error", "message"),
        [
            (
                "copy.tgz",
                {},
                StoreError,
                r"copy.tgz: the destination must end in one of \.lmdb, \.parquet",
            ),
            ("copy", {}, StoreError, r"must end in one of \.lmdb, \.parquet"),
            (
                "x-{00..09}.lmdb",
                {},
                StoreError,
                r"09\}\.lmdb: several files .* such as train\.lmdb; several --shards",
            ),
            ("nowhere://bucket/copy.lmdb", {}, ConfigError, "unsupported scheme"),
            (
                "no/such/copy.lmdb",
                {},
                StoreError,
                "no/such is not a folder: make it first",
            ),
            (
                "copy.lmdb",
                {"shards": -1},
                ConfigError,
                "shards and short_side must .* got -1, 0 and 90",
            ),
            ("copy.lmdb", {"short_side": -1}, ConfigError, "got 0, -1 and 90"),
            ("copy.lmdb", {"quality": 101}, ConfigError, "got 0, 0 and 101"),
        ],
    )
    def test_a_destination_that_cannot_be(
        self,
        dst: str,
        options: dict[str, Any],
        error: type[Exception],
        message: str,
        tmp_path: Path,
    ) -> None:
        target = dst if "://" in dst else str(tmp_path / dst)
        with pytest.raises(error, match=message):
            _convert(MemoryStore(IMAGES[:3], LABELS[:3]), target, **options)
        assert names(tmp_path) == []

    def test_an_empty_source(self, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match="has no samples"):
            convert(MemoryStore([], []), tmp_path / "copy.lmdb")
        assert names(tmp_path) == []

    # What goes wrong on the way

    def test_a_task_whose_process_dies(self, tmp_path: Path) -> None:
        class Deadly(MemoryStore):
            def read(
                self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")
            ) -> Any:
                if 64 in indices:
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().read(indices, columns)

        with pytest.raises(
            ResourceError,
            match=r"process of this command died \(WorkerCrashedError\).* memory",
        ):
            convert(Deadly(IMAGES, LABELS), tmp_path / "copy.lmdb", shards=1)
        assert names(tmp_path) == []

    # The command

    def test_the_command_prints_its_counts_or_one_line_of_an_error(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        make_folder(tmp_path)
        dst = tmp_path / "copy.parquet"
        args = ["convert", tmp_path / "source", dst, "--short-side=4"]
        given = ["--quality=50", "--on-bad-sample", "skip"]
        found = run_command(capsys, *args, *given)
        assert (found["samples"], found["classes"], found["skipped"]) == (NUM, 5, 0)
        assert found["bytes"] < sum(map(len, IMAGES))
        with pytest.raises(SystemExit, match="1"):
            run_command(capsys, *args)
        captured = capsys.readouterr()
        last = captured.err.splitlines()[-1]
        assert captured.out == "" and last.startswith(f"error: {dst} exists: ")


# A path that becomes the destination, without Ray


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    dst = tmp_path / "a[1].lmdb"
    dst.touch()
    mine = [".a[1].lmdb.partial.lmdb", ".a[1].lmdb.old.lmdb"]
    others = [
        ".a[1].parquet.partial.parquet",
        ".a1.lmdb.partial.lmdb",
        "a[1].lmdb.partial.lmdb",
    ]
    for name in [*mine, *others]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "00000.lmdb").write_text("x")
    (tmp_path / ".a[1].lmdb.lock").touch()  # left as well, but held by nobody
    with new_path(dst, overwrite=True) as partial:
        partial.write_text("new")
    assert names(tmp_path) == sorted([dst.name, *others]) and dst.read_text() == "new"


def test_a_store_comes_back_if_its_writer_was_killed_between_renames(
    tmp_path: Path,
) -> None:
    old = tmp_path / ".a.lmdb.old.lmdb"
    old.mkdir()
    (old / "00000.lmdb").write_text("old")
    with (
        pytest.raises(StoreError, match=r"a\.lmdb exists"),
        new_path(tmp_path / "a.lmdb", overwrite=False),
    ):
        pytest.fail("written")
    assert names(tmp_path) == ["a.lmdb"] and names(tmp_path / "a.lmdb") == [
        "00000.lmdb"
    ]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with (
        pytest.raises(StoreError, match="cannot be written to"),
        new_path(Path("/proc/train.lmdb"), False),
    ):
        pytest.fail("written")


# The command in a process of its own, ended on its way


@pytest.mark.system
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)]
)
def test_a_conversion_that_is_ended_leaves_no_store(
    signum: int, code: int, tmp_path: Path
) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (300, 300, 3), np.uint8)
    image = cv2.imencode(".jpg", noise)[1].tobytes()
    folder = tmp_path / "source" / "a"
    folder.mkdir(parents=True)
    (folder / "0.jpg").write_bytes(image)
    # enough of them for a look at what is written, however late
    for number in range(1, 4000):
        os.link(folder / "0.jpg", folder / f"{number}.jpg")
    words = ["convert", str(tmp_path / "source"), str(tmp_path / "copy.parquet")]
    program = [sys.executable, "-m", "raypipe.commands.cli", *words]
    # Tasks of a cluster that lives on do not end with the command; a killed one has its own.
    address = ray.get_runtime_context().gcs_address if code == 130 else ""
    command = subprocess.Popen(
        [*program, "--shards", "2", "--short-side", "256"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"RAY_ADDRESS": address},
    )

    def num_written() -> int:
        files = tmp_path.glob(".copy.parquet.partial*/*")
        return sum(file.stat().st_size for file in files)

    until(lambda: num_written() > 1 << 20 or command.poll() is not None)
    started = psutil.Process(command.pid).children(recursive=True)
    os.killpg(command.pid, signum)
    assert command.wait(30) == code
    for left in psutil.wait_procs(started, 15)[1]:
        left.kill()
    assert not psutil.wait_procs(started, 10)[1]
    _, stderr = command.communicate(timeout=10)
    assert "Traceback" not in stderr and not (tmp_path / "copy.parquet").exists()
    if code == 130:
        assert names(tmp_path) == ["source"]
    else:
        assert num_written(), "it was killed on its way"
