"""The command line. Every command ends with one JSON object on the last line of standard output.

Exit codes: 0 done; 1 an error that the message explains, or a comparison that found a difference; 2 wrong usage;
130 interrupted.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable
from importlib.resources import files
from typing import Any, Literal

from jsonargparse import ArgumentParser, auto_cli

from raypipe import cli_audit
from raypipe.config import AugmentConfig, RunConfig, TransformConfig
from raypipe.console import table
from raypipe.errors import ConfigError, RaypipeError
from raypipe.plan import PlanConfig


def ingest(
    src: str,
    dst: str,
    *,
    short_side: int = 0,
    quality: int = 90,
    shards: int = 0,
    on_bad_sample: Literal["raise", "skip"] = "raise",
    overwrite: bool = False,
) -> dict[str, Any]:
    """Copy any store into a new LMDB or Parquet store.

    Example: raypipe ingest imagenet.tar imagenet.lmdb --short-side 256 --quality 92

    Args:
        src: LMDB, Parquet, tar or a folder of class folders.
        dst: a path that ends in .lmdb or .parquet.
        short_side: decode once and store with this shorter side, in pixels; 0 = the bytes as they are.
        quality: of the JPEGs that short_side makes, 1 to 100.
        shards: files of the new store; 0 = 1 GiB each.
        on_bad_sample: "raise", or "skip" samples that have no bytes or cannot be decoded.
        overwrite: replace a store at dst.
    """
    from raypipe import ingest as ingest_module
    from raypipe.shard_copy import Reencode

    reencode = Reencode(short_side, quality)
    return ingest_module.ingest(
        src, dst, reencode=reencode, shards=shards, on_bad_sample=on_bad_sample, overwrite=overwrite
    )


def bench(
    store: str,
    *,
    transform: str = "heavy",
    size: int = 224,
    actors: int = 0,
    micro_batch: int = 256,
    seconds: float = 20.0,
    repeats: int = 1,
    resume: bool = False,
) -> dict[str, Any]:
    """Measure the stream against the ceiling of this machine.

    Example: raypipe bench imagenet.lmdb --repeats 3

    Args:
        store: the images.
        transform: preset or module:function.
        size: side of the images that the preset makes, in pixels.
        actors: transform actors, and processes of the ceiling; 0 = one per CPU.
        micro_batch: samples in a micro-batch.
        seconds: that each stream runs for, about.
        repeats: how often all is measured; medians are printed.
        resume: measure something else: a resume at the start and at the end of an epoch of ImageNet's length.
    """
    from raypipe import bench as bench_module

    actors = actors or len(os.sched_getaffinity(0))
    config = TransformConfig(train=transform, size=size)
    if resume:
        from raypipe import resume_bench

        cost = resume_bench.measure(
            store, transform=config, actors=actors, micro_batch=micro_batch, repeats=repeats
        )
        table(
            f"{store}: a resume in an epoch of {resume_bench.NUM_SAMPLES:,} samples, {repeats} repeats",
            [
                ("first batch, at the epoch's start", f"{cost['resume_start_s']:.2f} s"),
                ("first batch, at its last step", f"{cost['resume_end_s']:.2f} s"),
                ("end / start", f"{cost['resume_ratio']:.3f}"),
            ],
        )
        return cost
    measured = bench_module.bench(
        store, transform=config, actors=actors, micro_batch=micro_batch, seconds=seconds, repeats=repeats
    )
    found = bench_module.summary(measured)
    table(
        f"{store}: {transform} at {size} px, {actors} actors, micro-batches of {micro_batch}, {repeats} repeats",
        [
            ("ceiling: decode and transform alone", f"{found['ceiling_images_per_s']:,.0f} images/s"),
            ("stream, steady", f"{found['stream_images_per_s']:,.0f} images/s"),
            ("stream / ceiling", f"{found['ratio']:.3f}"),
            ("first batch, from ray.init", f"{found['first_batch_s']:.1f} s"),
            ("gap at a boundary / ordinary gap", f"{found['boundary_gap_ratio']:.2f}"),
        ],
    )
    return found


def preview(
    store: str,
    *,
    output: str = "preview.png",
    epochs: int = 3,
    of_epochs: int = 0,
    samples: int = 6,
    indices: str = "",
    micro_batch: int = 64,
    per_step: int = 1,
    seed: int = 0,
    shuffle: Literal["auto", "global", "window", "off"] = "auto",
    transform: str = "light",
    size: int = 224,
    augment: AugmentConfig = AugmentConfig(),  # noqa: B008  frozen
) -> dict[str, Any]:
    """Draw what becomes of samples: decoded, transformed, augmented and mixed, as a run feeds them. No Ray.

    Example: raypipe preview train.lmdb -o grid.png --augment.preset strong --augment.cutmix-alpha 1

    Args:
        store: the training store.
        output: the PNG to write; also -o.
        epochs: how many epochs to show, evenly spread over the run.
        of_epochs: epochs of the run; 0 = as many as are shown.
        samples: show the first so many of the run.
        indices: show these samples instead, as in 3,14,15.
        micro_batch: B, samples in a micro-batch; at most as many as the store has.
        per_step: M, micro-batches in a step.
        seed: the run's seed.
        shuffle: global, window, off, or auto.
        transform: preset or module:function.
        size: side of the images that the preset makes, in pixels.
        augment: the device side; one that does nothing is replaced by an example.
    """
    from raypipe import preview as preview_module
    from raypipe.stores import open_store

    try:
        chosen = [int(index) for index in indices.split(",")] if indices else None
    except ValueError:
        raise ConfigError(f"--indices must be numbers as in 3,14,15, got {indices!r}") from None
    return preview_module.preview(
        open_store(store),
        output,
        plan=PlanConfig(of_epochs or epochs, micro_batch, per_step, seed, shuffle),
        transform=TransformConfig(train=transform, size=size),
        augment=augment,
        epochs=epochs,
        samples=samples,
        indices=chosen,
    )


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "ingest": ingest,
    "bench": bench,
    "digest": cli_audit.digest,
    "digest-diff": cli_audit.digest_diff,
    "inspect": cli_audit.inspect,
    "preview": preview,
}
_FLAGS = {
    parameter.name
    for command in COMMANDS.values()
    for parameter in inspect.signature(command).parameters.values()
    if parameter.default is False
}


def main(args: list[str] | None = None) -> None:
    """The `raypipe` command. Options may be written with dashes or underscores."""
    args = [_normalized(arg) for arg in (sys.argv[1:] if args is None else args)]
    _finish(
        lambda: auto_cli(COMMANDS, args=args, as_positional=True, prog="raypipe", allow_abbrev=False)  # type: ignore[arg-type]
    )


def _normalized(arg: str) -> str:
    """An option as the parser knows it: `--micro-batch=8` as `--micro_batch=8`, `--overwrite` as
    `--overwrite=true`, `-o` as `--output`."""
    if arg == "-o" or arg.startswith("-o="):  # auto_cli makes no short options
        return "--output" + arg[2:]
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    name = "--" + name[2:].replace("-", "_")
    if not equals and name[2:] in _FLAGS:
        return name + "=true"
    return name + equals + value


def parse_run(args: list[str] | None, doc: str | None) -> RunConfig:
    """A RunConfig from `--config FILE.yaml` and overrides; the digits' where no store is named.

    Unknown keys, in the file or on the command line, end the program with exit code 2.
    """
    args = sys.argv[1:] if args is None else args
    parser = ArgumentParser(description=doc, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="YAML file with any of the settings below")
    parser.add_class_arguments(RunConfig, as_group=False)
    given = parser.parse_args(args)
    if given.resume:
        base = _stored_config(given.resume)
    elif not given.store.train:
        base = (files("raypipe") / "digits.yaml").read_text()
    else:
        base = ""
    # Settings that come first give way to later ones.
    values = parser.instantiate_classes(parser.parse_args([f"--config={base}", *args] if base else args)).as_dict()
    values.pop("config", None)
    return RunConfig(**values)


def _stored_config(run: str) -> str:
    """The effective configuration that a run left behind, as YAML; `launch` tells if there is none."""
    import pyarrow.fs

    from raypipe.runlog import as_uri

    filesystem, path = pyarrow.fs.FileSystem.from_uri(as_uri(run.rstrip("/")))
    try:
        with filesystem.open_input_stream(f"{path}/config.yaml") as file:
            return file.read().decode()
    except FileNotFoundError:
        return ""


def run_job(job: Callable[[RunConfig], dict[str, Any]], doc: str | None) -> None:
    """The body of a script in jobs/: settings in, one JSON object out."""
    _finish(lambda: job(parse_run(None, doc)))


def _finish(command: Callable[[], dict[str, Any]]) -> None:
    try:
        result = command()
        _shutdown()
        print(json.dumps(result), flush=True)
        if result.get("equal") is False:
            sys.exit(1)
    except RaypipeError as error:
        _shutdown()
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _shutdown() -> None:
    """End a local cluster, and let the workers' last lines through, before the last line is printed."""
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


if __name__ == "__main__":
    main()
