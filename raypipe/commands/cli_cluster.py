"""The commands for machines: is this one fit, stop a run."""

from __future__ import annotations

from typing import Any


def doctor(*, no_ray: bool = False) -> dict[str, Any]:
    """Check this machine: packages, decoders, torch, CUDA, shared memory, limits, Ray. Exit code 1 if one fails.

    Example: raypipe doctor

    Args:
        no_ray: do not start a cluster, which takes ten seconds.
    """
    from rich.console import Console
    from rich.markup import escape

    from raypipe.commands import doctor as doctor_module

    found = doctor_module.doctor(start_ray=not no_ray)
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    console = Console(soft_wrap=True)
    for check in found["checks"]:
        colour = colours[check["status"]]
        console.print(f"[{colour}]{check['status']:4}[/{colour}] {check['name']:14} {escape(check['found'])}")
        if check["mend"]:
            console.print(f"     {'':14} → {escape(check['mend'])}")
    return found


def stop(run: str) -> dict[str, Any]:
    """End a run at its next line of progress, with a checkpoint; it goes on by `jobs/train.py --resume RUN`.

    Example: raypipe stop s3://my-bucket/runs/20261121-104600

    Args:
        run: folder or URI of the run, its `run_dir`.
    """
    from raypipe.storage.filesystem import as_uri
    from raypipe.train.run_folder import check_run_folder, request_stop

    run_uri = as_uri(run.rstrip("/"))
    check_run_folder(run_uri, resume=True)
    request_stop(run_uri)
    return {"run_dir": run, "stop_requested": True}
