"""The settings of a run, from YAML files and the command line."""

from __future__ import annotations

import contextlib
import re
import sys
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

from raypipe.config import RunConfig
from raypipe.errors import ConfigError, without_credentials
from raypipe.logs import printable
from raypipe.storage.files import read_whole
from raypipe.storage.filesystem import as_uri, join
from raypipe.storage.lease import check_owner


def parse_run(args: list[str] | None, doc: str | None) -> RunConfig:
    """A RunConfig from `--config FILE.yaml` and overrides; the digits' where no store is named."""
    return parse_job(args, doc)[0]


def parse_job(args: list[str] | None, doc: str | None, **sections: type) -> tuple[RunConfig, dict[str, Any]]:
    """A RunConfig as `parse_run` makes it, and the job's own sections of settings, by their names.

    Unknown keys, in the file or on the command line, end the program with exit code 2.
    """
    args = sys.argv[1:] if args is None else args
    check_no_pipe(args)
    parser = Parser(description=doc, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="YAML file with any of the settings below")
    parser.add_class_arguments(RunConfig, as_group=False)
    for name, section in sections.items():
        parser.add_class_arguments(section, name)
    given = parser.parse_args(args)
    if given.resume:
        check_owner(given.resume, given.trust)
        base = _stored_config(given.resume)
    elif not given.store.train:
        base = (files("raypipe") / "digits.yaml").read_text()
    else:
        base = ""
    # Settings that come first give way to later ones.
    values = parser.instantiate_classes(parser.parse_args([f"--config={base}", *args] if base else args)).as_dict()
    values.pop("config", None)
    values["trust"] = given.trust  # whatever the stored configuration says
    own = {name: values.pop(name) for name in sections}
    return RunConfig(**values), own


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
