"""The command line. Every command ends with one JSON object on the last line of standard output.

Exit codes: 0 done; 1 an error that the message explains, a comparison that found a difference, or a machine that
is not fit; 2 wrong usage; 130 interrupted.

`raypipe --print_completion shtab-bash` (or `shtab-zsh`) prints the script by which a shell completes commands,
options and choices; it needs shtab.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Literal

from jsonargparse import auto_cli, set_parsing_settings

from raypipe.commands import audit, bench, capacity, doctor
from raypipe.commands.settings import Parser, check_no_pipe, parse_job
from raypipe.config import AugmentConfig
from raypipe.errors import RaypipeError
from raypipe.logs import printable
from raypipe.storage.filesystem import as_uri
from raypipe.stores import open_source, open_store, store_options

set_parsing_settings(add_print_completion_argument=True)


def convert(
    src: str,
    dst: str,
    *,
    short_side: int = 0,
    quality: int = 90,
    shards: int = 0,
    on_bad_sample: Literal["raise", "skip"] = "raise",
    overwrite: bool = False,
    layout: str = "auto",
    **columns: str,
) -> dict[str, Any]:
    """Copy any store into a new LMDB or Parquet store.

    Example: raypipe convert imagenet.tar imagenet.lmdb --short-side 256 --quality 92

    Args:
        src: LMDB, Parquet, tar, zip, a folder of class folders, TFRecord or HDF5; several as 'train-*.parquet'.
        dst: a path or a URI, such as s3://bucket/train.lmdb, that ends in .lmdb or .parquet.
        short_side: decode once and store with this shorter side, in pixels; 0 = the bytes as they are.
        quality: of the JPEGs that short_side makes, 1 to 100.
        shards: files of the new store; 0 = 1 GiB each.
        on_bad_sample: "raise", or "skip" samples that have no bytes or cannot be decoded.
        overwrite: replace a store at dst.
        layout: of LMDB that raypipe did not write: auto, image, scene-text, pickle or module:function.
    """
    from raypipe.commands import convert as convert_module

    options = {} if layout == "auto" else {"layout": layout}
    return convert_module.convert(
        open_source(src, **options, **store_options(**columns)),
        dst,
        short_side=short_side,
        quality=quality,
        shards=shards,
        on_bad_sample=on_bad_sample,
        overwrite=overwrite,
    )


def preview(
    store: str,
    *,
    output: str = "preview.png",
    epochs: int = 3,
    of_epochs: int = 0,
    samples: int = 6,
    indices: list[int] = [],  # noqa: B006  nobody changes it
    augment: AugmentConfig = AugmentConfig(),  # noqa: B008  frozen
    **settings: Any,
) -> dict[str, Any]:
    """Draw what becomes of samples: decoded, transformed, augmented and mixed, as a run feeds them. No Ray.

    Example: raypipe preview train.lmdb -o grid.png --augment.preset strong --augment.cutmix-alpha 1

    Args:
        store: the training store.
        output: the PNG to write; also -o.
        epochs: how many epochs to show, evenly spread over the run.
        of_epochs: epochs of the run; 0 = as many as are shown.
        samples: show the first so many of the run.
        indices: show these samples instead, as in [3,14,15].
        augment: the device side; one that does nothing is replaced by an example.
    """
    from raypipe.commands import preview as preview_module

    plan, transform, options = audit.stream_settings(of_epochs or epochs, **settings)
    return preview_module.preview(
        open_store(store, **options),
        output,
        plan=plan,
        transform=transform,
        augment=augment,
        epochs=epochs,
        samples=samples,
        indices=indices,
    )


def stop(run: str) -> dict[str, Any]:
    """End a run at its next line of progress, with a checkpoint; it goes on by `jobs/train.py --resume RUN`.

    Example: raypipe stop s3://my-bucket/runs/20261121-104600-3fa2

    Args:
        run: folder or URI of the run, its `run_dir`.
    """
    from raypipe.train.run_folder import check_run_folder, request_stop

    run_uri = as_uri(run.rstrip("/"))
    check_run_folder(run_uri, resume=True)
    request_stop(run_uri)
    return {"run_dir": run, "stop_requested": True}


_ALL: list[Callable[..., dict[str, Any]]] = [convert, bench.bench, audit.digest, audit.digest_diff, audit.inspect]
_ALL += [capacity.plan_capacity, preview, audit.report, doctor.doctor, stop]
COMMANDS = {command.__name__.replace("_", "-"): command for command in _ALL}
_FLAGS = {"--overwrite", "--verify", "--no_ray"}


def main(args: list[str] | None = None) -> None:
    """The `raypipe` command. Options may be written with dashes or underscores."""
    given = [_normalized(arg) for arg in (sys.argv[1:] if args is None else args)]
    options: dict[str, Any] = {"as_positional": True, "allow_abbrev": False, "parser_class": Parser}

    def parsed() -> dict[str, Any]:
        check_no_pipe(given)
        return auto_cli(COMMANDS, args=given, prog="raypipe", **options)  # type: ignore[arg-type]

    _finish(parsed)


def _normalized(arg: str) -> str:
    """An option as the parser knows it: `--micro-batch-size=8` as `--micro_batch_size=8`, `--overwrite` as
    `--overwrite=true`, `-o` as `--output`."""
    if arg == "-o" or arg.startswith("-o="):  # auto_cli makes no short options
        return "--output" + arg[2:]
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    name = "--" + name[2:].replace("-", "_")
    return name + ("=true" if name in _FLAGS and not equals else equals + value)


def run_job(job: Callable[..., dict[str, Any]], doc: str | None, **sections: type) -> None:
    """The body of a script in jobs/: settings in, see `settings.parse_job`, one JSON object out."""

    def parsed() -> dict[str, Any]:
        run, own = parse_job(None, doc, **sections)
        return job(run, **own)

    _finish(parsed)


def _finish(command: Callable[[], dict[str, Any]]) -> None:
    try:
        result = command()
        _shutdown()
        print(json.dumps(result), flush=True)
        if result.get("equal") is False or result.get("ok") is False:
            sys.exit(1)
    except RaypipeError as error:
        _shutdown()
        print(printable(f"{type(error).__name__}: {error}"), file=sys.stderr, flush=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _shutdown() -> None:
    """End a local cluster, and let the workers' last lines through, before the last line is printed."""
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


if __name__ == "__main__":
    main()
