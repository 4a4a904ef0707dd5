"""Run the install steps of deploy/Dockerfile in an empty environment, without Docker, and use what they installed.

    python tests/deploy/dockerfile_steps.py [--keep FOLDER]

COPY copies into a folder, RUN pip and RUN uv run there, in a new virtual environment of the image's Python
version; what else the Dockerfile runs (apt-get, useradd) is left out. Two options are dropped: --system, since the
environment is the virtual one, and --no-cache, so as not to download 3 GB of wheels each time.
The last line of output is one JSON object: steps, install_s, packages, bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
DROPPED = (" --system", " --no-cache-dir", " --no-cache")


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, in order: (name, arguments), comments and line breaks removed."""
    lines = [
        line
        for line in dockerfile.splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [
        (name, arguments.strip())
        for name, _, arguments in (line.partition(" ") for line in joined.splitlines())
    ]


def copies(arguments: str) -> tuple[list[str], str]:
    """Sources, relative to the repository, and destination of a COPY."""
    *sources, destination = [
        word for word in shlex.split(arguments) if not word.startswith("--")
    ]
    return sources, destination


def run_steps(folder: Path) -> dict[str, float]:
    """Carry out COPY and the install steps under a folder, and import and call what they installed."""
    dockerfile = instructions((ROOT / "deploy/Dockerfile").read_text())
    base = next(arguments for name, arguments in dockerfile if name == "FROM")
    version = re.match(r"python:(\d+\.\d+)", base)
    here = ".".join(map(str, sys.version_info[:2]))
    assert version is not None and version[1] == here, (
        f"run this with the Python of {base}"
    )
    environment, image = folder / "venv", folder / "image"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTHON")
    }
    env |= {
        "VIRTUAL_ENV": str(environment),
        "PATH": f"{environment / 'bin'}:/usr/bin:/bin",
    }
    image.mkdir()
    num_steps, started = 0, time.monotonic()
    for name, arguments in dockerfile:
        if name == "COPY":
            for source in copies(arguments)[0]:
                found = ROOT / source
                if found.is_dir():
                    shutil.copytree(
                        found,
                        image / found.name,
                        ignore=shutil.ignore_patterns("__pycache__"),
                    )
                else:
                    shutil.copy(found, image)
        elif name == "RUN" and re.search(r"\b(pip|uv) ", arguments):
            for option in DROPPED:
                arguments = arguments.replace(option, "")
            print(f"+ {arguments}", flush=True)
            subprocess.run(["bash", "-euc", arguments], cwd=image, env=env, check=True)
            num_steps += 1
    install_s = time.monotonic() - started
    packages = json.loads(
        subprocess.run(
            ["uv", "pip", "list", "--format", "json"],
            env=env,
            check=True,
            capture_output=True,
        ).stdout
    )
    # raypipe must come from the environment, not from the working folder
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    for command in (
        "python -c 'import raypipe; print(raypipe.__file__); raypipe.StreamSpec'",
        "raypipe --help | head -3",
        "python -c 'import torch, torchvision as tv; print(torch.__version__, tv.__version__)'",
        f"python {image}/jobs/train.py --plan.epochs 1 --pool.max_actors 1 "
        f"--storage_path {elsewhere}/runs | tail -1",
        "python -c 'import boto3, googleapiclient; import ray.autoscaler._private.aws.node_provider'",
    ):
        print(f"+ {command}", flush=True)
        subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=elsewhere,
            env=env,
            check=True,
        )
    size = sum(
        file.stat().st_size
        for file in environment.rglob("*")
        if file.is_file() and not file.is_symlink()
    )
    return {
        "steps": num_steps,
        "install_s": round(install_s, 1),
        "packages": len(packages),
        "bytes": size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--keep",
        type=Path,
        help="an empty folder for the environment, which is left there",
    )
    keep = parser.parse_args().keep
    folder = keep or Path(tempfile.mkdtemp(prefix="image-"))
    try:
        print(json.dumps(run_steps(folder)))
    finally:
        if keep is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
