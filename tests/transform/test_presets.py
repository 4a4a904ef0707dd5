from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from without_ray import one_thread

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError
from raypipe.stores.memory import MemoryStore
from raypipe.transform.checks import check_transforms
from raypipe.transform.presets import build_transform
from raypipe.transform.sample_transform import SampleTransform
from raypipe.transform.sizes import Size, sides_of

RNG = np.random.default_rng(0)
KEYS = np.random.SeedSequence(5).generate_state(40, np.uint64).reshape(20, 2)


def picture(height: int, width: int) -> np.ndarray:
    return cv2.resize(RNG.integers(0, 256, (5, 7, 3), dtype=np.uint8), (width, height))


TORCHVISION = ["tv-light", "autoaugment", "randaugment", "trivialaugment", "augmix"]


@pytest.mark.parametrize(
    "name", ["light", "heavy", "center", "small", "resize", *TORCHVISION]
)
@pytest.mark.parametrize("shape", [(8, 8), (300, 200), (61, 500)])
@pytest.mark.parametrize("size", [8, 96, (24, 40)])
def test_every_preset_ends_at_its_size(
    name: str, shape: tuple[int, int], size: Size
) -> None:
    transform = SampleTransform(build_transform(name, size))
    for key in KEYS[:3]:
        result = transform(picture(*shape), tuple(key))
        assert result.shape == (*sides_of(size), 3) and result.dtype == np.uint8


@pytest.mark.parametrize("name", ["light", "heavy", "flip-crop", "small", *TORCHVISION])
def test_training_presets_vary_with_the_key(name: str) -> None:
    transform, image = SampleTransform(build_transform(name, 32)), picture(32, 32)
    assert len({transform(image.copy(), tuple(key)).tobytes() for key in KEYS}) > 10


def test_flip_crop_shifts_by_at_most_four_pixels_and_flips() -> None:
    transform, image = (
        SampleTransform(build_transform("flip-crop", 32)),
        picture(32, 32),
    )
    padded = np.pad(image, ((4, 4), (4, 4), (0, 0)))
    crops = [padded[y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
    allowed = {crop.tobytes() for crop in crops} | {
        crop[:, ::-1].tobytes() for crop in crops
    }
    assert all(transform(image.copy(), tuple(key)).tobytes() in allowed for key in KEYS)


def test_center_of_224_comes_from_a_short_side_of_256() -> None:
    image = picture(256, 400)
    expected = image[16:240, 88:312]
    np.testing.assert_array_equal(
        SampleTransform(build_transform("center", 224))(image, (0, 0)), expected
    )


def test_small_never_mirrors() -> None:
    image = np.zeros((32, 32, 3), np.uint8)
    image[8:24, 4:10] = 255  # a bar on the left
    transform = SampleTransform(build_transform("small", 32))
    for key in KEYS:
        result = transform(image.copy(), tuple(key)).astype(int)
        assert result[:, :16].sum() > 4 * result[:, 16:].sum()


def test_none_is_no_transform() -> None:
    assert build_transform("none", 224) is None


def test_an_unknown_name_lists_the_known_ones() -> None:
    message = (
        "no transform preset 'hevy'; did you mean heavy[?] choose from none, light, heavy, center, resize,"
        " flip-crop, small, tv-light, autoaugment, randaugment, trivialaugment, augmix, simclr, dino; module:name"
    )
    with pytest.raises(ConfigError, match=message):
        build_transform("hevy", 224)


@pytest.mark.parametrize(
    "text", ["[light]", "[{Blur: {p: 1}]", "{Blur: {p: 1}}", "- Blur"]
)
def test_what_was_meant_as_steps_and_is_text_is_told_so(text: str) -> None:
    store = MemoryStore([b""], [0])
    with pytest.raises(ConfigError, match="is not a list of steps: write"):
        build_transform(text, 8)
    with pytest.raises(ConfigError, match="is not a list of steps: write"):
        check_transforms(TransformConfig(), {"train": text}, {"train": store})


TWICE = """
import hashlib, json, sys
import numpy as np, torch
from raypipe.transform.presets import build_transform
from raypipe.transform.sample_transform import SampleTransform

def digests(seed, keys, names):
    torch.manual_seed(seed); np.random.seed(seed)
    image = np.random.Generator(np.random.Philox(7)).integers(0, 256, (80, 120, 3), np.uint8)
    image[:, 40:] = image[:, 40:] // 8 * 4 + np.arange(80, dtype=np.uint8)[:, None, None]
    found = {}
    for name in names:
        apply = SampleTransform(build_transform(name, 48))
        for key in keys:
            apply(image[:33].copy(), (seed, key))  # other samples in between
            pixels = apply(image.copy(), (key, 5))
            found[f"{name} {key}"] = hashlib.blake2b(np.ascontiguousarray(pixels), digest_size=8).hexdigest()
    return found
"""
ANOTHER_PROCESS = """
threads, seed, keys = json.loads(sys.argv[1])
torch.set_num_threads(threads)
print(json.dumps(digests(seed, keys, sys.argv[2:])))
"""


@pytest.mark.system
def test_pixels_depend_on_the_key_alone_in_any_process_and_threads() -> None:
    here: dict[str, Any] = {}
    exec(TWICE, here)
    keys = list(range(40))
    with one_thread():
        first = here["digests"](1, keys, TORCHVISION)
    command = [
        sys.executable,
        "-c",
        TWICE + ANOTHER_PROCESS,
        json.dumps([4, 2, keys[::-1]]),
        *TORCHVISION,
    ]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=100
    )
    assert first == json.loads(done.stdout)
    assert len(set(first.values())) > 0.9 * len(first)


@pytest.mark.system
def test_torchvision_is_imported_only_when_a_preset_needs_it() -> None:
    code = (
        "import sys; from raypipe.transform.presets import build_transform\n"
        "build_transform('heavy', 8)\n"
        "assert not {'torch', 'torchvision'} & set(sys.modules)\n"
        "build_transform('augmix', 8); assert 'torchvision' in sys.modules and 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_size_below_one_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="size is 0"):
        build_transform("light", 0)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    code = """
        class Inverse:
            def __init__(self, size=None): self.size = size
            def __call__(self, image): return 255 - image[: self.size, : self.size]
        def make(size): return Inverse(size)
        ready = Inverse()
        def forgot(size): Inverse(size)
    """
    lines = [line[8:] for line in code.splitlines()]
    (tmp_path / "raypipe_mine.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "raypipe_mine", raising=False)
    return "raypipe_mine"


@pytest.mark.parametrize(("name", "side"), [("make", 8), ("Inverse", 8), ("ready", 20)])
def test_module_name_gives_a_function_of_the_size_or_a_ready_transform(
    mine: str, name: str, side: int
) -> None:
    image = picture(20, 20)
    result = SampleTransform(build_transform(f"{mine}:{name}", 8))(image, (0, 0))
    np.testing.assert_array_equal(result, 255 - image[:side, :side])


@pytest.mark.parametrize("address", ["raypipe_mine:nothing", "no_such_module_xyz:f"])
def test_what_cannot_be_imported_is_a_config_error(mine: str, address: str) -> None:
    with pytest.raises(ConfigError, match=f"'{address}' cannot be imported"):
        build_transform(address, 8)


def test_a_function_that_returns_no_transform_is_a_config_error(mine: str) -> None:
    with pytest.raises(ConfigError, match="gives a NoneType"):
        build_transform(f"{mine}:forgot", 8)


def test_albumentations_is_imported_only_if_needed_and_stays_offline() -> None:
    code = (
        "import os, sys; os.environ.pop('NO_ALBUMENTATIONS_UPDATE', None)\n"
        "from raypipe.transform.presets import build_transform\n"
        "build_transform('none', 8); assert 'albumentations' not in sys.modules\n"
        "import socket; socket.socket.connect = lambda *a: sys.exit('asked the network')\n"
        "build_transform('heavy', 8); build_transform('dino', 8); assert 'albumentations' not in sys.modules\n"
        "build_transform('light', 8, by_library=True); assert 'albumentations' in sys.modules\n"
        "assert os.environ['NO_ALBUMENTATIONS_UPDATE'] == '1'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
