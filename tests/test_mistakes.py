"""What newcomers may get wrong ends in one message of at most three lines, before Ray is started."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import ray
import torch
from small_runs import parse_run
from torch.utils.data import DataLoader  # noqa: F401 # USES has it

import raypipe
from raypipe import PlanConfig, PoolConfig, StreamSpec, TransformConfig
from raypipe.commands.cli import _finish
from raypipe.launch.run import launch
from raypipe.stores.destination import write_atomically

from pictures import CLASSES, samples  # isort: skip

CODE = """
import numpy as np

def signed(size):
    return lambda image: np.zeros((8, 8, 3), np.int16)

def grey(size):
    return lambda image: np.zeros((8, 8), np.uint8)

def varies(size):
    def transform(image, rng):
        return np.zeros((int(rng.integers(8, 20)), 8, 3), np.uint8)
    return transform

def raises(size):
    def transform(image):
        raise ValueError("no such thing")
    return transform

def of_an_image(image):
    return image[:8, :8]
"""

MISTAKES = {
    "no file": (["--store.train=nothing.lmdb"], "nothing.lmdb does not exist"),
    "no validation file": (["--store.val=nothing.lmdb"], "nothing.lmdb does not exist"),
    "no such column": (
        ["--store.train=a.parquet", "--store.image_column=img"],
        "'img' for image_column\n  tip: did you mean image?",
    ),
    "no class names": (
        ["--store.train=unnamed.lmdb"],
        "set num_classes in train.model",
    ),
    "labels beyond the classes": (
        ["--store.train=unnamed.lmdb", "--train.model={name: small, num_classes: 3}"],
        "outside [0, 3): set num_classes",
    ),
    "other classes in the validation": (
        ["--store.val=others.lmdb"],
        "their labels mean different things",
    ),
    "a batch larger than the store": (
        ["--plan.micro_batch_size=500"],
        "fewer than a global batch of 500: lower plan",
    ),
    "batch sizes that do not divide": (
        ["--plan.global_batch_size=20"],
        "a multiple of plan.micro_batch_size, 8, got 20",
    ),
    "no such preset": (["--transform.train=lihgt"], "did you mean light?"),
    "no such function": (
        ["--transform.train=my_code:nothing"],
        "'my_code:nothing' cannot be imported",
    ),
    "a function of an image": (
        ["--transform.train=my_code:of_an_image"],
        "is called with the size, 16, and returns",
    ),
    "signed": (
        ["--transform.train=my_code:signed"],
        "int16 of shape (8, 8, 3); it must return uint8",
    ),
    "no channels": (
        ["--transform.train=my_code:grey"],
        "uint8 of shape (8, 8); it must return uint8 HWC",
    ),
    "a size that varies": (
        ["--transform.train=my_code:varies"],
        "end with a crop or resize to a fixed size",
    ),
    "a transform that raises": (
        ["--transform.val=my_code:raises", "--store.val=a.lmdb"],
        "ValueError: no such thing",
    ),
    "no such model": (["--train.model=resnet5O"], "did you mean resnet50 or "),
    "no such loss": (
        ["--train.loss=my_code:nothing"],
        "train.loss 'my_code:nothing' cannot be imported",
    ),
    "no run to resume": (["--resume=runs/none"], "no run at "),
    "a resume with another batch": (
        ["--resume=runs/old", "--plan.micro_batch_size=4"],
        "plan.micro_batch_size=4 (was 8)",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    few = samples(32)
    for name, classes in (
        ("a.lmdb", CLASSES),
        ("unnamed.lmdb", None),
        ("others.lmdb", CLASSES[::-1]),
    ):
        write_atomically(str(folder / name), few, classes)
    write_atomically(str(folder / "a.parquet"), few, CLASSES)
    (folder / "my_code.py").write_text(CODE)
    return folder


@pytest.mark.parametrize("mistake", MISTAKES)
def test_it_is_told_before_anything_is_started(
    mistake: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "my_code", raising=False)
    # further than that it must not come
    monkeypatch.setattr("raypipe.launch.run.connect", None)
    given, expected = MISTAKES[mistake]
    settings = [
        "--store.train=a.lmdb",
        "--train.model=small",
        "--plan.micro_batch_size=8",
        "--transform.size=16",
    ]
    if "--resume=runs/old" in given:
        settings = []
        leave_a_run(folder / "runs" / "old")
    # the session's cluster, which other tests have started or not
    running = ray.is_initialized()
    with pytest.raises(SystemExit) as caught:
        _finish(lambda: launch(parse_run([*settings, *given], None)))
    shown = capfd.readouterr().err
    assert caught.value.code in (1, 2) and expected in shown, shown
    assert len(shown.splitlines()) <= 3 and "Traceback" not in shown, shown
    assert ray.is_initialized() == running


def leave_a_run(run: Path) -> None:
    """With a checkpoint of its first step."""
    from raypipe.launch.run_folder import store_config
    from raypipe.streaming.opening import spec_of
    from raypipe.streaming.saving.checkpoints import write_checkpoint

    parsed = parse_run(
        ["--store.train=a.lmdb", "--train.model=small", "--plan.micro_batch_size=8"],
        None,
    )
    parsed = dataclasses.replace(parsed, name="old")
    store_config(parsed, run.as_uri())
    spec = spec_of(parsed, run.as_uri())
    write_checkpoint(run.as_uri(), spec.plan.cursor_at(1), b"state", {})


# Code that takes raypipe for another library


@pytest.fixture(scope="module")
def spec(folder: Path) -> StreamSpec:
    plan, transform = (
        PlanConfig(epochs=1, micro_batch_size=8),
        TransformConfig(train="light", val="center", size=16),
    )
    store = folder / "a.lmdb"
    return raypipe.open_stream(
        store, store, plan=plan, transform=transform, pool=PoolConfig(engine="inline")
    )


LOOP = "write `for epoch in loader.epochs():`"
TWO = "write batch.image and batch.target"
USES = {
    "for batch in loader: pass": LOOP,
    "len(loader)": LOOP,
    "next(iter(DataLoader(loader, batch_size=4)))": LOOP,
    "DataLoader(loader, batch_size=4, shuffle=True)": LOOP,
    "for batch in spec: pass": "iterate raypipe.loader(spec).epochs()",
    "for batch in epoch: pass": "iterate epoch.train, and then epoch.val",
    "batch['image']": TWO,
    "images, labels = batch": TWO,
    "len(batch)": "len(batch.index) is its size",
    "batch.images": "has no attribute 'images': write batch.image",
    "batch.labels": "has no attribute 'labels': write batch.target",
    "batch.wieght": "did you mean weight?",
    "loader.to('cuda')": "leave it out: the tensors of a batch are on the rank's device",
    "loader.set_epoch(1)": "leave it out: loader.epochs() continues",
    "loader.epoch": "did you mean epochs?",
    "raypipe.Loader": "write raypipe.loader(raypipe.open_stream(…))",
    "raypipe.loadr": "did you mean raypipe.loader?",
    "raypipe.planconfig": "did you mean raypipe.PlanConfig?",
    "PlanConfig(batch_size=4)": "PlanConfig has no argument 'batch_size': write plan=PlanConfig(micro_",
    "PlanConfig(epoch=4)": "did you mean epochs?",
    "PoolConfig(num_workers=4)": "CPU actors are pool=PoolConfig(max_actors=…)",
    "dataclasses.replace(PlanConfig(), batch_size=4)": "micro_batch_size",
    "raypipe.open_stream('a.lmdb', num_workers=8)": "GPU workers are ScalingConfig(num_workers=…)",
    "raypipe.open_stream('a.lmdb', batch_size=8)": "write plan=PlanConfig(micro_batch_size=…",
    "raypipe.loader(spec, batch_size=8)": "write plan=PlanConfig(micro_batch_size=…",
    "raypipe.loader(spec, pin_memory=True)": "leave it out",
}


@pytest.mark.parametrize("use", USES)
def test_a_use_of_another_library_says_what_to_write(
    use: str, spec: StreamSpec
) -> None:
    loader = raypipe.loader(spec)
    epoch = next(loader.epochs())
    batch = next(epoch.train)
    names = {
        **globals(),
        "spec": spec,
        "loader": loader,
        "epoch": epoch,
        "batch": batch,
    }
    with pytest.raises((TypeError, AttributeError)) as caught:
        exec(use, names)
    loader.close()
    assert USES[use] in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_what_has_answers_is_true_copied_and_pickled_as_ever(spec: StreamSpec) -> None:
    loader = raypipe.loader(spec)
    epoch = next(loader.epochs())
    batch = next(epoch.train)
    assert loader and epoch and batch and spec and not isinstance(batch, Iterable)
    again = pickle.loads(pickle.dumps(copy.deepcopy(batch)))
    assert torch.equal(again.image, batch.image) and not hasattr(again, "pin_memory")
    assert pickle.loads(pickle.dumps(spec)).plan.fingerprint == spec.plan.fingerprint
    loader.close()


def test_debugging_finds_a_kept_batch_on_cpus_too(
    spec: StreamSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []
    for value, found in (("0", False), ("1", True)):
        monkeypatch.setenv("RAYPIPE_DEBUG", value)
        for epoch in raypipe.loader(spec).epochs():
            kept = [batch.image for batch in epoch.train]
        assert bool((kept[0] == 255).all()) is found
