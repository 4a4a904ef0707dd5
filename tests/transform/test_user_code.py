"""What an error of the user's code says: where in that code it was, whatever library was called there."""

from __future__ import annotations

import ast
import bdb
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import albumentations as A  # noqa: N812
import numpy as np
import pytest
from micro_batches import EncodedSample, run, slow_one, transform_of
from ray import cloudpickle
from torchvision.transforms import v2

from raypipe.config import TransformConfig
from raypipe.errors import SampleError, TransformError
from raypipe.transform.decode.rgb import encode_jpeg
from raypipe.transform.sample_maker import SampleMaker
from raypipe.transform.user_code import unpickled

IMAGE = EncodedSample(encode_jpeg(np.zeros((8, 8, 3), np.uint8)))
MINE = """
import random
import numpy as np

def helper(image):
    return image.reshape(7)

def transform(image):
    return helper(image)

def in_numpy(image):
    return np.stack([])

def in_compiled_code(image):
    return np.random.choice(-1)

def in_the_standard_library(image):
    return random.sample(image, 3)
"""


def test_a_class_that_a_process_has_stays_as_it_is() -> None:
    class Mine:
        def number(self) -> int:
            return 1

    method = Mine.number
    again = unpickled(cloudpickle.dumps([Mine(), Mine]))
    assert type(again[0]) is again[1] is Mine and Mine.number is method
    anew = "from ray import cloudpickle; print(cloudpickle.dumps(type('New', (), {'a': 5})))"
    printed = subprocess.run(
        [sys.executable, "-c", anew], capture_output=True, text=True, check=True
    )
    kind = unpickled(ast.literal_eval(printed.stdout))
    assert kind.__name__ == "New" and kind().a == 5


@pytest.fixture
def mine(tmp_path: Path) -> ModuleType:
    return module(tmp_path / "mine.py")


def module(path: Path) -> ModuleType:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(MINE)
    spec = importlib.util.spec_from_file_location("mine", path)
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def failure(transform: Any) -> str:
    with pytest.raises(TransformError) as caught:
        slow_one(SampleMaker(transform, TransformConfig()), IMAGE, (0, 0))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("transform", "6 in helper: ValueError: cannot reshape"),
        ("in_numpy", "12 in in_numpy: ValueError: need at least one array"),
        ("in_compiled_code", "15 in in_compiled_code: ValueError: "),
        (
            "in_the_standard_library",
            "18 in in_the_standard_library: TypeError: Population must be",
        ),
    ],
)
def test_the_last_frame_of_the_users_code_is_named(
    mine: ModuleType, name: str, place: str
) -> None:
    def called(image: np.ndarray, **_: Any) -> Any:
        return getattr(mine, name)(image)

    for transform in (getattr(mine, name), A.Compose([A.Lambda(image=called)])):
        reason = failure(transform)
        assert reason.startswith(f"the transform failed at {mine.__file__}:{place}")


def test_code_that_is_installed_is_the_users_where_there_is_no_other(
    tmp_path: Path,
) -> None:
    installed = module(tmp_path / "site-packages" / "mine.py")
    assert f"{installed.__file__}:12 in in_numpy: " in failure(installed.in_numpy)
    assert "albumentations" in failure(A.Compose([A.Blur(), A.RandomCrop(64, 64)]))


def test_a_file_below_the_current_folder_is_named_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = module(tmp_path / "code" / "mine.py")
    assert failure(made.transform).startswith(
        f"the transform failed at {Path('code', 'mine.py')}:6 in"
    )


def test_an_error_is_one_line_however_much_a_library_prints() -> None:
    reason = failure(v2.CutMix(num_classes=2))  # it prints the image
    assert (
        "\n" not in reason
        and "the default labels_getter" in reason
        and len(reason) < 1000
    )


@pytest.mark.parametrize(
    "error", [bdb.BdbQuit, KeyboardInterrupt, SystemExit, MemoryError]
)
def test_the_end_of_a_debugger_or_of_the_program_is_no_bad_sample(
    error: type[BaseException],
) -> None:
    def transform(image: np.ndarray) -> np.ndarray:
        raise error

    with pytest.raises(error):
        run(
            transform_of(transform),
            [IMAGE],
            np.zeros((1, 2), np.uint64),
            lambda _: [(IMAGE, 1, (0, 0))],
        )


def test_only_the_users_code_is_at_fault_for_what_it_raises() -> None:
    def picky(image: np.ndarray) -> np.ndarray:
        raise SampleError("this one is no good")

    with pytest.raises(SampleError, match="no good") as caught:
        slow_one(SampleMaker(picky, TransformConfig()), IMAGE, (0, 0))
    assert not isinstance(caught.value, TransformError)
