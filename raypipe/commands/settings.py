"""The settings of a run, from YAML files and the command line: of jobs and of commands alike."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser

from raypipe.config import RunConfig, TrainConfig
from raypipe.errors import ConfigError, without_credentials
from raypipe.logs import printable
from raypipe.lookup import search_here
from raypipe.section import check, kind_at
from raypipe.storage.filesystem import as_uri, is_remote, open_filesystem
from raypipe.storage.lease import check_owner
from raypipe.storage.patience import impatient


def parse_run(args: list[str] | None, doc: str | None) -> RunConfig:
    """A RunConfig from `--config FILE.yaml` and overrides; the digits' where no store is named."""
    return parse_job(args, doc)[0]


def parse_job(args: list[str] | None, doc: str | None, **sections: type) -> tuple[RunConfig, dict[str, Any]]:
    """A RunConfig as `parse_run` makes it, and the job's own sections of settings, by their names.

    Unknown keys, in the file or on the command line, end the program with exit code 2.
    """
    parser = Parser(description=doc)
    for name, section in sections.items():
        parser.add_class_arguments(section, name)
    _add_run(parser)
    own = _parsed(parser, with_dashes(sys.argv[1:] if args is None else args))
    return own.pop("run"), own


def command_parser(name: str, command: Callable[..., Any]) -> Parser:
    """The parser of a command, by its parameters; those without defaults are given by their places, or as options
    where they have names alone.

    One named `run` stands for all settings of a run; `target` and `folder` are optional, and given by place.
    """
    about = (inspect.getdoc(command) or "").partition("\nArgs:")[0]
    parameters = inspect.signature(command).parameters
    optional = [name for name, each in parameters.items() if name in _OPTIONAL and each.default == ""]
    places = [_OPTIONAL[name][0] for name in optional]
    for each in parameters.values():
        if each.default is each.empty and each.name != "run":
            option = f"--{each.name} " if each.kind is each.KEYWORD_ONLY else ""
            places.append(option + each.name.upper())
    parser = Parser(prog=f"raypipe {name}", usage=" ".join(["%(prog)s", *places, "[--OPTION VALUE …]"]))
    parser.description = about
    for place in optional:
        parser.add_argument(place, nargs="?", default="", help=_OPTIONAL[place][1])
    parser.add_function_arguments(command, as_group=False, as_positional=True, skip={"run", *optional})
    if "run" in parameters:
        _add_run(parser)
    return parser


def parse_command(name: str, command: Callable[..., Any], args: list[str]) -> dict[str, Any]:
    """The arguments of a command; `target`, if it is a run's folder, has settings that the others override."""
    parser = command_parser(name, command)
    if "run" in inspect.signature(command).parameters:
        return _parsed(parser, args)
    check_no_pipe(args)
    return parser.instantiate_classes(parser.parse_args(args)).as_dict()


def with_dashes(args: list[str]) -> list[str]:
    """Options as the parsers know them: `--micro-batch-size=8` as `--micro_batch_size=8`, `--overwrite` as
    `--overwrite=true`, `-o` as `--output`."""
    return [_normalized(arg) for arg in args]


def _normalized(arg: str) -> str:
    if arg == "-o" or arg.startswith("-o="):  # such parsers make no short options
        return "--output" + arg[2:]
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    name = "--" + name[2:].replace("-", "_")
    return name + ("=true" if name in _FLAGS and not equals else equals + value)


def _add_run(parser: Parser) -> None:
    parser.add_argument("--config", action="config", help="YAML file with any of the settings of a run below")
    parser.add_class_arguments(RunConfig, as_group=False)


def _parsed(parser: Parser, args: list[str]) -> dict[str, Any]:
    """The settings of a run as `run`, and what else the parser knows, by name."""
    check_no_pipe(args)
    given = parser.parse_args(args)
    target = given.get("target", "")
    # What help need not wait for.
    from raypipe.train.run_folder import folder_to_resume, read_config

    resume = folder_to_resume(given.resume, given.storage_path, given.name)
    of_target = target if not resume and _is_run(target) else ""
    if resume:
        check_owner(resume, given.trust)
    if of_run := resume or of_target:
        base = read_config(as_uri(of_run))
    elif not (target or given.store.train):
        base = (files("raypipe") / "digits.yaml").read_text()
    else:
        base = ""
    # Settings that come first give way to later ones.
    values = parser.instantiate_classes(parser.parse_args([f"--config={base}", *args] if base else args)).as_dict()
    values.pop("config", None)
    values["trust"] = given.trust  # whatever the stored configuration says
    values["resume"] = resume or given.resume
    run = RunConfig(**{field.name: values.pop(field.name) for field in dataclasses.fields(RunConfig)})
    if target and not of_run:
        run = dataclasses.replace(run, store=dataclasses.replace(run.store, train=target))
    if of_target:
        if not given.trust:
            _check_code(of_target, run, set(dict(_code_of(given.as_dict())).values()))
        # No command with a target trains, so none imports a model.
        run = dataclasses.replace(run, train=TrainConfig(num_workers=run.train.num_workers))
    train = run.store.train
    stores = train.values() if isinstance(train, dict) else (train,)
    _close_here(filter(None, (of_run, *stores, run.store.val, *map(str, values.values()))))
    if any(_code_of(dataclasses.asdict(run))):
        search_here()  # before Ray is told where its workers look, which need not be in this folder
    return {"run": run, **values}


def _check_code(target: str, run: RunConfig, own: set[str]) -> None:
    """Raise ConfigError where the configuration of a target names code that the user has not named too.

    Any folder may imitate a run's, and belongs to whoever has downloaded it.
    """
    foreign = {at: code for at, code in _code_of(dataclasses.asdict(run)) if code not in own}
    if foreign:
        named = ", ".join(f"{at}: {code}" for at, code in foreign.items())
        raise ConfigError(
            f"the configuration of {target} names code ({named}), which would run: look at it, then add "
            "--trust=true, or give these settings yourself"
        )


def _code_of(settings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Settings that may name code, and the code: all with a colon of the transform and of the augmentation."""
    todo: list[tuple[str, Any]] = [(name, settings[name]) for name in ("transform", "augment")]
    while todo:
        at, value = todo.pop()
        if isinstance(value, str) and ":" in value:
            yield at, value
        elif isinstance(value, dict):
            todo += [(f"{at}.{name}", each) for name, each in value.items()]
        elif isinstance(value, list | tuple):
            todo += [(at, each) for each in value]


def _close_here(addresses: Iterable[str]) -> None:
    """Keep modules of the current folder from being imported where it lies in a store or a run, or is one.

    `lookup.import_name` reads this variable, and so do the processes that this one starts: Ray's workers have the
    current folder in front of all others otherwise, and so has `python -c`.
    """
    here = Path.cwd()
    for address in addresses:
        with contextlib.suppress(ConfigError, OSError, ValueError):  # those who open it tell what is wrong with it
            if not is_remote(address) and Path(open_filesystem(as_uri(address))[1]) in (here, *here.parents):
                os.environ["PYTHONSAFEPATH"] = "1"


def _is_run(address: str) -> bool:
    """Whether it is the folder of a run, rather than a store."""
    from raypipe.train.run_folder import has_config

    try:
        with impatient():
            return bool(address) and has_config(as_uri(address))
    except (ConfigError, OSError, UnicodeError):  # those who open it as a store tell what is wrong with it
        return False


def check_no_pipe(args: list[str]) -> None:
    """Raise ConfigError where an argument is a pipe: the parser reads configurations from such, and waits."""
    for arg in args:
        value, is_pipe = arg.partition("=")[2] if arg.startswith("--") else arg, False
        with contextlib.suppress(OSError, ValueError):  # of what is no path
            is_pipe = Path(value).is_fifo()
        if is_pipe:
            raise ConfigError(f"{value} is a FIFO, not a regular file: write what it brings to a file first")


_OPTIONAL = {
    "target": (
        "[STORE|RUN]",
        "a store, or the folder of a run, whose settings then come first; empty = store.train",
    ),
    "folder": ("[RUN]", "the folder of a run; empty = that of storage_path and name"),
}
_FLAGS = {"--add_sizes", "--overwrite", "--verify", "--no_ray", "--show_plan"}

_RENAMED = {
    "checkpoint_every": "checkpoint_interval",
    "clip_norm": "max_grad_norm",
    "exif": "apply_exif",
    "gpu": "use_gpu",
    "in_flight": "max_in_flight",
    "leave_out": "exclude",
    "log_every": "log_interval",
    "micro_batch": "micro_batch_size",
    "per_step": "global_batch_size, which is micro_batch_size times it",
    "prefer_nodes": "label_selector",
    "runs": "storage_path",
    "val_every": "val_interval",
    "val_leave_out": "val_exclude",
    "workers": "num_workers",
}
"""What settings were called once, and are called now."""

_WRONG_TYPE = re.compile(r'Parser key "([\w.]+)":.*(?:Got|Given) value: (.*)', re.DOTALL)
_UNKNOWN = re.compile(
    r"unrecognized arguments: --([\w.]+)|Group '([\w.]+)' does not accept option '([\w.]+)'|"
    r"Option '([\w.]+)' is not accepted"
)


class Parser(ArgumentParser):
    """jsonargparse's, whose errors are short, and show a wrong value, but no credentials in it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **({"allow_abbrev": False} | kwargs))

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(without_credentials(message), ex)
        short = self._of_type(message) + self._meant(message)
        self.exit(2, f"error: {printable(without_credentials(short))}\nsee --help\n")

    def _of_type(self, message: str) -> str:
        """The message about a value of the wrong type, as a script gets it; any other as it is."""
        if match := _WRONG_TYPE.match(message):
            name, text = match.groups()
            kinds = {action.dest: getattr(action, "_typehint", None) for action in self._actions}
            kind = kind_at(RunConfig, name) or kinds.get(name)
            with contextlib.suppress(yaml.YAMLError):
                text = yaml.safe_load(text)
            try:
                check(name, text, kind if kind is not None else Any)
            except ConfigError as error:
                return str(error)
        return message

    def _meant(self, message: str) -> str:
        """The setting that an unknown one may be."""
        if not (match := _UNKNOWN.search(message)):
            return ""
        key = ".".join(filter(None, match.groups()))
        section, dot, name = key.rpartition(".")
        if name in _RENAMED:
            return f": {key} is called {section}{dot}{_RENAMED[name]} now"
        known = [action.dest for action in self._actions]
        found = get_close_matches(key, known, 1) or [each for each in known if each.rpartition(".")[2] == name]
        return f": did you mean {found[0]}?" if found else ""
