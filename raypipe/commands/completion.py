"""What a shell needs to complete raypipe's commands, options and files."""

from __future__ import annotations

from argparse import _SubParsersAction
from typing import Any

from raypipe.errors import ConfigError

# Options whose value is a path, as all positional arguments are.
_PATHS = {"output", "html", "val", "leave_out", "val_leave_out", "compare", "against", "run", "working_dir"}


def completion_script(parser: Any, shell: str) -> str:
    """The script that a shell reads.

    Args:
        parser: jsonargparse's, of a command line with sub-commands; it cannot be used afterwards.
        shell: "bash" or "zsh".

    Raises:
        ConfigError: shtab is not installed.
    """
    try:
        import shtab
    except ImportError:
        raise ConfigError("completion needs shtab: pip install 'raypipe[completion]'") from None
    commands = [action for action in parser._actions if isinstance(action, _SubParsersAction)]
    for command in commands[0].choices.values():
        for action in command._actions:
            if not action.option_strings or action.dest in _PATHS:
                action.complete = shtab.FILE
    return parser.get_completion_script(f"shtab-{shell}")
