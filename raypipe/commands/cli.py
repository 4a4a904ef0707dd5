"""The command line. Every command ends with one JSON object on the last line of standard output.

Exit codes: 0 done; 1 an error that the message explains, a comparison that found a difference, or a machine that
is not fit; 2 wrong usage; 130 interrupted.

`raypipe --print_completion shtab-bash` (or `shtab-zsh`) prints the script by which a shell completes commands,
options and choices; it needs shtab.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NoReturn

from jsonargparse import ArgumentParser, auto_cli, set_parsing_settings

from raypipe.commands import audit, bench, capacity, doctor
from raypipe.config import AugmentConfig, RunConfig
from raypipe.errors import ConfigError, RaypipeError, without_credentials
from raypipe.logs import printable
from raypipe.storage.files import read_whole
from raypipe.storage.filesystem import as_uri, join
from raypipe.storage.lease import check_owner
from raypipe.stores import open_source, open_store, store_options

set_parsing_settings(add_print_completion_argument=True)


def ingest(
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

    Example: raypipe ingest imagenet.tar imagenet.lmdb --short-side 256 --quality 92

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
    from raypipe.commands import ingest as ingest_module

    options = {} if layout == "auto" else {"layout": layout}
    return ingest_module.ingest(
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


_ALL: list[Callable[..., dict[str, Any]]] = [ingest, bench.bench, audit.digest, audit.digest_diff, audit.inspect]
_ALL += [capacity.plan_capacity, preview, audit.report, doctor.doctor, stop]
COMMANDS = {command.__name__.replace("_", "-"): command for command in _ALL}
_FLAGS = {"--overwrite", "--verify", "--no_ray"}


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


class _Parser(ArgumentParser):
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


def main(args: list[str] | None = None) -> None:
    """The `raypipe` command. Options may be written with dashes or underscores."""
    given = [_normalized(arg) for arg in (sys.argv[1:] if args is None else args)]
    options: dict[str, Any] = {"as_positional": True, "allow_abbrev": False, "parser_class": _Parser}

    def parsed() -> dict[str, Any]:
        _check_no_pipe(given)
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


def _check_no_pipe(args: list[str]) -> None:
    """Raise ConfigError where an argument is a pipe: the parser reads configurations from such, and waits."""
    for arg in args:
        value, is_pipe = arg.partition("=")[2] if arg.startswith("--") else arg, False
        with contextlib.suppress(OSError, ValueError):  # of what is no path
            is_pipe = Path(value).is_fifo()
        if is_pipe:
            raise ConfigError(f"{value} is a FIFO, not a regular file: write what it brings to a file first")


def parse_run(args: list[str] | None, doc: str | None) -> RunConfig:
    """A RunConfig from `--config FILE.yaml` and overrides; the digits' where no store is named."""
    return parse_job(args, doc)[0]


def parse_job(args: list[str] | None, doc: str | None, **sections: type) -> tuple[RunConfig, dict[str, Any]]:
    """A RunConfig as `parse_run` makes it, and the job's own sections of settings, by their names.

    Unknown keys, in the file or on the command line, end the program with exit code 2.
    """
    args = sys.argv[1:] if args is None else args
    _check_no_pipe(args)
    parser = _Parser(description=doc, allow_abbrev=False)
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


def run_job(job: Callable[..., dict[str, Any]], doc: str | None, **sections: type) -> None:
    """The body of a script in jobs/: settings in, see `parse_job`, one JSON object out."""

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
