from __future__ import annotations

import json
import sys
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_runs import parse_run

from raypipe.config import RunConfig
from raypipe.errors import ConfigError
from raypipe.history.recorded_stream import RecordedStream
from raypipe.importing import _DATA, import_name, raised_at
from raypipe.launch.run_folder import CONFIG_HEAD
from raypipe.plan.places import Cursor
from raypipe.section import fits, settings_of
from raypipe.streaming.opening import open_stream
from raypipe.streaming.saving.checkpoints import Checkpoint
from raypipe.streaming.saving.saved_model import saved_model
from raypipe.streaming.saving.stateful import saved


def test_the_current_folder_is_searched_last_for_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    (tmp_path / "lies_here.py").write_text("class Outer:\n    inner = 7\n")
    (tmp_path / "json.py").write_text("loads = None\n")
    assert import_name("lies_here:Outer.inner", "transform.train", trusted=True) == 7
    assert import_name("json:loads", "transform.train", trusted=True)("3") == 3
    del sys.modules["lies_here"]


@pytest.mark.parametrize("address", ["json", ":loads", "json:", ""])
def test_an_address_without_both_parts_says_what_it_must_be(address: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"augment\.module must be module:name, such as my_package\.training:",
    ):
        import_name(address, "augment.module", trusted=True)


@pytest.mark.parametrize("address", ["no_such_module:name", "json:no_such_name"])
def test_what_is_not_there_is_one_error_with_its_setting(address: str) -> None:
    with pytest.raises(
        ConfigError, match=f"store.layout '{address}' cannot be imported"
    ):
        import_name(address, "store.layout", trusted=True)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "first = 1\nsecond = frist",
            r"NameError: name 'frist' is not defined \(at fails_here\.py:2 in <module>\)",
        ),
        ("def f(x:", r"SyntaxError: .* \(fails_here\.py, line 1\)$"),
        (
            "import no_such_module",
            r"No module named 'no_such_module' \(at fails_here\.py:1 in <module>\)",
        ),
    ],
)
def test_a_module_that_fails_is_one_error_with_the_line(
    code: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "fails_here.py").write_text(code)
    with pytest.raises(
        ConfigError, match=rf"train.loss 'fails_here:f' cannot be imported: .*{reason}"
    ):
        import_name("fails_here:f", "train.loss", trusted=True)


def test_an_error_without_frames_of_others_has_a_place_all_the_same() -> None:
    assert raised_at(ValueError("never raised")) == "an unknown place"
    try:
        int("x")
    except ValueError as error:
        assert raised_at(error).startswith(__file__.removeprefix(f"{Path.cwd()}/"))


# What files may name


GADGETS = ("timeit:Timer.__init__", "logging.config:dictConfig", "os:system")
GADGETS += ("planted_beside:make", "pickle:loads", "builtins:exec", "évil:make")
STEPS = ("albumentations:HorizontalFlip", "torchvision.transforms.v2:RandAugment")
STEPS += ("kornia.augmentation:RandomHorizontalFlip", "torch.optim:AdamW")


@pytest.mark.parametrize("address", STEPS)
def test_a_file_may_name_steps_of_known_libraries(address: str) -> None:
    assert isinstance(import_name(address, "a setting", trusted=False), type)


@pytest.mark.parametrize(
    "address",
    [
        *GADGETS,
        "torch:load",
        "torchvision.io:read_image",
        "torchvision.transforms:Compose.__init__",
        "torchvision.transforms.transforms:torch.load",
        "albumentations:np.load",
        "raypipe:convert",
        "raypipe.stores.writers:LMDBWriter",
    ],
)
def test_a_file_may_name_nothing_else(address: str) -> None:
    with pytest.raises(ConfigError, match=r"which would run .*--trust-run-code"):
        import_name(address, "a setting", trusted=False)


def test_a_library_of_the_same_name_beside_the_run_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "timm").mkdir()
    (tmp_path / "timm" / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r})")
    with pytest.raises(ConfigError, match=rf"would run {tmp_path}/timm/__init__\.py"):
        import_name("timm.data.transforms:Step", "a setting", trusted=False)
    assert not (tmp_path / "ran").exists()


PLACES = [
    name
    for name, setting in settings_of(RunConfig).items()
    if fits(GADGETS[0], setting.kind) and not _DATA.fullmatch(name)
]


@pytest.mark.parametrize("gadget", GADGETS)
@pytest.mark.parametrize("nested", [False, True])
def test_no_setting_of_a_run_that_is_resumed_names_code(
    gadget: str, nested: bool, tmp_path: Path
) -> None:
    """Each setting that takes text, but for those whose text is never imported."""
    assert {"plan.sampler", "transform.train", "train.metrics"} <= {*PLACES}
    for name in PLACES:
        section, _, key = name.rpartition(".")
        value = {"name": [{"x": gadget}]} if nested else gadget
        settings = {section: {key: value}} if section else {key: value}
        (tmp_path / "config.yaml").write_text(CONFIG_HEAD + json.dumps(settings))
        with pytest.raises(ConfigError, match=f"names the code '{gadget}' \\({name}"):
            parse_run([f"--resume={tmp_path}"], None)


@pytest.mark.parametrize("gadget", GADGETS)
def test_no_argument_in_a_record_names_code(gadget: str, tmp_path: Path) -> None:
    for name in [*signature(open_stream).parameters, "augment"]:
        for entry in ({"import": gadget}, {"map": [["name", gadget]]}, gadget):
            if _DATA.fullmatch(name) and "import" not in entry:
                continue  # never imported
            arguments = {"train": "nowhere", name: entry}
            augment = arguments.pop("augment", None)
            record: Any = SimpleNamespace(arguments=arguments, augment=augment)
            stream = RecordedStream(tmp_path.as_uri(), record, False, {})
            with pytest.raises(ConfigError, match=f"names the code '{gadget}'"):
                _ = stream.augment, stream.spec


@pytest.mark.parametrize("gadget", GADGETS)
@pytest.mark.parametrize("nested", [False, True])
def test_no_checkpoint_names_code(gadget: str, nested: bool) -> None:
    described = {"val": [{"x": gadget}] if nested else gadget, "transform": {"size": 8}}
    state = saved({"model": {}})
    read = Checkpoint("here", Cursor(0, 1, "x"), {}, "", described, bytes(state))
    with pytest.raises(ConfigError, match=f"names the code '{gadget}'"):
        saved_model(read, False).prepare(b"")
