"""Libraries that are extras: presets need none and make the same bits, and all else names what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from without_ray import one_thread

import raypipe
from raypipe.config import AugmentConfig
from raypipe.errors import ConfigError
from raypipe.importing import import_name
from raypipe.launch.run_checks import check_augment
from raypipe.transform.presets import build_transform

ROOT = Path(__file__).parents[1]
LIBRARIES = ("albumentations", "kornia", "cv2")
PROGRAM = """
import io, sys
for name in sys.argv[1:]:
    sys.modules[name] = None  # as if it were not installed
import numpy as np, raypipe, torch
from PIL import Image
from raypipe.device.augment import DeviceAugment
from raypipe.stores import MemoryStore
from without_ray import digests

rng = np.random.default_rng(0)
def saved(pixels, kind, **options):
    file = io.BytesIO()
    Image.fromarray(pixels).resize((90, 70)).save(file, kind, **options)
    return file.getvalue()
kinds = ("JPEG", "PNG", "WEBP", "BMP")
images = [saved(rng.integers(0, 256, (7, 9, 3), np.uint8), kinds[i % 4]) for i in range(16)]
masks = [saved(rng.integers(0, 4, (7, 9), np.uint8), "PNG") for _ in images]
boxes = [[[9.0, 9, 60, 60, 1]] for _ in images]
store = MemoryStore(images, [0] * 16, columns={"seg": masks, "objects": boxes})
targets = {"mask": "seg", "boxes_xyxy": "objects"}
plan = raypipe.PlanConfig(epochs=1, micro_batch_size=8)
for name in ("light", "heavy", "center", "resize", "flip-crop", "small", "simclr", "dino"):
    options = {} if name in ("simclr", "dino") else {"targets": targets}
    transform = raypipe.TransformConfig(train=name, size=32, **options)
    spec = raypipe.open_stream(store, plan=plan, transform=transform)
    print(name, [digest.hex() for digest in digests(spec)])
augment = DeviceAugment(raypipe.AugmentConfig(preset="strong", mixup_alpha=1.0), torch.device("cpu"))
pixels, labels = torch.full((4, 3, 16, 16), 9, dtype=torch.uint8), torch.zeros(4, dtype=int)
image, _ = augment(pixels, labels, np.ones(4, bool), seed=3)
print(image.sum().item())
print([name for name in sys.argv[1:] if sys.modules.get(name)])
"""


def printed(*missing: str) -> list[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *missing],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


def test_presets_make_the_same_bits_without_any_of_the_libraries(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["program"])
    with one_thread():
        exec(PROGRAM, {})
    expected = capsys.readouterr().out.splitlines()
    assert len(expected) == 10
    assert printed(*LIBRARIES) == expected
    assert printed(*LIBRARIES, "_raypipe_kernel") == expected


def test_a_plain_installation_has_none_of_the_libraries() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {
        canonicalize_name(Requirement(each).name) for each in project["dependencies"]
    }
    assert not {name for name in names if name.startswith((*LIBRARIES, "opencv"))}
    assert {"albumentations", "kornia", "opencv"} <= {*project["optional-dependencies"]}


MISSING: dict[str, tuple[str, Callable[[], object]]] = {
    "a list of steps": (
        "albumentations",
        lambda: build_transform([{"HorizontalFlip": {}}], 8),
    ),
    "a list of steps in a view": (
        "albumentations",
        lambda: build_transform({"a": {"transform": [{"D4": {}}], "count": 2}}, 8),
    ),
    "a preset of arrays": (
        "albumentations",
        lambda: build_transform("light", 8, by_library=True),
    ),
    "a pipeline by name": (
        "albumentations",
        lambda: import_name("albumentations:D4", "transform.train", trusted=True),
    ),
    "a step in the record of a run": (
        "albumentations",
        lambda: import_name("albumentations:D4", "transform", trusted=False),
    ),
    "operations on the device": (
        "kornia",
        lambda: check_augment(AugmentConfig(ops=[{"op": "RandomErasing"}])),
    ),
    "a module on the device": (
        "kornia",
        lambda: check_augment(AugmentConfig(module="kornia.augmentation:ColorJitter")),
    ),
}


@pytest.mark.parametrize("case", MISSING)
def test_what_needs_a_missing_library_names_its_extra(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, use = MISSING[case]
    for name in [*sys.modules]:
        if name.partition(".")[0] == library:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(
        sys,
        "meta_path",
        [_Without(library), *sys.meta_path],
    )
    with pytest.raises(ConfigError) as told:
        use()
    text = str(told.value)
    assert f"pip install 'raypipe-data[{library}]'" in text and "\n" not in text


class _Without:
    """Finds no module of a library."""

    def __init__(self, library: str) -> None:
        self._library = library

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name.partition(".")[0] == self._library:
            raise ModuleNotFoundError(f"No module named {name!r}", name=self._library)


def test_open_stream_tells_it_before_ray_starts(
    monkeypatch: pytest.MonkeyPatch, stores: dict[str, Path]
) -> None:
    monkeypatch.setitem(sys.modules, "albumentations", None)
    transform = raypipe.TransformConfig(train=[{"HorizontalFlip": {}}], size=8)
    with pytest.raises(ConfigError, match=r"\[albumentations\]', on every node"):
        raypipe.open_stream(stores["train"], transform=transform)
