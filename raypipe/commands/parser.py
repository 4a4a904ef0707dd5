"""The command line of a command: its usage, its help, and the texts that its arguments give to settings.

A command is a function. Its keyword-only parameters are options, `run` stands for all settings of a run, and the
others are positional. Its docstring is the help: the part before `Args:`, and the text of each parameter there.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from raypipe.config import RunConfig
from raypipe.errors import without_credentials
from raypipe.mistakes import DID_YOU_MEAN, did_you_mean
from raypipe.printing import PrintableOutput, printable
from raypipe.section import Setting, expected, settings_of, texts_of

_PLACES = {
    "target": "the training store; empty = store.train",
    "folder": "the folder of a run; empty = the one of storage_path and name",
}
# Words for values that say more than the name of the parameter.
_VALUES = {"target": "STORE", "folder": "RUN", "output": "FILE", "compare": "FILE"}
# Settings as other programs call them: the last part of the name → the setting.
_ELSEWHERE = {
    "batch_size": "plan.micro_batch_size",
    "batch": "plan.global_batch_size",
    "dataset": "store.train",
    "data": "store.train",
    "devices": "train.num_workers",
    "gpus": "train.num_workers",
    "image_size": "transform.size",
    "learning_rate": "train.lr",
    "num_gpus": "train.num_workers",
    "output_dir": "storage_path",
    "workers": "train.num_workers",
}
_WIDTH = 88
_INDENT = 24  # columns of help, and those before the text of an option


class Parser:
    """The parser of a command, or, without a name, of the program that runs.

    Attributes:
        places: the positional arguments.
        options: the command's own options.
        known: these and the settings of a run, by whole names.
    """

    def __init__(
        self, name: str, command: Callable[..., Any], doc: str | None = None
    ) -> None:
        self.prog = f"raypipe {name}" if name else Path(sys.argv[0]).name
        text = doc or inspect.getdoc(command) or ""
        self._about = text.partition("\n\nArgs:")[0].strip()
        kinds = get_type_hints(command, include_extras=True)
        about = _PLACES | texts_of(command)
        self.places: dict[str, Setting] = {}
        self.options: dict[str, Setting] = {}
        parameters = dict(inspect.signature(command).parameters)
        self.takes_run = bool(parameters.pop("run", None))
        for key, parameter in parameters.items():
            is_option = parameter.kind is parameter.KEYWORD_ONLY
            kept = self.options if is_option else self.places
            kept[key] = Setting(kinds[key], parameter.default, about.get(key, ""))
        self._about_run = about.get("run", "")
        self.known = self.options | (settings_of(RunConfig) if self.takes_run else {})
        self._required = {
            key
            for key, setting in self.places.items()
            if setting.default is inspect.Parameter.empty
        }
        places = (
            _value(key) if key in self._required else f"[{_value(key)}]"
            for key in self.places
        )
        self.usage = " ".join([self.prog, *places, "[--OPTION VALUE …]"])

    def read(self, args: Iterable[str]) -> tuple[dict[str, str], list[str]]:
        """Split arguments into the texts of settings, by whole names, and the files of --config."""
        texts: dict[str, str] = {}
        configs: list[str] = []
        words = list(args)[::-1]
        places = [*self.places]
        while words:
            word = words.pop()
            if word in ("-h", "--help"):
                with printing():
                    print(self.format_help(), end="")
                sys.exit(0)
            option, equals, text = word.partition("=")
            option = "--output" if option == "-o" else option
            if not option.startswith("--"):
                if not places:
                    fail(
                        f"unexpected argument {word!r}{self._instead(word)}", self.usage
                    )
                texts[places.pop(0)] = word
                continue
            key = option[2:].replace("-", "_")
            switch = {} if equals else self._switch(key, words)
            if switch:
                texts |= switch
                continue
            is_config = self.takes_run and key == "config"
            if key not in self.known and not is_config:
                self._fail_unknown(key)
            if not equals:
                if not words or words[-1].startswith("--"):
                    fail(f"{option} needs a value", self.usage)
                text = words.pop()
            if is_config:
                configs.append(text)
            else:
                texts[key] = text
        missing = [_value(key) for key in places if key in self._required]
        if missing:
            fail(f"missing: {', '.join(missing)}", self.usage)
        return texts, configs

    def _switch(self, key: str, words: list[str]) -> dict[str, str]:
        """Return the text of a switch, --NAME or --no-NAME; empty for other options, and before true or false.

        Args:
            words: the words that follow, the next one last.
        """
        name = key if key in self.known else key.removeprefix("no_")
        # the help names these values
        is_told = words[-1:] in (["true"], ["false"])
        if name in self.known and self.known[name].kind is bool and not is_told:
            return {name: str(name == key).lower()}
        return {}

    def _fail_unknown(self, key: str) -> NoReturn:
        """End the program because of an option that does not exist."""
        settings = ""
        if self.takes_run:
            settings = "`raypipe help settings` lists the settings of a run, "
        fail(self.unknown(key), f"{settings}`{self.prog} --help` the options")

    def _instead(self, word: str) -> str:
        """Return the advice about an unexpected word, if it looks like the address of a store."""
        is_store = "://" in word or Path(word).suffix or Path(word).exists()
        if not (self.takes_run and is_store):
            return ""
        return f": if it is the training store, write --store.train {word}"

    def unknown(self, key: str) -> str:
        """The error about a setting that does not exist."""
        return f"unknown setting {key!r}{meant(key, self.known)}"

    def format_help(self) -> str:
        """The help: usage, description with examples, arguments, options, and where the settings are."""
        epilog = (
            "Settings of a run are options too, such as --plan.epochs 90. `raypipe help settings [PATTERN]` "
            f"explains them. {self._about_run}"
        )
        form = argparse.ArgumentParser(
            usage=self.usage,
            description="\n".join(map(_wrapped, self._about.split("\n\n"))),
            epilog=_wrapped(epilog) if self.takes_run else "",
            add_help=False,
            formatter_class=functools.partial(
                argparse.RawDescriptionHelpFormatter,
                max_help_position=_INDENT,
                width=_WIDTH + 2,
            ),
        )
        places = form.add_argument_group("Arguments")
        for key, setting in self.places.items():
            places.add_argument(_value(key), help=setting.about.removesuffix("."))
        options = form.add_argument_group("Options")
        for key, setting in self.options.items():
            _add_option(options, key, setting)
        if self.takes_run:
            about = "YAML file with any settings of a run; may be repeated"
            options.add_argument("--config", metavar="FILE", help=about)
        about = "print one JSON object, as in a pipe, instead of text"
        options.add_argument("--json", action="store_true", help=about)
        options.add_argument("-h", "--help", action="help", help="show this help")
        return form.format_help()


def meant(name: str, names: Iterable[str]) -> str:
    """The end of an error about a name: a known name that is near, that ends alike, or that means the same."""
    names = list(names)
    by_end = {known_name.rpartition(".")[2]: known_name for known_name in names}
    end = name.rpartition(".")[2]
    means = _ELSEWHERE.get(end)
    if means and means in names:
        return did_you_mean([repr(means)])
    if end in by_end:
        return did_you_mean([repr(by_end[end])])
    near = [by_end[close] for close in get_close_matches(end, by_end, 1)]
    return did_you_mean(map(repr, near or get_close_matches(name, names, 1)))


@contextlib.contextmanager
def printing(code: int = 1) -> Iterator[None]:
    """Context manager for what a command prints: it does not fail if nobody reads on, as in `| head`.

    Where the output cannot be written, the program says so and ends with an exit code.
    """
    try:
        shown = PrintableOutput(sys.stdout) if sys.stdout else None
        with contextlib.redirect_stdout(shown):
            yield
        print(end="", flush=True)
    except BrokenPipeError:
        # Python writes the rest at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        sys.stderr.write(error_text(f"the output cannot be written: {error}"))
        os._exit(code)  # Python would try again at its end


def fail(message: str, tip: str = "") -> NoReturn:
    """End the program, with code 2, on wrong usage."""
    sys.stderr.write(error_text(message, tip))
    sys.exit(2)


def error_text(message: str, tip: str = "") -> str:
    """An error for people, without credentials: its text, and a second line with a tip."""
    text, _, near = message.partition(DID_YOU_MEAN)
    tip = f"did you mean {near}" if near else tip
    text += f"\n  tip: {tip}" if tip else ""
    return printable(without_credentials(f"error: {text}")) + "\n"


def settings_text(pattern: str = "") -> str:
    """The settings of a run whose names have a pattern, with type, default and meaning."""
    settings = settings_of(RunConfig)
    text = pattern.lower().replace("-", "_")
    lines = []
    for key, (kind, default, about) in settings.items():
        if text in key:
            shown = "" if default in ("", [], {}) else f", default {default!r}"
            lines.append(f"{key}  ({expected(kind)}{shown})")
            lines += [f"    {line}" for line in textwrap.wrap(about, _WIDTH - 4)]
    if not lines:
        fail(
            f"no setting has {pattern!r} in its name{meant(text, settings)}",
            "`raypipe help settings` lists all",
        )
    return "".join(f"{line}\n" for line in lines)


def _add_option(options: Any, key: str, setting: Setting) -> None:
    """Add an option of a command to its help."""
    kind, default, about = setting._replace(about=setting.about.removesuffix("."))
    name = key.replace("_", "-")
    names = ["-o"] if key == "output" else []
    names.append(f"--{name}")
    value: dict[str, Any] = {"metavar": {int: "N", float: "X"}.get(kind, _value(key))}
    if kind is bool:
        value = {"action": "store_true"}
        names += [f"--no-{name}"] if default else []
    elif default:  # the meaning of 0 and of empty is in the text
        about += f" (default: {default})"
    if get_origin(kind) is Literal:
        value = {"choices": get_args(kind)}
    options.add_argument(*names, help=about.replace("%", "%%"), **value)


def _value(key: str) -> str:
    return _VALUES.get(key, key.upper())


def _wrapped(paragraph: str) -> str:
    """Fill the lines of a paragraph; one with indented commands stays as it is."""
    if "\n " in f"\n{paragraph}":
        return f"{paragraph}\n"
    return f"{textwrap.fill(paragraph, _WIDTH)}\n"
