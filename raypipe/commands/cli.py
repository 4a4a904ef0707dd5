"""The command line. Every command ends with one JSON object on the last line of standard output.

All commands on a store or a stream take the settings of a run, as jobs/train.py does: `--config run.yaml`, and any
setting by its name, such as `--plan.seed 1`.

Exit codes: 0 done; 1 an error that the message explains, a comparison that found a difference, or a machine that
is not fit; 2 wrong usage; 75 a run was stopped, and has a checkpoint to continue from; 130 interrupted.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal

from raypipe.commands import audit, bench, doctor, settings, status
from raypipe.config import RunConfig
from raypipe.errors import RaypipeError
from raypipe.logs import configure_logs, phase, printable
from raypipe.stores import open_source, store_options
from raypipe.train.interrupts import Stopped

logger = logging.getLogger(__name__)


def train(run: RunConfig) -> dict[str, Any]:
    """Train a classifier on one stream, as jobs/train.py does, which is what one submits to a cluster.

    Example: raypipe train --config run.yaml --plan.epochs 90
    """
    configure_logs(run.log)
    phase(logger, "loading Ray and torch")
    return import_module("raypipe.train.launch").train(run)  # the whole program, which no other command needs


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
    layout: str = "auto",
) -> dict[str, Any]:
    """Copy any store into a new LMDB or Parquet store.

    Example: raypipe convert imagenet.tar imagenet.lmdb --short-side 256 --quality 92

    Args:
        run: settings, of which store.image_column, store.label_column and, for sizes, transform.apply_exif matter.
        src: a store of any format, or zip, see docs/formats.md; several files as 'train-*.parquet'.
        dst: a path or a URI, such as s3://bucket/train.lmdb, that ends in .lmdb or .parquet.
        short_side: decode once and store with this shorter side, in pixels; 0 = the bytes as they are.
        quality: of the JPEGs that short_side makes, 1 to 100.
        shards: files of the new store; 0 = 1 GiB each.
        on_bad_sample: "raise", or "skip" samples that have no bytes or cannot be decoded.
        sizes: add columns width and height, in pixels, -1 where an image's header does not tell.
        seekable: store JPEGs so that crops decode faster, with the same pixels; see docs/decode.md.
        overwrite: replace a store at dst.
        layout: of LMDB that raypipe did not write: auto, image or module:function.
    """
    from raypipe.commands import convert as convert_module

    options = {} if layout == "auto" else {"layout": layout}
    return convert_module.convert(
        open_source(src, **options, **store_options(run.store.image_column, run.store.label_column)),
        dst,
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
    indices: list[int] = [],  # noqa: B006  nobody changes it
) -> dict[str, Any]:
    """Draw what becomes of samples: decoded, transformed, augmented and mixed, as a run feeds them. No Ray.

    Example: raypipe preview train.lmdb -o grid.png --augment.preset strong --augment.cutmix-alpha 1
    Example: raypipe preview --config run.yaml

    Args:
        run: settings of the run.
        target: see `settings.command_parser`.
        output: the PNG to write; also -o.
        show_epochs: how many epochs to show, evenly spread over the run.
        samples: show the first so many of the run.
        indices: show these samples instead, as in [3,14,15].
    """
    from raypipe.commands import preview as preview_module
    from raypipe.streaming.opening import open_train, renamed

    return preview_module.preview(
        open_train(run),
        output,
        plan=run.plan,
        transform=run.transform,
        augment=run.augment,
        epochs=show_epochs,
        samples=samples,
        indices=indices,
        columns=renamed(run.store.columns, run.store.label_column),
    )


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "train": train,
    "convert": convert_store,
    "bench": bench.bench,
    "digest": audit.digest,
    "digest-diff": audit.digest_diff,
    "inspect": audit.inspect,
    "preview": draw_preview,
    "report": audit.report,
    "doctor": doctor.doctor,
    "status": status.status,
    "stop": status.stop,
}


def main(args: list[str] | None = None) -> None:
    """The `raypipe` command. Options may be written with dashes or underscores."""
    words = sys.argv[1:] if args is None else args

    def command() -> dict[str, Any]:
        parser = settings.Parser("raypipe", __doc__)
        parser.usage = "raypipe COMMAND [--OPTION VALUE …]"
        commands = parser.add_subparsers(title="commands", dest="name", metavar="COMMAND", required=True)
        for command_name, function in COMMANDS.items():
            about = (function.__doc__ or "").partition("\n")[0]
            commands.add_parser(command_name, help=about.replace("%", "%%"), add_help=False)
        name = parser.parse_args(words[:1] or ["--help"]).name
        return COMMANDS[name](**settings.parse_command(name, COMMANDS[name], words[1:]))

    _finish(command)


def run_job(job: Callable[..., dict[str, Any]], doc: str | None) -> None:
    """The body of a script in jobs/: settings in, see `settings.parse_command`, one JSON object out."""
    _finish(lambda: job(**settings.parse_command("", job, doc=doc)))


def _finish(command: Callable[[], dict[str, Any]]) -> None:
    try:
        result = command()
        _shutdown()
        print(json.dumps(result), flush=True)
        if result.get("equal") is False or result.get("ok") is False:
            sys.exit(1)
        if result.get("stopped"):
            sys.exit(os.EX_TEMPFAIL)
    except RaypipeError as error:
        _shutdown()
        print(printable(f"{type(error).__name__}: {error}"), file=sys.stderr, flush=True)
        sys.exit(1)
    except Stopped:
        sys.exit(os.EX_TEMPFAIL)
    except KeyboardInterrupt:
        sys.exit(130)


def _shutdown() -> None:
    """End a local cluster, and let the workers' last lines through, before the last line is printed."""
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


if __name__ == "__main__":
    main()
