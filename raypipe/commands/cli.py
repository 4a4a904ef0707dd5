"""The command line: `raypipe COMMAND`, see `raypipe --help`.

A command prints text in a terminal. In a pipe, or with --json, the last line of its output is one JSON object.

Exit codes: 0 done; 1 an error, a comparison that found a difference, or a failed check of doctor; 2 wrong usage;
75 a run was stopped, and has a checkpoint to continue from, or found no room in time: the same command continues;
130 interrupted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import raypipe
from raypipe.commands import audit, bench, doctor, index, status
from raypipe.commands.parser import error_text, fail, meant, printing, settings_text
from raypipe.commands.settings import parse_command
from raypipe.config import RunConfig
from raypipe.errors import ConfigError, NoRoomError, RaypipeError, without_credentials
from raypipe.logs import configure_logs, is_json, phase, print_any_letter, table
from raypipe.lookup import version_of
from raypipe.storage.filesystem import is_remote
from raypipe.stores import open_store, store_options
from raypipe.train.interrupts import Stopped
from raypipe.train.model_names import check_model

if TYPE_CHECKING:
    from raypipe.streaming.spec import StreamSpec

_END_S = 20.0  # limit for the end of Ray after an error or a signal

logger = logging.getLogger("raypipe.commands.cli")  # also where `python -m` runs it


def train(run: RunConfig) -> dict[str, Any]:
    """Train a classifier.

    Without a store it trains on the handwritten digits that raypipe ships.

    Examples:
        raypipe train --config run.yaml --plan.epochs 90
        raypipe train --resume runs/20261121-104600-3fa2

    Args:
        run: With --name NAME --resume auto the same command starts a run and continues it.
    """
    if ":" not in run.train.model:
        # before the seconds that Ray and torch take to load
        check_model(run.train.model, len(run.augment.mean))
    configure_logs(run.log_format)
    _check_paths(run)
    phase(logger, "loading Ray and torch")
    # no other command needs the whole program
    return import_module("raypipe.train.launch").train(run)


def _check_paths(run: RunConfig) -> None:
    """Raise StoreError if a local store does not exist, before the seconds that Ray and torch take to load."""
    options = store_options(
        run.store.image_column, run.store.target_column, run.store.trust_pickles
    )
    train = run.store.train
    if isinstance(train, dict):
        training = list(train.values())
    else:
        training = [train]
    for address in filter(None, (*training, run.store.val)):
        if not is_remote(address):
            open_store(address, **options)


def convert_store(
    run: RunConfig,
    src: str,
    dst: str,
    *,
    short_side: int = 0,
    quality: int = 90,
    shards: int = 0,
    on_bad_sample: Literal["raise", "skip"] = "raise",
    sizes: bool = True,
    seekable: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Copy any store or format into an LMDB or Parquet store, and verify it.

    Other formats are TFRecord, HDF5, MXNet .rec, zip, .npz, .pt, MDS, LitData, and Arrow (save_to_disk).

    Examples:
        raypipe convert imagenet.tar imagenet.lmdb --short-side 256 --quality 92
        raypipe convert 'imagenet/train-*-of-01024' train.lmdb
        raypipe convert train.h5 train.lmdb --store.image-column frames --store.target-column y
        raypipe convert 'train-*.parquet' s3://bucket/train.lmdb --on-bad-sample skip

    Args:
        run: Here the options of store.* that say how to read, and, for sizes, transform.apply_exif matter.
        src: a store or another format; several files as 'train-*.parquet'; or MODULE:NAME, your own function that
            yields samples, such as {'image': bytes, 'label': 3}.
        dst: a path or a URI, such as s3://bucket/train.lmdb, that ends in .lmdb or .parquet.
        short_side: decode, and store JPEGs with this shorter side, in pixels; 0 = the bytes as they are.
        quality: JPEG quality for --short-side, 1 to 100.
        shards: files of the new store; 0 = 1 GiB each.
        on_bad_sample: stop with an error, or skip samples that have no bytes or cannot be decoded.
        sizes: add columns width and height, in pixels; -1 = not in the image's header.
        seekable: store JPEGs so that crops decode faster, with the same pixels.
        overwrite: replace a store at DST.
    """
    from raypipe.commands import convert as convert_module

    return convert_module.convert(
        src,
        dst,
        image_column=run.store.image_column,
        target_column=run.store.target_column,
        trust_pickles=run.store.trust_pickles,
        short_side=short_side,
        quality=quality,
        shards=shards,
        on_bad_sample=on_bad_sample,
        sizes=sizes,
        exif=run.transform.apply_exif,
        seekable=seekable,
        overwrite=overwrite,
    )


def draw_preview(
    run: RunConfig,
    target: str = "",
    *,
    output: str = "preview.png",
    show_epochs: int = 3,
    samples: int = 6,
    indices: list[int] = [],  # noqa: B006  no code changes it
) -> dict[str, Any]:
    """Draw samples as a run feeds them: transformed, augmented, mixed.

    Examples:
        raypipe preview train.lmdb -o grid.png --augment.preset strong --augment.cutmix-alpha 1
        raypipe preview --config run.yaml --indices [3,14,15]

    Args:
        output: the PNG to write.
        show_epochs: how many epochs to show, evenly spread over the run.
        samples: how many samples to show, the first of the run.
        indices: show these samples instead, as in [3,14,15].
    """
    from raypipe.commands import preview as preview_module
    from raypipe.streaming.opening import open_train, spec_of

    opened = open_train(run)
    store = replace(
        run.store,
        val="",
        target_column=run.store.target_column if "label" in opened.schema.names else "",
    )

    def spec_at(size: int) -> StreamSpec:
        plan = replace(
            run.plan, micro_batch_size=size, global_batch_size=size * run.plan.per_step
        )
        return spec_of(replace(run, plan=plan, store=store))

    try:
        spec = spec_at(run.plan.micro_batch_size)
    except (
        ConfigError
    ):  # a first look at a few samples, fewer than a step; another mistake is met again
        spec = spec_at(min(run.plan.micro_batch_size, spec_at(1).plan.steps_per_epoch))
    return preview_module.preview(
        spec,
        output,
        augment=run.augment,
        epochs=show_epochs,
        samples=samples,
        indices=indices,
    )


def print_result(result: dict[str, Any]) -> None:
    """Print a result as a table; the heading is its store or the folder of its run."""
    rows = dict(result)
    table(str(rows.pop("store", None) or rows.pop("run_dir", "done")), rows)


GROUPS: dict[str, dict[str, Callable[..., dict[str, Any]]]] = {
    "Run": {"train": train, "status": status.status, "stop": status.stop},
    "Data": {
        "inspect": audit.inspect,
        "verify": audit.verify,
        "convert": convert_store,
        "index": index.index,
        "preview": draw_preview,
    },
    "Check": {
        "digest": audit.digest,
        "bench": bench.bench,
        "doctor": doctor.doctor,
    },
}
COMMANDS = {
    name: command for commands in GROUPS.values() for name, command in commands.items()
}
# The text of results that are more than a table.
_PRINTED: dict[str, Callable[[dict[str, Any]], None]] = {
    "status": status.print_status,
    "verify": audit.print_verified,
    "digest": audit.print_digests,
    "bench": bench.print_bench,
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
        text = f"raypipe {raypipe.__version__} (ray {version_of('ray')}, torch {version_of('torch')})\n"
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
        rest = [word for word in words[1:] if word != "--json"]
        if "--json" in words:
            show = None
        else:
            show = _PRINTED.get(name, print_result)
        _finish(
            lambda: COMMANDS[name](**parse_command(name, COMMANDS[name], rest)),
            show,
            is_run=name == "train",
        )
    with printing():
        print(text, end="")


def run_job(job: Callable[..., dict[str, Any]], doc: str | None) -> None:
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
    command: Callable[[], dict[str, Any]],
    show: Callable[[dict[str, Any]], None] | None = None,
    is_run: bool = False,
) -> None:
    """Run a command, show its result (as text, in a terminal and if `show` is given), and exit with its code.

    A run has done its work, and its folder has the result, so it keeps its code where standard output is full.
    """
    try:
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
    except RaypipeError as error:
        text = str(error)
        if is_run and isinstance(error, NoRoomError):
            code = os.EX_TEMPFAIL
        else:
            code = 1
        with _ending(code, lambda: _tell(text)):
            _shutdown()
        _tell(text)
        sys.exit(code)
    except Stopped:
        with _ending(os.EX_TEMPFAIL):
            _shutdown()
        sys.exit(os.EX_TEMPFAIL)
    except KeyboardInterrupt:
        with _ending(130):
            _shutdown()
        sys.exit(130)


def _tell(error: str) -> None:
    if is_json():
        logger.error("%s", without_credentials(error))
    else:
        sys.stderr.write(error_text(error))


@contextlib.contextmanager
def _ending(code: int, tell: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Context manager for an end by an error or a signal; exits the process if Ray hangs, as without a head.

    Args:
        tell: prints the error before that.
    """

    def leave() -> None:
        tell()
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


def _code_of(result: dict[str, Any]) -> int:
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
