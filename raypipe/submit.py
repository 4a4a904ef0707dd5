"""Submit a command to a cluster's job server, with the working directory and this raypipe, and follow it.

`ray job submit --working-dir . -- python jobs/train.py …` does the same from a checkout of raypipe. This one also
says, before the upload, where it is too much, and what; and it carries raypipe from any working directory.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypipe.errors import ConfigError

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

# What is never part of a program: images are read from stores, and runs are written where all nodes see them.
EXCLUDES = (
    *("runs/", "*.lmdb", "*.parquet", "*.tar", "*.pt", "*.safetensors"),
    *(".git/", ".venv/", "venv/", "__pycache__/", ".*_cache/", ".hypothesis/"),
)
# Ray's own limit is 500 MiB; uploads were seen to fail from 100 MiB on (ray#55877).
MAX_MIB = 100.0
_POLL_S = 1.0
_AGENT_S = 60.0


def submit(
    command: list[str],
    *,
    address: str = "",
    working_dir: str = ".",
    max_mib: float = MAX_MIB,
    follow: bool = True,
) -> dict[str, Any]:
    """Submit a command as a job, and follow its output until it ends.

    The job's environment carries `working_dir` without EXCLUDES and what .gitignore and .rayignore name, and,
    where that does not hold raypipe, this process's raypipe. Their dependencies are those of the cluster's image.

    Args:
        command: program and arguments; run in the copy of the working directory.
        address: of the job server, http://HOST:8265; empty = RAY_API_SERVER_ADDRESS, RAY_ADDRESS, or that of this
            machine.
        working_dir: the folder to carry.
        max_mib: the most that may be uploaded, in MiB before compression.
        follow: print the job's output until it ends; else return once it is submitted.

    Returns:
        `job`, its id; `status`: SUCCEEDED, FAILED, STOPPED, or PENDING where it is not followed; `message`: Ray's
        words about it.

    Raises:
        ConfigError: there is no command or no such folder, it is too large, or the server does not answer.
    """
    if not command:
        raise ConfigError("there is nothing to submit: raypipe submit -- python jobs/train.py …")
    folder = Path(working_dir).expanduser().resolve()
    check_size(folder, max_mib)
    environment: dict[str, Any] = {"working_dir": str(folder), "excludes": list(EXCLUDES)}
    if not (folder / "raypipe" / "__init__.py").is_file():
        environment["py_modules"] = [str(Path(__file__).parent)]
    client = _client(address)
    deadline = time.monotonic() + _AGENT_S
    while True:
        try:
            job = client.submit_job(entrypoint=shlex.join(command), runtime_env=environment)
            break
        except RuntimeError as error:  # of a head that has just started
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)
    print(f"submitted {job}; to end it: ray job stop {job}", flush=True)
    if not follow:
        return {"job": job, "status": "PENDING", "message": ""}
    _follow(client, job)
    info = client.get_job_info(job)
    return {"job": job, "status": info.status.value, "message": info.message or ""}


def sizes(folder: Path) -> Counter[str]:
    """Bytes of each file that an upload of a folder would carry, by its path in the folder."""
    from ray._private.runtime_env import packaging

    found: Counter[str] = Counter()

    def count(path: Path) -> None:
        if path.is_file():
            found[str(path.relative_to(folder))] = path.stat().st_size

    excludes = [packaging._get_excludes(folder, list(EXCLUDES))]
    heed_gitignore = os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1"
    packaging._dir_travel(folder, excludes, count, include_gitignore=heed_gitignore)
    return found


def check_size(folder: Path, max_mib: float) -> None:
    """Raise ConfigError, which names the largest files, unless a folder is small enough to upload."""
    if not folder.is_dir():
        raise ConfigError(f"--working-dir {folder} is no folder")
    found = sizes(folder)
    total = found.total() / 2**20
    if total > max_mib:
        largest = ", ".join(f"{name} ({size / 2**20:.0f} MiB)" for name, size in found.most_common(3))
        raise ConfigError(
            f"{folder} has {total:.0f} MiB to upload in {len(found):,} files, more than --max-mib {max_mib:g}. "
            f"The largest: {largest}. Name what the job does not need in .gitignore or .rayignore; keep images in "
            "a store that the nodes can read (s3://…)"
        )


def _client(address: str) -> JobSubmissionClient:
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address or None)
    except ConnectionError as error:
        raise ConfigError(
            f"{error} Set --address http://HOST:8265 to the cluster's job server (`ray dashboard cluster.yaml` "
            "brings it to this machine)"
        ) from error


def _follow(client: JobSubmissionClient, job: str) -> None:
    async def tail() -> None:
        async for lines in client.tail_job_logs(job):
            print(lines, end="", flush=True)

    asyncio.run(tail())
    # The output ends a moment before the status says so.
    while not client.get_job_status(job).is_terminal():
        time.sleep(_POLL_S)
