"""The command line: `raypipe COMMAND`, see `raypipe --help`.

A command prints text in a terminal. In a pipe, or with --json, it prints one JSON object, and its progress goes to
standard error; a run prints its progress, and then one JSON object.

Exit codes: 0 done; 1 an error, a comparison that found a difference, or a failed check of doctor; 2 wrong usage;
75 a run was stopped, and has a checkpoint to continue from, or found no room in time: the same command continues;
130 interrupted.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator

import raypipe
from raypipe.commands import (
    audit,
    bench,
    convert,
    digests,
    doctor,
    index,
    inspection,
    preview,
    replays,
    status,
    trace,
    training,
    verify,
    when,
)
from raypipe.commands.parser import error_text, fail, meant, printing, settings_text
from raypipe.commands.settings import parse_command
from raypipe.errors import NoRoomError, RaypipeError, without_credentials
from raypipe.launch.interrupts import Stopped
from raypipe.logs import is_json, print_any_letter
from raypipe.packages import installed_version
from raypipe.printing import Result, print_table
from raypipe.progress import spared_output

_END_S = 20.0  # limit for the end of Ray after an error or a signal
# Libraries that print each of their objects that Python does not collect at its exit.
_TELL_LEAKS = {"jaxlib", "triton"}

logger = logging.getLogger("raypipe.commands.cli")  # also where `python -m` runs it


def print_result(result: Result) -> None:
    """Print a result as a table; the heading is its store or the folder of its run."""
    rows = dict(result)
    print_table(str(rows.pop("store", None) or rows.pop("run_dir", "done")), rows)


Command = Callable[..., Result]
GROUPS: dict[str, dict[str, Command]] = {
    "Run": {
        "train": training.train,
        "status": status.status,
        "stop": status.stop,
        "when": when.when,
    },
    "Data": {
        "inspect": inspection.inspect_store,
        "verify": verify.verify_store,
        "convert": convert.convert_store,
        "index": index.index,
        "preview": preview.draw_preview,
    },
    "Look back": {"replay": replays.replay_steps},
    "Check": {
        "digest": digests.digest,
        "audit": audit.audit,
        "bench": bench.bench,
        "trace": trace.trace,
        "doctor": doctor.doctor,
    },
}
COMMANDS = {
    name: command for commands in GROUPS.values() for name, command in commands.items()
}
# The text of results that are more than a table.
_PRINTED: dict[str, Callable[[Result], None]] = {
    "status": status.print_status,
    "replay": replays.print_replay,
    "verify": verify.print_verified,
    "digest": digests.print_digests,
    "audit": audit.print_audit,
    "bench": bench.print_bench,
    "when": when.print_when,
    "doctor": doctor.print_checks,
}


def main(args: list[str] | None = None) -> None:
    """The `raypipe` command. Options may be written with dashes or underscores."""
    print_any_letter()
    words = sys.argv[1:] if args is None else args
    text = ""
    if words in ([], ["help"], ["-h"], ["--help"]):
        text = overview()
    elif words == ["--version"]:
        ray = installed_version("ray")
        torch = installed_version("torch")
        text = f"raypipe {raypipe.__version__} (ray {ray}, torch {torch})\n"
    elif words[:2] == ["help", "settings"]:
        text = settings_text(*words[2:3])
    else:
        words = [*words[1:], "--help"] if words[0] == "help" else words
        name = words[0]
        if name not in COMMANDS:
            fail(
                f"unknown command {name!r}{meant(name, COMMANDS)}",
                "`raypipe --help` lists the commands",
            )
        arguments = [word for word in words[1:] if word != "--json"]
        show = None if "--json" in words else _PRINTED.get(name, print_result)
        _finish(
            lambda: COMMANDS[name](**parse_command(name, COMMANDS[name], arguments)),
            show,
            is_run=name == "train",
        )
    with printing():
        print(text, end="")


def run_job(job: Command, doc: str | None) -> None:
    """Run a script of jobs/ like a command: its arguments are parsed, and its result is shown."""
    print_any_letter()
    args = [word for word in sys.argv[1:] if word != "--json"]
    show = None if "--json" in sys.argv else print_result
    _finish(lambda: job(**parse_command("", job, args, doc)), show, is_run=True)


def overview() -> str:
    """The help of `raypipe` itself: its commands in groups."""
    lines = [
        "raypipe: image input for PyTorch training on Ray",
        "",
        "usage: raypipe COMMAND [--OPTION VALUE …]",
    ]
    for group, commands in GROUPS.items():
        texts = {
            name: (command.__doc__ or "").partition("\n")[0]
            for name, command in commands.items()
        }
        lines += [
            "",
            f"{group}:",
            *(f"  {name:16}{text}" for name, text in texts.items()),
        ]
    lines += [
        "",
        "Help:",
        "  help COMMAND, or help settings [PATTERN] for the settings of a run",
    ]
    return "\n".join([*lines, "", (__doc__ or "").partition("\n\n")[2]])


def _finish(
    command: Callable[[], Result],
    show: Callable[[Result], None] | None = None,
    is_run: bool = False,
) -> None:
    """Run a command, show its result (as text, in a terminal and if `show` is given), and exit with its code.

    A run has done its work, and its folder has the result, so it keeps its code where standard output is full.
    """
    atexit.register(_leave_objects)
    try:
        with contextlib.nullcontext() if is_run else spared_output():
            result = command()
            _shutdown()
        code = _code_of(result)
        with printing(code if is_run else 1):
            if show and _is_terminal() and not is_json():
                show(result)
            else:
                print(json.dumps(result))
        if code:
            sys.exit(code)
    except (RaypipeError, Stopped, KeyboardInterrupt) as error:
        text = str(error) if isinstance(error, RaypipeError) else ""
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        may_go_on = is_run and isinstance(error, NoRoomError)
        if may_go_on or isinstance(error, Stopped):
            code = os.EX_TEMPFAIL
        with _ending(code, text):
            _shutdown()
        _tell(text)
        sys.exit(code)


def _leave_objects() -> None:
    """Let Python exit without a look for cycles among all objects of torch and Ray, which takes a second."""
    if not _TELL_LEAKS & sys.modules.keys():
        gc.freeze()


def _tell(error: str) -> None:
    if error and is_json():
        logger.error("%s", without_credentials(error))
    elif error:
        sys.stderr.write(error_text(error))


@contextlib.contextmanager
def _ending(code: int, error: str) -> Iterator[None]:
    """Context manager for an end by an error or a signal; exits the process if Ray hangs, as without a head.

    Args:
        error: printed before that; empty = none.
    """

    def leave() -> None:
        _tell(error)
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(code)

    timer = threading.Timer(_END_S, leave)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _code_of(result: Result) -> int:
    if result.get("equal") is False or result.get("ok") is False:
        return 1
    return os.EX_TEMPFAIL if result.get("stopped") else os.EX_OK


def _is_terminal() -> bool:
    return bool(sys.stdout) and sys.stdout.isatty()


def _shutdown() -> None:
    """End a local cluster, and let the workers' last lines through, before the last line is printed."""
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


if __name__ == "__main__":
    main()
