from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import json
import logging
import os
import runpy
import shlex
import subprocess
import sys
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from documented import ROOT
from s3_server import environment
from small_runs import parse_run

import raypipe
from raypipe.commands import cli
from raypipe.commands.cli import _finish, main
from raypipe.commands.parser import Parser, printing
from raypipe.commands.settings import parse_command
from raypipe.config import RunConfig
from raypipe.errors import ConfigError, NoRoomError, ResourceError
from raypipe.launch.interrupts import Stopped
from raypipe.launch.run_folder import CONFIG_HEAD
from raypipe.logs import configure_logs
from raypipe.progress import print_progress
from raypipe.section import settings_of

DIGITS: dict[str, dict[str, Any]] = yaml.safe_load(
    (files("raypipe") / "digits.yaml").read_text()
)


def parse(*args: str) -> RunConfig:
    return parse_run(list(args), "doc")


# The words of a command line


def convert(
    run: RunConfig,
    src: str,
    *,
    height: int = 0,
    on_bad: Literal["raise", "skip"] = "raise",
    big: bool = False,
) -> dict[str, Any]:
    """Convert."""
    return {}


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("a-b.lmdb --height=3", {"src": "a-b.lmdb", "height": "3"}),
        (
            "--height 3 a.lmdb --on-bad skip",
            {"src": "a.lmdb", "height": "3", "on_bad": "skip"},
        ),
        ("a --plan.micro-batch-size=8", {"src": "a", "plan.micro_batch_size": "8"}),
        ("a --plan.micro_batch_size -8", {"src": "a", "plan.micro_batch_size": "-8"}),
        (
            "a --transform.train=my-mod:f=x-y",
            {"src": "a", "transform.train": "my-mod:f=x-y"},
        ),
        (
            "a --big --no-trust-run-code",
            {"src": "a", "big": "true", "trust_run_code": "false"},
        ),
        ("--big=false a", {"src": "a", "big": "false"}),
        (
            "--no-big a --transform.apply-exif",
            {"src": "a", "big": "false", "transform.apply_exif": "true"},
        ),
        ("a --no-transform.apply-exif", {"src": "a", "transform.apply_exif": "false"}),
        (
            "--big false a --transform.apply-exif true",
            {"src": "a", "big": "false", "transform.apply_exif": "true"},
        ),
        ("a --height 3 --height 4", {"src": "a", "height": "4"}),
    ],
)
def test_options_may_have_dashes_and_flags_need_no_value(
    given: str, texts: dict[str, str]
) -> None:
    assert Parser("convert", convert).read(given.split()) == (texts, [])


USAGE = "tip: raypipe convert SRC [--OPTION VALUE …]\n"


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("a b", f"unexpected argument 'b'\n  {USAGE}"),
        ("--height 3", f"missing: SRC\n  {USAGE}"),
        ("a --height --big", f"--height needs a value\n  {USAGE}"),
        (
            "a --no-height",
            "unknown setting 'no_height'\n  tip: did you mean 'height'?\n",
        ),
    ],
)
def test_wrong_usage_exits_with_2_and_a_tip(
    given: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        Parser("convert", convert).read(given.split())
    assert caught.value.code == 2 and capsys.readouterr().err.startswith(
        f"error: {error}"
    )


# Help


JOBS = {
    "jobs/train.py": cli.COMMANDS["train"],
    "jobs/tune.py": runpy.run_path(str(ROOT / "jobs" / "tune.py"))["search"],
}


def help_of(name: str) -> str:
    if name in JOBS:
        return Parser(
            "", JOBS[name], ast.get_docstring(ast.parse((ROOT / name).read_text()))
        ).format_help()
    return Parser(name, cli.COMMANDS[name]).format_help() if name else cli.overview()


@pytest.mark.parametrize("name", ["", *cli.COMMANDS, *JOBS])
def test_a_help_has_at_most_40_lines(name: str) -> None:
    text = help_of(name)
    assert text.count("\n") <= 40, text
    for noise in ("(default: )", "type:", "None", "  \n", "=="):
        assert noise not in text


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_two_examples_of_each_help_parse(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # An address of a store or a run is looked at: a bucket of AWS's is a request, six seconds without a network.
    for variable, value in environment("http://127.0.0.1:9").items():
        monkeypatch.setenv(variable, value)
    (tmp_path / "run.yaml").write_text("plan: {epochs: 3}\n")
    (tmp_path / "runs/20261121-104600-3fa2").mkdir(parents=True)
    (tmp_path / "runs/20261121-104600-3fa2/config.yaml").write_text(CONFIG_HEAD)
    _, _, examples = help_of(name).partition("Examples:\n")
    lines = [line.strip() for line in examples.partition("\n\n")[0].splitlines()]
    assert len(lines) >= 2
    for line in lines:
        program, command, *words = shlex.split(line)
        assert (program, command) == ("raypipe", name)
        arguments = [word for word in words if word != "--json"]
        parse_command(name, cli.COMMANDS[name], arguments)


def test_help_and_version_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["help"]):
        main(words)
        assert capsys.readouterr().out == cli.overview()
    main(["--version"])
    of_libraries = f"(ray {version('ray')}, torch {version('torch')})"
    assert capsys.readouterr().out == f"raypipe {raypipe.__version__} {of_libraries}\n"


def test_help_settings_prints_type_default_and_meaning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["help", "settings", "plan.micro-batch"])
    first, *meaning = capsys.readouterr().out.splitlines()
    assert (
        first == "plan.micro_batch_size  (a whole number of at least 1, default 64)"
        and "forward" in meaning[0]
    )
    main(["help", "settings"])
    shown = {
        line.partition("  ")[0]
        for line in capsys.readouterr().out.splitlines()
        if line[0] != " "
    }
    assert shown == settings_of(RunConfig).keys()
    with pytest.raises(SystemExit, match="2"):
        main(["help", "settings", "qwerty"])


# A run's settings


def test_defaults_are_the_digits_unless_a_store_is_named() -> None:
    named = parse("--store.train=some.lmdb")
    assert dataclasses.replace(named, store=RunConfig().store) == RunConfig()
    run = parse()
    assert run.store.train == "" and isinstance(run.augment.mean, tuple)
    for section, settings in DIGITS.items():
        found = getattr(run, section)
        for name, value in settings.items():
            given = getattr(found, name)
            assert (list(given) if isinstance(given, tuple) else given) == value
        others = {
            name: getattr(RunConfig(), section).__dict__[name] for name in settings
        }
        run = dataclasses.replace(
            run, **{section: dataclasses.replace(found, **others)}
        )
    assert run == RunConfig()


def test_the_command_line_beats_the_file_which_beats_the_defaults(
    tmp_path: Path,
) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(
        "plan: {epochs: 3, seed: 4}\naugment: {mean: [0.1, 0.2, 0.3]}\nname: mine\n"
    )
    run = parse(f"--config={file}", "--plan.seed=5", "--train.use_gpu=false")
    assert (run.plan.epochs, run.plan.seed, run.train.use_gpu, run.name) == (
        3,
        5,
        False,
        "mine",
    )
    assert run.augment.mean == (0.1, 0.2, 0.3)
    assert run.plan.micro_batch_size == DIGITS["plan"]["micro_batch_size"]


# A value of a setting, in a file and on the command line


STEPS = [
    {"RandomResizedCrop": {"size": [8, 8]}},
    {"OneOf": {"transforms": [{"Blur": None}], "p": 0.3}},
]
VIEWS = {
    "near": {"transform": "light", "count": 2},
    "far": {"transform": STEPS, "size": 96},
}
COLUMNS = {"caption": {}, "tags": {"length": 8, "fill": -1}}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("transform.train", STEPS),
        ("transform.train", VIEWS),
        ("store.columns", ["caption", "tags"]),
        ("store.columns", COLUMNS),
    ],
)
def test_lists_and_mappings_are_given_in_a_file_or_an_option(
    tmp_path: Path, setting: str, value: Any
) -> None:
    section, name = setting.split(".")
    file = tmp_path / "my.yaml"
    file.write_text(yaml.safe_dump({section: {name: value}, "store.train": "a.lmdb"}))
    texts = (
        yaml.safe_dump(value),
        json.dumps(value),
        yaml.safe_dump(value, default_flow_style=True),
    )
    given = [[f"--{setting}={text}", "--store.train=a.lmdb"] for text in texts]
    for arguments in (*given, [f"--config={file}"]):
        assert getattr(getattr(parse(*arguments), section), name) == value
    if section == "transform":
        run = parse(f"--config={file}", "--transform.train=heavy")
        assert run.transform.train == "heavy"


@pytest.mark.parametrize("name", ["light", "none", "my.module:fn", "[light]", "12"])
def test_any_other_transform_is_a_string(name: str) -> None:
    assert parse(f"--transform.train={name}").transform.train == name


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--plan.epohcs=3", "plan.epochs"),
        ("--plan.epoch=3", "plan.epochs"),
        ("--epochs=3", "plan.epochs"),
        ("--train.learning-rate=1", "train.lr"),
        ("--batch_size=1", "plan.micro_batch_size"),
        ("--optimizr=1", "train.optimizer"),
        ("pool: {min_actor: 8}", "pool.min_actors"),
        ("storagepath: here", "storage_path"),
        ("--qwerty=1", ""),
    ],
)
def test_an_unknown_key_is_told_in_two_lines_with_what_it_may_be(
    tmp_path: Path, given: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if not given.startswith("--"):
        (tmp_path / "my.yaml").write_text(given)
        given = f"--config={tmp_path}/my.yaml"
    with pytest.raises(SystemExit, match="2"):
        parse(given)
    first, tip = capsys.readouterr().err.splitlines()
    assert first.startswith("error: unknown setting '")
    expected = f"did you mean '{meant}'?" if meant else "`raypipe help settings` lists"
    assert tip.startswith(f"  tip: {expected}")


@pytest.mark.parametrize(
    "option",
    [
        "--plan.epochs=many",
        "--plan.epochs=0",
        "--plan.shuffle=globl",
        "--plan.micro_batch_size=2.5",
    ],
)
def test_a_wrong_value_exits_with_2_and_is_named(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(option)
    name, _, value = option.removeprefix("--").partition("=")
    told = capsys.readouterr().err
    assert f"{name} must be" in told and value in told


@pytest.mark.parametrize("place", ["{}", "{}/", "file://{}"])
def test_resume_takes_the_stored_settings_and_later_overrides(
    tmp_path: Path, place: str
) -> None:
    settings = "store: {train: some.lmdb}\nplan: {epochs: 3, seed: 4}\nname: mine\n"
    (tmp_path / "config.yaml").write_text(CONFIG_HEAD + settings)
    run = parse(f"--resume={place.format(tmp_path)}", "--plan.epochs=5")
    assert (run.store.train, run.name) == ("some.lmdb", "mine")
    assert (run.plan.epochs, run.plan.seed) == (5, 4)
    assert run.train == RunConfig().train  # what the file leaves out is not the digits'


# How a command ends


@pytest.mark.parametrize(
    ("end", "is_run", "code"),
    [
        ({"stopped": True}, True, 75),
        ({"stopped": False}, True, 0),
        (Stopped(), True, 75),
        (KeyboardInterrupt(), False, 130),
        (ConfigError("what to fix; did you mean this?"), False, 1),
        (NoRoomError("no GPU"), True, 75),
        (NoRoomError("no GPU"), False, 1),
        (ResourceError("no GPU"), True, 1),
        ({"ok": False}, False, 1),
        ({"equal": False}, False, 1),
    ],
)
def test_each_end_of_a_command_has_its_exit_code(
    end: Any, is_run: bool, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> dict[str, Any]:
        if isinstance(end, BaseException):
            raise end
        return end

    with pytest.raises(SystemExit) if code else contextlib.nullcontext() as caught:
        _finish(command, is_run=is_run)
    assert not code or caught.value.code == code
    if isinstance(end, ConfigError):
        told = "error: what to fix\n  tip: did you mean this?\n"
        assert capsys.readouterr().err == told


def test_a_failure_ends_although_ray_does_not() -> None:
    script = (
        "import time; from raypipe.commands import cli; cli._END_S = 0.1\n"
        "cli._shutdown = lambda: time.sleep(1000)\n"
        "def command(): raise cli.RaypipeError('the head is silent')\n"
        "cli._finish(command)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "the head is silent" in done.stderr


def test_a_command_ends_with_text_in_a_terminal_and_json_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def command() -> dict[str, Any]:
        print("progress")
        return {
            "store": "a.lmdb",
            "width_px": [1, 2, 3000],
            "classes": None,
            "images_per_s": 2.5,
        }

    _finish(command, cli.print_result)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["classes"] is None
    monkeypatch.setattr(cli, "_is_terminal", lambda: True)
    _finish(command, cli.print_result)
    assert (
        capsys.readouterr().out
        == "progress\na.lmdb\n  width   1–3,000 px (median 2)\n  images  2.5/s\n"
    )
    _finish(command)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["store"] == "a.lmdb"


def test_a_pipe_gets_only_the_result_of_a_command_but_a_runs_progress(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def command() -> dict[str, Any]:
        print_progress(logging.getLogger("raypipe"), "waiting for 1 CPU")
        return {"num": 1}

    _finish(command)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ('{"num": 1}\n', "waiting for 1 CPU\n")
    _finish(command, is_run=True)
    assert capsys.readouterr().out == 'waiting for 1 CPU\n{"num": 1}\n'


def test_an_unknown_command_exits_with_2_and_is_told_which_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["inspekt", "some.lmdb"])
    assert caught.value.code == 2
    assert (
        capsys.readouterr().err
        == "error: unknown command 'inspekt'\n  tip: did you mean 'inspect'?\n"
    )


def test_a_console_of_an_old_encoding_gets_what_it_can_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    console = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr("sys.stdout", console)
    main(["--help"])
    console.flush()
    assert b"raypipe COMMAND [--OPTION VALUE ?]" in console.buffer.getvalue()  # type: ignore[attr-defined]


HEAVY = {"ray", "torch", "torchvision", "albumentations", "kornia", "cv2", "sklearn"}
PROGRAM = """import sys
from raypipe.commands.cli import COMMANDS, main
for words in [["--help"], *([*name.split(), "--help"] for name in COMMANDS)]:
    try:
        main(words)
    except SystemExit as end:
        print("code", end.code)
print(*sys.modules)
"""


def test_help_loads_no_library_that_the_work_itself_needs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True
    )
    assert done.stdout.startswith(cli.overview()) and done.stdout.count(
        "code 0\n"
    ) == len(cli.COMMANDS)
    assert all(f"\nusage: raypipe {name} " in done.stdout for name in cli.COMMANDS), (
        done.stderr
    )
    assert not HEAVY & set(done.stdout.splitlines()[-1].split())


def test_what_is_printed_needs_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as `| head` does
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        with printing():
            print("text")
    monkeypatch.setattr(sys, "stdout", None)  # as it is for `>&-`
    _finish(dict, print)


def test_numbers_and_words_of_a_file_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(
        "pool: {grow_after_s: 5.e-5}\ntrain: {lr: 1e-3, amp: off, model: no, use_gpu: true}\nname: 2026-11-25\n"
    )
    run = parse(f"--config={file}")
    assert (run.train.lr, run.pool.grow_after_s, run.train.amp, run.train.model) == (
        0.001,
        5e-5,
        "off",
        "no",
    )
    assert run.train.use_gpu is True and run.name == "2026-11-25"
    assert parse("--train.lr=2e-3", "--train.amp=off", "--name=1e3").train.lr == 0.002


@pytest.mark.parametrize(
    "text",
    [
        "plan: {epochs: [",
        "- 1\n",
        "plan: 3\n",
        "plan: {epochs: 3, seed: 1, epochs: 4}",
        "plan: {epochs: 3}\nname: a\nplan: {seed: 4}\n",
        f"plan: {{epochs: {'9' * 5000}}}",
        "[" * 3000,
        "name: !!timestamp a",
    ],
    ids=lambda text: text[:40],
)
def test_a_file_that_holds_no_settings_is_wrong_usage(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.yaml").write_text(text)
    with pytest.raises(SystemExit, match="2"):
        parse(f"--config={tmp_path}/my.yaml")
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert text != "[" * 3000 or "it is nested more than 100 deep" in told


@pytest.mark.parametrize(
    ("result", "is_run", "code"),
    [
        ({"run_dir": "r", "stopped": True}, True, 75),
        ({"digest": "d"}, False, 1),
    ],
)
def test_a_run_that_ended_well_keeps_its_code_on_a_full_stdout(
    result: dict, is_run: bool, code: int
) -> None:
    program = f"from raypipe.commands.cli import _finish; _finish(lambda: {result!r}, is_run={is_run})"
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", program],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert ended.returncode == code
    assert "the output cannot be written" in ended.stderr


def test_a_store_that_does_not_exist_is_named_before_torch_is_loaded(
    tmp_path: Path,
) -> None:
    words = ["train", "--store.train", str(tmp_path / "no.lmdb")]
    program = (
        f"import sys; from raypipe.commands.cli import main\ntry: main({words})\n"
        "finally: assert not {'ray', 'torch'} & set(sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert ended.returncode == 1 and "no.lmdb does not exist" in ended.stderr
    assert "loading Ray and torch" not in ended.stdout


def test_a_failure_is_a_line_of_json_with_json_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(tmp_path / "no.lmdb")
    try:
        with pytest.raises(SystemExit, match="1"):
            main(["train", "--store.train", store, "--log-format", "json"])
    finally:
        configure_logs("text")
    told = json.loads(capsys.readouterr().err)
    assert (told["level"], told["message"]) == ("ERROR", f"{store} does not exist")
