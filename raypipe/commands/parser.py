"""The command line of a command: its usage, its help, and the texts that its arguments give to settings.

A command is a function whose parameters are its options. Parameters without defaults are positional, or required
options if they are keyword-only. `run` stands for all settings of a run; `target` and `folder` are optional and
positional. The docstring has the description, `Examples:` and `Args:`.
"""

from __future__ import annotations

import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from raypipe.config import RunConfig
from raypipe.errors import without_credentials
from raypipe.logs import printable
from raypipe.section import Setting, described, expected, settings_of

_OPTIONAL = {
    "target": "a store, or a run's folder, whose settings then apply first; empty = store.train",
    "folder": "the folder of a run; empty = the one of storage_path and name",
}
# Words for values that say more than the name of the parameter.
_VALUES = {"target": "STORE|RUN", "folder": "RUN", "against": "RUN", "output": "FILE", "compare": "FILE"}
_CONFIG = ("--config FILE", "YAML file with any settings of a run; may be repeated")
_GENERAL = [
    ("--json", "print one JSON object, as in a pipe, instead of text"),
    ("-h, --help", "show this help"),
]
_INDENT = 24  # columns before the text of an option


class Parser:
    """The parser of a command, or, without a name, of the program that runs.

    Attributes:
        places: the positional arguments.
        required: the names of those arguments and options that must be given.
        options: the command's own options.
        known: these and the settings of a run, by whole names.
    """

    def __init__(self, name: str, command: Callable[..., Any], doc: str | None = None) -> None:
        self.prog = f"raypipe {name}" if name else sys.argv[0].rpartition("/")[2]
        self.places: dict[str, Setting] = {}
        self.options: dict[str, Setting] = {}
        self.required: list[str] = []
        self._about, self._examples = (doc.strip(), "") if doc else _sections(inspect.getdoc(command) or "")
        kinds, about = get_type_hints(command, include_extras=True), described(command)
        parameters = inspect.signature(command).parameters
        self.takes_run, self._about_run = "run" in parameters, about.get("run", "")
        for key, parameter in parameters.items():
            setting = Setting(kinds[key], parameter.default, about.get(key, ""))
            if key in _OPTIONAL and not setting.default:
                self.places[key] = setting._replace(about=_OPTIONAL[key])
            elif setting.default is parameter.empty and key != "run":
                self.required.append(key)
                own = self.options if parameter.kind is parameter.KEYWORD_ONLY else self.places
                own[key] = setting
            elif key != "run":
                self.options[key] = setting
        self.known = self.options | (settings_of(RunConfig) if self.takes_run else {})

    def read(self, args: Iterable[str]) -> tuple[dict[str, str], list[str]]:
        """The texts that arguments give to settings, by whole names; and the files that --config names."""
        texts: dict[str, str] = {}
        configs: list[str] = []
        words, places = list(args)[::-1], [*self.places]
        while words:
            word = words.pop()
            if word in ("-h", "--help"):
                print(self.format_help(), end="")
                sys.exit(0)
            word = re.sub(r"^-o(?==|$)", "--output", word)
            if not word.startswith("--"):
                if not places:
                    self.error(f"unexpected argument {word!r}", self._usage())
                texts[places.pop(0)] = word
                continue
            option, equals, text = word.partition("=")
            key = option[2:].replace("-", "_")
            switch = key.removeprefix("no_") if key not in self.known else key
            if self._is_flag(switch) and not equals:
                key, text = switch, str(switch == key).lower()
            elif key not in self.known and not (key == "config" and self.takes_run):
                self._unknown(key)
            elif not equals:
                if not words or words[-1].startswith("--"):
                    self.error(f"{option} needs a value", self._usage())
                text = words.pop()
            if key == "config" and self.takes_run:
                configs.append(text)
            else:
                texts[key] = text
        if missing := [key for key in self.required if key not in texts]:
            names = (_dashed(key) if key in self.options else _value(key) for key in missing)
            self.error(f"missing: {', '.join(names)}", self._usage())
        return texts, configs

    def unknown(self, key: str) -> str:
        """The error about a setting that does not exist."""
        same_end = [name for name in self.known if name.rpartition(".")[2] == key.rpartition(".")[2]]
        near = get_close_matches(key, self.known, 1) or same_end
        return f"unknown setting {key!r}" + (f"; did you mean {near[0]!r}?" if near else "")

    def _unknown(self, key: str) -> NoReturn:
        lists = f"`raypipe help settings` lists the settings of a run, `{self.prog} --help` the options"
        self.error(self.unknown(key), lists if self.takes_run else f"see {self.prog} --help")

    def error(self, message: str, tip: str = "") -> NoReturn:
        """End the program, with code 2."""
        sys.stderr.write(error_text(message, tip))
        sys.exit(2)

    def format_help(self) -> str:
        """The help: usage, description, arguments, options, examples, and where the settings are."""
        rows = [(_value(key), setting.about) for key, setting in self.places.items()]
        options = [_row(key, setting) for key, setting in self.options.items()]
        options += [_CONFIG] * self.takes_run + _GENERAL
        parts = [f"usage: {self._usage()}\n", *map(_wrapped, self._about.split("\n\n"))]
        parts += [_block("Arguments", rows)] * bool(rows) + [_block("Options", options)]
        if self._examples:
            parts.append(f"Examples:\n{textwrap.indent(self._examples, '  ')}\n")
        if self.takes_run:
            text = "Settings of a run are options too, such as --plan.epochs 90. "
            parts.append(_wrapped(f"{text}`raypipe help settings [PATTERN]` explains them. {self._about_run}"))
        return "\n".join(parts)

    def _usage(self) -> str:
        places = (_value(key) if key in self.required else f"[{_value(key)}]" for key in self.places)
        options = (" ".join(_row(key, self.options[key])[:1]) for key in self.required if key in self.options)
        return " ".join([self.prog, *places, *options, "[--OPTION VALUE …]"])

    def _is_flag(self, key: str) -> bool:
        return key in self.known and self.known[key].kind is bool


def error_text(message: str, tip: str = "") -> str:
    """An error for people: what is wrong, and, in a line of its own, what may help. It shows no credentials."""
    what, _, near = message.partition("; did you mean ")
    tip = f"did you mean {near}" if near else tip
    return printable(without_credentials(f"error: {what}" + (f"\n  tip: {tip}" if tip else ""))) + "\n"


def settings_text(pattern: str = "") -> str:
    """The settings of a run whose names have a pattern, with type, default and meaning; "" = there are none."""
    wanted, lines = pattern.lower().replace("-", "_"), []
    for key, (kind, default, about) in settings_of(RunConfig).items():
        if wanted in key:
            shown = f", default {default!r}" if default not in ("", [], {}) else ""
            lines.append(f"{key}  ({expected(kind)}{shown})")
            lines += textwrap.wrap(about, _width(), initial_indent="    ", subsequent_indent="    ")
    return "".join(f"{line}\n" for line in lines)


def _sections(doc: str) -> tuple[str, str]:
    """The description of a docstring, and its examples, one a line."""
    about, *rest = re.split(r"\n\n(?=(?:Examples|Args|Returns|Raises):\n)", doc)
    examples = (part.partition("\n")[2] for part in rest if part.startswith("Examples:"))
    return about, textwrap.dedent(next(examples, ""))


def _row(key: str, setting: Setting) -> tuple[str, str]:
    """An option and its text."""
    kind, default, about = setting._replace(about=setting.about.removesuffix("."))
    option = _dashed(key)
    if kind is bool:
        return f"{option}, --no-{option[2:]}" if default else option, about
    values = {int: "N", float: "X"}.get(kind, _value(key))
    if get_origin(kind) is Literal:
        values = f"{{{','.join(get_args(kind))}}}"
    if default and default is not inspect.Parameter.empty:  # the meaning of 0 and of empty is in the text
        shown = f"{default:g}" if isinstance(default, float) else default
        about = f"{about} (default: {shown})"
    return f"{'-o, ' if key == 'output' else ''}{option} {values}", about


def _dashed(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _value(key: str) -> str:
    return _VALUES.get(key, key.upper())


def _wrapped(paragraph: str) -> str:
    """A paragraph in lines of the terminal's width; one with commands, which are indented, stays as it is."""
    return (paragraph if "\n " in f"\n{paragraph}" else textwrap.fill(paragraph, _width())) + "\n"


def _width() -> int:
    return min(100, max(60, shutil.get_terminal_size((100, 24)).columns))


def _block(title: str, rows: list[tuple[str, str]]) -> str:
    """Names and texts in two columns, under a title."""
    lines = [f"{title}:"]
    for name, text in rows:
        wrapped = textwrap.wrap(text.removesuffix("."), _width() - _INDENT)
        first = f"  {name}".ljust(_INDENT)
        lines += [first + wrapped.pop(0)] if len(first) == _INDENT else [first]
        lines += [" " * _INDENT + line for line in wrapped]
    return "\n".join(lines) + "\n"
