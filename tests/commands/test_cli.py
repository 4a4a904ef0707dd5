from __future__ import annotations

import ast
import dataclasses
import io
import json
import logging
import os
import pickle
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
from raypipe.errors import ConfigError, NoRoomError, RaypipeError, ResourceError
from raypipe.launch.interrupts import Stopped
from raypipe.launch.run_folder import CONFIG_HEAD
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
        ("a --hight 3", "unknown setting 'hight'\n  tip: did you mean 'height'?\n"),
        (
            "a --qwerty 3",
            "unknown setting 'qwerty'\n  tip: `raypipe help settings` lists",
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
def test_a_usage_line_and_two_examples_parse(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # An address of a store or a run is looked at: a bucket of AWS's is a request, six seconds without a network.
    for variable, value in environment("http://127.0.0.1:9").items():
        monkeypatch.setenv(variable, value)
    (tmp_path / "run.yaml").write_text("plan: {epochs: 3}\n")
    (tmp_path / "runs/20261121-104600-3fa2").mkdir(parents=True)
    (tmp_path / "runs/20261121-104600-3fa2/config.yaml").write_text(CONFIG_HEAD)
    text = help_of(name)
    usage = (
        text.partition("\n")[0]
        .removeprefix("usage: ")
        .replace("[--OPTION VALUE …]", "")
    )
    _, _, examples = text.partition("Examples:\n")
    lines = [line.strip() for line in examples.partition("\n\n")[0].splitlines()]
    assert len(lines) >= 2 and all(line.startswith(f"raypipe {name}") for line in lines)
    for line in [
        usage,
        usage.replace("[STORE|RUN]", "a.lmdb").replace("[RUN]", "a-run"),
        *lines,
    ]:
        words = [
            word
            for word in shlex.split(line)
            if not word.startswith("[") or "," in word
        ]
        parse_command(
            name,
            cli.COMMANDS[name],
            [w for w in words[1 + len(name.split()) :] if w != "--json"],
        )


def test_every_command_is_in_one_group_of_the_overview(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in ([], ["--help"], ["help"]):
        main(words)
        assert capsys.readouterr().out == cli.overview()
    assert all(len(line) <= 90 for line in cli.overview().splitlines()[:20])


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


def test_the_version_names_ray_and_torch(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    ray, torch = version("ray"), version("torch")
    assert (
        capsys.readouterr().out
        == f"raypipe {raypipe.__version__} (ray {ray}, torch {torch})\n"
    )


# A run's settings


def plain(value: Any) -> Any:
    """A setting as YAML has it, without the defaults of a nested group."""
    if isinstance(value, tuple):
        return list(value)
    if dataclasses.is_dataclass(value):
        default = type(value)()
        return {k: v for k, v in vars(value).items() if v != getattr(default, k)}
    return value


def test_without_a_store_the_defaults_are_the_digits() -> None:
    run = parse()
    assert run.store.train == ""
    changed = {
        section.name: {
            field.name: plain(value)
            for field in dataclasses.fields(getattr(run, section.name))
            if (value := getattr(getattr(run, section.name), field.name))
            != getattr(getattr(RunConfig(), section.name), field.name)
            or field.name in DIGITS.get(section.name, {})
        }
        for section in dataclasses.fields(RunConfig)
        if dataclasses.is_dataclass(getattr(run, section.name))
    }
    assert {name: values for name, values in changed.items() if values} == DIGITS
    assert isinstance(run.augment.mean, tuple)


def test_with_a_store_the_defaults_are_those_of_the_dataclasses() -> None:
    run = parse("--store.train=some.lmdb")
    assert dataclasses.replace(run, store=RunConfig().store) == RunConfig()


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


@pytest.mark.parametrize(
    "columns",
    [
        "[caption, tags]",
        "{caption: {}, tags: {length: 8, fill: -1}, embedding: {dtype: float32}}",
    ],
)
def test_columns_are_given_on_the_command_line_or_in_a_file(
    columns: str, tmp_path: Path
) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(f"store: {{train: a.lmdb, columns: {columns}}}\n")
    for run in (
        parse(f"--config={file}"),
        parse("--store.train=a.lmdb", f"--store.columns={columns}"),
    ):
        assert run.store.columns == yaml.safe_load(columns)


def test_a_store_named_in_the_file_is_not_the_digits(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("store: {train: some.lmdb}\n")
    assert parse(f"--config={file}").train == RunConfig().train


def test_an_unknown_key_on_the_command_line_exits_with_2_and_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--plan.epohcs=3")
    assert caught.value.code == 2
    assert "plan.epohcs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--plan.epohcs=3", "'plan.epohcs'\n  tip: did you mean 'plan.epochs'?\n"),
        ("--epochs=3", "'epochs'\n  tip: did you mean 'plan.epochs'?\n"),
        (
            "pool: {min_actor: 8}",
            "'pool.min_actor'\n  tip: did you mean 'pool.min_actors'?\n",
        ),
        ("storagepath: here", "'storagepath'\n  tip: did you mean 'storage_path'?\n"),
        (
            "--qwerty=1",
            "'qwerty'\n  tip: `raypipe help settings` lists the settings of a run",
        ),
    ],
)
def test_an_unknown_key_is_told_in_two_lines_with_what_it_may_be(
    tmp_path: Path, given: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if not given.startswith("--"):
        (tmp_path / "my.yaml").write_text(given)
        given = f"--config={tmp_path}/my.yaml"
    with pytest.raises(SystemExit):
        parse(given)
    lines = capsys.readouterr().err
    assert (
        lines.startswith(f"error: unknown setting {meant}") and lines.count("\n") == 2
    )


def test_an_abbreviated_key_is_an_unknown_key() -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--plan.epoch=3")
    assert caught.value.code == 2


@pytest.mark.parametrize(
    "text", ["plan: {epohcs: 3}", "epohcs: 3", "train: {epohcs: 3}"]
)
def test_an_unknown_key_in_the_file_exits_with_2_and_is_named(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as caught:
        parse(f"--config={file}")
    assert caught.value.code == 2
    assert "epohcs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    ["--plan.epochs=many", "--plan.shuffle=globl", "--plan.micro_batch_size=2.5"],
)
def test_a_value_of_the_wrong_type_exits_with_2_and_is_named(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(option)
    assert caught.value.code == 2
    assert option.partition("=")[0].removeprefix("--") in capsys.readouterr().err


def test_a_value_out_of_range_names_its_field(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises((ConfigError, SystemExit)) as caught:
        parse("--plan.epochs=0")
    assert (
        "plan.epochs must be a whole number of at least 1, got 0"
        in str(caught.value) + capsys.readouterr().err
    )


STEPS = [
    {"RandomResizedCrop": {"size": [8, 8]}},
    {"OneOf": {"transforms": [{"Blur": None}], "p": 0.3}},
]


@pytest.mark.parametrize(
    "text",
    [
        yaml.safe_dump(STEPS),
        json.dumps(STEPS),
        yaml.safe_dump(STEPS, default_flow_style=True),
    ],
)
def test_a_transform_may_be_a_list_of_steps_in_a_file_or_an_option(
    tmp_path: Path, text: str
) -> None:
    assert parse(f"--transform.train={text}").transform.train == STEPS
    file = tmp_path / "my.yaml"
    file.write_text(
        json.dumps({"transform": {"train": yaml.safe_load(text), "val": "center"}})
    )
    assert parse(f"--config={file}").transform.train == STEPS
    assert (
        parse(f"--config={file}", "--transform.train=heavy").transform.train == "heavy"
    )
    assert parse(
        f"--config={file}", "--transform.train=[{Blur: {p: 1}}]"
    ).transform.train == [{"Blur": {"p": 1}}]


def test_a_transform_may_be_a_mapping_of_views(tmp_path: Path) -> None:
    views = {
        "near": {"transform": "light", "count": 2},
        "far": {"transform": STEPS, "size": 96},
    }
    for text in (
        yaml.safe_dump(views),
        json.dumps(views),
        yaml.safe_dump(views, default_flow_style=True),
    ):
        assert parse(f"--transform.train={text}").transform.train == views
        file = tmp_path / "my.yaml"
        file.write_text(json.dumps({"transform": {"train": yaml.safe_load(text)}}))
        assert parse(f"--config={file}").transform.train == views
        assert (
            parse(f"--config={file}", "--transform.train=light").transform.train
            == "light"
        )


@pytest.mark.parametrize("name", ["light", "none", "my.module:fn", "[light]", "12"])
def test_any_other_transform_is_a_string(name: str) -> None:
    assert parse(f"--transform.train={name}").transform.train == name


# Resume


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        CONFIG_HEAD
        + "store: {train: some.lmdb}\nplan: {epochs: 3, seed: 4}\nname: mine\n"
    )
    return folder


@pytest.mark.parametrize("slash", ["", "/"])
def test_resume_takes_the_stored_settings_and_later_overrides(
    stored: Path, slash: str
) -> None:
    run = parse(f"--resume={stored}{slash}", "--plan.epochs=5")
    assert (run.store.train, run.plan.epochs, run.plan.seed, run.name) == (
        "some.lmdb",
        5,
        4,
        "mine",
    )
    assert run.train == RunConfig().train  # what the file leaves out is not the digits'


def test_resume_takes_the_stored_settings_by_uri(stored: Path) -> None:
    run = parse(f"--resume={stored.as_uri()}")
    assert (run.store.train, run.plan.epochs, run.plan.seed) == ("some.lmdb", 3, 4)


# How a command ends


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


def test_an_error_of_raypipes_own_exits_with_1_and_without_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def command() -> dict[str, Any]:
        raise ConfigError("what to fix; did you mean this?")

    with pytest.raises(SystemExit) as caught:
        _finish(command)
    assert caught.value.code == 1
    assert capsys.readouterr().err == "error: what to fix\n  tip: did you mean this?\n"


def test_an_interrupt_exits_with_130() -> None:
    def command() -> dict[str, Any]:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as caught:
        _finish(command)
    assert caught.value.code == 130


def test_an_unknown_option_of_a_command_exits_with_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["digest", "some.lmdb", "--micro-bach=8"])
    assert caught.value.code == 2
    assert "bach" in capsys.readouterr().err


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


def test_every_command_takes_a_configuration_or_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(
        run: RunConfig, target: str = "", *, output: str = ""
    ) -> dict[str, Any]:
        given.append(run)
        return {}

    given: list[RunConfig] = []
    monkeypatch.setattr(cli, "COMMANDS", {"look": command})
    (tmp_path / "my.yaml").write_text("store: {train: other.lmdb}\nplan: {epochs: 7}\n")
    config = ["--config", str(tmp_path / "my.yaml")]
    for args in (["x.lmdb", *config], [*config, "--plan.seed=1"], []):
        main(["look", *args, "-o", "page.html"])
    assert [(run.store.train, run.plan.epochs, run.plan.seed) for run in given[:2]] == [
        *(("x.lmdb", 7, 0), ("other.lmdb", 7, 1)),
    ]
    assert given[2] == parse()


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
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ({"stopped": True}, 75),
        (Stopped(), 75),
        (KeyboardInterrupt(), 130),
        ({"stopped": False}, None),
    ],
)
def test_a_run_stopped_with_a_checkpoint_has_its_own_exit_code(
    end: Any, code: int | None
) -> None:
    def command() -> dict[str, Any]:
        if isinstance(end, BaseException):
            raise end
        return end

    try:
        _finish(command)
    except SystemExit as ended:
        assert ended.code == code
    else:
        assert code is None


@pytest.mark.parametrize(
    ("result", "is_run", "code"),
    [
        ({"run_dir": "r"}, True, 0),
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


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("train.learning_rate", "train.lr"),
        ("learning_rate", "train.lr"),
        ("batch_size", "plan.micro_batch_size"),
        ("optimizr", "train.optimizer"),
        ("plan.epoch", "plan.epochs"),
    ],
)
def test_an_unknown_setting_leads_to_the_one_that_is_meant(
    name: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", f"--{name}", "1"])
    assert f"did you mean '{meant}'?" in capsys.readouterr().err


def test_a_store_that_does_not_exist_is_named_before_torch_is_loaded(
    tmp_path: Path,
) -> None:
    program = (
        "import sys; from raypipe.commands.cli import main\n"
        f"try: main(['train', '--store.train', {str(tmp_path / 'no.lmdb')!r}])\n"
        "finally: assert not {'ray', 'torch'} & set(sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert ended.returncode == 1 and "no.lmdb does not exist" in ended.stderr, (
        ended.stderr
    )
    assert "loading Ray and torch" not in ended.stdout


def test_the_last_line_of_a_failure_is_json_with_json_logs(tmp_path: Path) -> None:
    store = str(tmp_path / "no.lmdb")
    command = [
        sys.executable,
        "-m",
        "raypipe.commands.cli",
        "train",
        "--log-format",
        "json",
        "--store.train",
        store,
    ]
    ended = subprocess.run(command, capture_output=True, text=True)
    lines = (ended.stdout + ended.stderr).splitlines()
    assert ended.returncode == 1
    assert [json.loads(line) for line in lines]  # each of them
    last = json.loads(ended.stderr.splitlines()[-1])
    assert last["level"] == "ERROR" and last["message"] == f"{store} does not exist"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RaypipeError("the head is silent"), 1, "the head is silent"),
        (Stopped(), 75, ""),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_a_command_ends_although_ray_does_not(
    error: BaseException, code: int, said: str
) -> None:
    script = (
        "import pickle, sys, time; from raypipe.commands import cli; cli._END_S = 0.1\n"
        "cli._shutdown = lambda: time.sleep(1000)\n"
        "def command(): raise pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "cli._finish(command)"
    )
    command = [sys.executable, "-c", script, pickle.dumps(error).hex()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code and said in done.stderr


@pytest.mark.parametrize(
    ("error", "is_run", "code"),
    [
        (NoRoomError("no GPU"), True, 75),
        (NoRoomError("no GPU"), False, 1),
        (ResourceError("no GPU"), True, 1),
    ],
)
def test_a_run_without_room_says_by_its_code_that_it_may_be_tried_again(
    error: Exception, is_run: bool, code: int
) -> None:
    def run() -> dict[str, Any]:
        raise error

    with pytest.raises(SystemExit) as ended:
        cli._finish(run, is_run=is_run)
    assert ended.value.code == code
