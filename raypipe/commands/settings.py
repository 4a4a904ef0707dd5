"""The settings of a run, from YAML files and the command line, for jobs and commands alike."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from raypipe.commands.parser import Parser, fail
from raypipe.config import RunConfig
from raypipe.errors import DAMAGE, ConfigError, StoreError
from raypipe.importing import check_named_code, search_here, texts_in
from raypipe.section import build, check, fits, settings_of
from raypipe.storage.files import read_text
from raypipe.storage.filesystem import as_uri, is_remote, open_filesystem
from raypipe.storage.lease import check_owner
from raypipe.storage.retries import tried_once
from raypipe.stores import open_store, store_options

# the steps of a transform are 1 MiB at most, see `transform_steps`
_MAX_CONFIG_BYTES = 16 << 20
_MAX_DEPTH = 100  # the steps of a transform are at most 32 deep, in lists and mappings


Values = dict[str, Any]
"""Settings by their whole names."""


def parse_command(
    name: str,
    command: Callable[..., Any],
    args: list[str] | None = None,
    doc: str | None = None,
) -> Values:
    """Parse the arguments of a command, by default the program's own; a job has a doc and no name.

    `target` is the training store. Unknown settings and values of a
    wrong type, in a file or on the command line, end the program with exit code 2.

    Raises:
        ConfigError: settings do not go together, or the run to resume is missing.
    """
    parser = Parser(name, command, doc)
    values = _read(parser, sys.argv[1:] if args is None else args)
    run = {}
    if parser.takes_run:
        values = _with_base(values, parser)
        run = {"run": build(RunConfig, values)}
    return {
        key: values[key]
        for key in inspect.signature(command).parameters
        if key in values
    } | run


def _read(parser: Parser, args: list[str]) -> Values:
    """The settings that files and arguments give, by their whole names; an argument beats a file."""
    texts, configs = parser.read(args)
    contents = {file: read_text(file, _MAX_CONFIG_BYTES) for file in configs}
    kinds = {
        key: setting.kind for key, setting in (parser.places | parser.known).items()
    }
    try:
        values: Values = {}
        for file, content in contents.items():
            values |= _flat(_loaded(content, file), parser)
        values |= {key: _from_text(text, kinds[key]) for key, text in texts.items()}
        return {key: check(key, value, kinds[key]) for key, value in values.items()}
    except ConfigError as error:
        fail(str(error))


def _flat(values: Mapping[str, Any], parser: Parser, prefix: str = "") -> Values:
    """Flatten the sections of a YAML file to whole names; ConfigError if one is unknown."""
    settings: Values = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key in parser.known:
            settings[key] = value
        elif not any(setting.startswith(f"{key}.") for setting in parser.known):
            raise ConfigError(parser.unknown(key))
        elif isinstance(value, Mapping | None):
            settings |= _flat(value or {}, parser, f"{key}.")
        else:
            raise ConfigError(f"{key} must be settings by their names, got {value!r}")
    return settings


# A wrong tag or an endless number raises other types than YAMLError.
_NOT_YAML = (*DAMAGE, yaml.YAMLError)


class _Loader(yaml.SafeLoader):
    """YAML's with the numbers and words of its version 1.2: 1e-3 is a number, `off` and a date are words."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise yaml.MarkedYAMLError(
                problem=f"it is nested more than {_MAX_DEPTH} deep",
                problem_mark=self.peek_event().start_mark,
            )
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value]
        for number, (key, _) in enumerate(node.value):
            if key.value in keys[:number]:
                # YAML takes the last one, and a whole section would be lost in silence
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value!r} is set twice", problem_mark=key.start_mark
                )
        return node


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, form)
        for tag, form in resolvers
        if not tag.endswith((":bool", ":float", ":timestamp"))
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_FLOAT = re.compile(
    r"(?i)([-+]?((\d[\d_]*\.[\d_]*|\.\d+)(e[-+]?\d+)?|\d+e[-+]?\d+|\.inf)|\.nan)$"
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(?i)(true|false)$"), list("tTfF")
)


def _loaded(text: str, where: str) -> Values:
    """Load the settings of a YAML file; ConfigError if it has none."""
    try:
        values = yaml.load(text, _Loader) or {}
    except _NOT_YAML as error:
        raise ConfigError(
            f"{where} is not YAML: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{where} holds no settings")
    return values


def _from_text(text: str, kind: Any) -> Any:
    """Read an argument as a setting of a type: as YAML, or as plain text if only that fits."""
    value = text
    if kind is not str:
        with contextlib.suppress(*_NOT_YAML):
            value = yaml.load(text, _Loader)
    return value if fits(value, kind) or not fits(text, kind) else text


def _with_base(given: Values, parser: Parser) -> Values:
    """Lay the user's values over the settings of a run that is resumed, or those of the digits."""
    from raypipe.launch.run_folder import folder_to_resume, read_config

    values = {
        name: setting.default for name, setting in settings_of(RunConfig).items()
    } | given
    target = given.get("target", "")
    resume = folder_to_resume(values["resume"], values["storage_path"], values["name"])
    base = ""
    is_of_run = _is_of_run(target, values)
    folder = target if is_of_run else resume
    if folder:
        check_owner(folder, values["trust_run_code"])
        base = read_config(as_uri(folder))
    elif not target and values["store.train"] == "":
        base = (files("raypipe") / "digits.yaml").read_text()
    defaults = _flat(_loaded(base, folder), parser)
    if not resume and _normalizes(given.get("transform.train")):
        # the digits' own numbers would contradict it
        defaults.pop("augment.mean", None)
        defaults.pop("augment.std", None)
    named_there = {key: value for key, value in defaults.items() if key not in given}
    check_named_code(
        named_there if folder else {}, folder, given.get("trust_run_code", False)
    )
    values |= defaults | given
    values |= {
        "trust_run_code": given.get("trust_run_code", False),
        "resume": resume or values["resume"],
    }
    if target and not is_of_run:
        values["store.train"] = target
    _settle_search(given, values, resume)
    return values


def _is_of_run(target: str, values: Mapping[str, Any]) -> bool:
    """Return whether a target is the folder of a run, whose settings hold, and not a store.

    A store may have a config.yaml of anybody's.
    """
    from raypipe.launch.run_folder import CONFIG_FILE, has_config

    if is_remote(target):
        # Here a look is a request, and the name of a store has an ending.
        may_be = not Path(target).suffix
    else:
        may_be = bool(target) and (Path(target) / CONFIG_FILE).is_file()
    if not may_be:
        return False
    # opening it as a store raises the error
    with tried_once():
        if not has_config(as_uri(target)):
            return False
        names = ("image_column", "target_column", "trust_pickles")
        options = store_options(*(values[f"store.{name}"] for name in names))
        with contextlib.suppress(StoreError):
            return not len(open_store(target, **options))
        return True
    return False


def _normalizes(transform: Any) -> bool:
    """Return whether a transform is a list of steps with a Normalize."""
    return isinstance(transform, list) and any(
        isinstance(step, dict) and "Normalize" in step for step in transform
    )


def _settle_search(
    given: Mapping[str, Any], values: Mapping[str, Any], resume: str
) -> None:
    """Settle whether this process, and those that it starts, find modules in the current folder.

    They find none where it is in a store or a run, or is one. `importing.import_name` reads the variable, as do
    processes started from here: Ray's workers have the current folder in front of all others otherwise, and so has
    `python -c`.
    """
    here = Path.cwd()
    stores = [values["store.train"], values["store.val"]]
    arguments = [value for key, value in given.items() if "." not in key]
    for address in filter(None, texts_in([resume, stores, arguments])):
        # opening it raises the error
        with contextlib.suppress(ConfigError, OSError, ValueError):
            if is_remote(address):
                continue
            folder = Path(open_filesystem(as_uri(address))[1])
            if folder in (here, *here.parents):
                os.environ["PYTHONSAFEPATH"] = "1"
    if any(
        ":" in str(value)
        for key, value in values.items()
        if key.startswith(("transform.", "augment."))
    ):
        search_here()  # before Ray starts workers, which may look in another folder
