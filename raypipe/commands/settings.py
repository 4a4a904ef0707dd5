"""The settings of a run, from YAML files and the command line: of jobs and of commands alike."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

from raypipe.config import RunConfig
from raypipe.errors import ConfigError, without_credentials
from raypipe.logs import printable
from raypipe.storage.files import read_whole
from raypipe.storage.filesystem import as_uri, exists, join
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
    """The parser of a command, by its parameters; those without defaults are given by their places.

    One named `run` stands for all settings of a run; `target` and `folder` are optional, and given by place.
    """
    about = (inspect.getdoc(command) or "").partition("\nArgs:")[0]
    parameters = inspect.signature(command).parameters
    optional = [name for name, each in parameters.items() if name in _OPTIONAL and each.default == ""]
    places = [_OPTIONAL[name][0] for name in optional]
    places += [
        each.name.upper() for each in parameters.values() if each.default is each.empty and each.name != "run"
    ]
    parser = Parser(prog=f"raypipe {name}", usage=" ".join(["%(prog)s", *places, "[--OPTION VALUE …]"]))
    parser.description = about
    for each in optional:
        parser.add_argument(each, nargs="?", default="", help=_OPTIONAL[each][1])
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
    of_run = given.resume or (target if _is_run(target) else "")
    if of_run:
        check_owner(of_run, given.trust)
        base = _stored_config(of_run)
    elif not (target or given.store.train):
        base = (files("raypipe") / "digits.yaml").read_text()
    else:
        base = ""
    # Settings that come first give way to later ones.
    values = parser.instantiate_classes(parser.parse_args([f"--config={base}", *args] if base else args)).as_dict()
    values.pop("config", None)
    values["trust"] = given.trust  # whatever the stored configuration says
    run = RunConfig(**{field.name: values.pop(field.name) for field in dataclasses.fields(RunConfig)})
    if target and not of_run:
        run = dataclasses.replace(run, store=dataclasses.replace(run.store, train=target))
    return {"run": run, **values}


def _is_run(address: str) -> bool:
    """Whether it is the folder of a run, rather than a store."""
    if not address:
        return False
    try:
        with impatient():
            return exists(join(as_uri(address), "config.yaml"))
    except (ConfigError, OSError, UnicodeError):  # those who open it as a store tell what is wrong with it
        return False


def _stored_config(run: str) -> str:
    """The effective configuration that a run left behind, as YAML; `launch` tells if there is none."""
    return (read_whole(join(as_uri(run), "config.yaml")) or b"").decode()


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
        self.exit(2, f"error: {printable(without_credentials(message))}{self._meant(message)}\nsee --help\n")

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
