"""Submit a command to a cluster's job server, with the working directory and this raypipe, and follow it.

`ray job submit --working-dir . -- python jobs/train.py …` does the same from a checkout of raypipe. This one also
says, before the upload, where it is too much, and what; it leaves secrets and what links lead to behind, and says
which; and it carries raypipe from any working directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypipe.errors import ConfigError
from raypipe.storage.filesystem import refuse_credentials

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

# What is never part of a program: images are read from stores, and runs are written where all nodes see them.
EXCLUDES = (
    *("runs/", "*.lmdb", "*.parquet", "*.tar", "*.pt", "*.safetensors"),
    *(".git/", ".venv/", "venv/", "__pycache__/", ".*_cache/", ".hypothesis/"),
)
# Names of credentials, files and folders. .rayignore has them too, for `ray job submit` and `ray up`.
# fmt: off
SECRETS = (
    ".env", ".env.*", ".envrc", ".netrc", "_netrc", ".git-credentials", ".pgpass", ".pypirc", ".npmrc",
    ".htpasswd", ".ssh", ".aws", ".azure", ".boto", ".s3cfg", ".config", ".docker", ".gnupg", ".kube",
    "kubeconfig", ".ray", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.pem", "*.key", "*.ppk", "*.p12",
    "*.pfx", "*.jks", "*.kdbx", "credentials", "credentials.csv", "*_accessKeys.csv", "*credentials.json",
    "service-account*.json", "service_account*.json", "secrets.y*ml", "secrets.json", "secrets.toml",
    "*.tfstate", "*.tfvars",
)
# fmt: on
# What makes a secret of a file of any name: a line that begins like this, of SSH, TLS, Google or AWS.
_SECRET_LINE = re.compile(
    rb'^(-----BEGIN [A-Z ]*PRIVATE KEY-----|\s*"private_key"\s*:|aws_secret_access_key\s*=)', re.MULTILINE
)
_FIRST_BYTES = 4096
_NUM_SHOWN = 20
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

    The job's environment carries `working_dir` without EXCLUDES, what .gitignore and .rayignore name, and what
    `survey` finds unsafe, which is printed; and, where that does not hold raypipe, this process's raypipe. Their
    dependencies are those of the cluster's image.

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
        ConfigError: there is no command or no such folder, it is too large, an address in the command holds
            credentials, or the server does not answer.
    """
    if not command:
        raise ConfigError("there is nothing to submit: raypipe submit -- python jobs/train.py …")
    for word in (address, *command):  # Ray shows the command to whoever may see its jobs
        refuse_credentials(word)
    folder = Path(working_dir).expanduser().resolve()
    unsafe = check_upload(folder, max_mib)
    shown = [f"not uploaded: {name} ({reason})" for name, reason in unsafe.items()]
    more = [f"not uploaded: {len(shown) - _NUM_SHOWN} more"] if len(shown) > _NUM_SHOWN else []
    print(*shown[:_NUM_SHOWN], *more, sep="\n", end="\n" if shown else "", flush=True)
    exact = ["/" + re.sub(r"([][!*#?\\ ])", r"\\\1", name) for name in unsafe]
    environment: dict[str, Any] = {"working_dir": str(folder), "excludes": [*EXCLUDES, *SECRETS, *exact]}
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


def survey(folder: Path) -> tuple[Counter[str], dict[str, str]]:
    """What an upload of a folder would carry, and what it must not, by paths in the folder.

    Returns:
        Bytes of each file that is carried; and why each of the others is not, of those that neither EXCLUDES nor a
        .gitignore or .rayignore names.
    """
    from ray._private.runtime_env import packaging

    found: Counter[str] = Counter()
    unsafe: dict[str, str] = {}
    is_named, is_secret = (packaging._get_excludes(folder, list(names)) for names in (EXCLUDES, SECRETS))

    def is_unsafe(path: Path) -> bool:
        reason = _why_unsafe(path, folder, lambda place: is_named(place) or is_secret(place))
        if reason:
            unsafe[str(path.relative_to(folder))] = reason
        return bool(reason)

    def count(path: Path) -> None:
        if path.is_file():
            found[str(path.relative_to(folder))] = path.stat().st_size

    heed_gitignore = os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1"
    packaging._dir_travel(folder, [is_named, is_unsafe], count, include_gitignore=heed_gitignore)
    return found, unsafe


def _why_unsafe(path: Path, folder: Path, is_left_out: Callable[[Path], bool]) -> str:
    """Why a path must not be uploaded; empty = it may. Ray follows every link, and opens whatever there is."""
    if is_left_out(path):
        return "its name is that of a secret"
    if path.is_symlink():
        target = Path(os.path.realpath(path))
        if not target.is_relative_to(folder):
            return f"a link out of the folder, to {target}"
        if path.is_relative_to(target):
            return "a link to a folder that it is in"
        on_the_way = [target, *target.parents]
        if any(is_left_out(place) for place in on_the_way[: on_the_way.index(folder)]):
            return f"a link to {target.relative_to(folder)}, which is not uploaded"
    if path.is_dir():
        return ""
    if not path.is_file():
        return "no regular file"
    with contextlib.suppress(OSError), path.open("rb") as file:
        if _SECRET_LINE.search(file.read(_FIRST_BYTES)):
            return "it holds a key"
    return ""


def check_upload(folder: Path, max_mib: float) -> dict[str, str]:
    """What `survey` finds unsafe; ConfigError, which names the largest files, unless the rest is small enough."""
    if not folder.is_dir():
        raise ConfigError(f"--working-dir {folder} is no folder")
    found, unsafe = survey(folder)
    total = found.total() / 2**20
    if total > max_mib:
        largest = ", ".join(f"{name} ({size / 2**20:.0f} MiB)" for name, size in found.most_common(3))
        raise ConfigError(
            f"{folder} has {total:.0f} MiB to upload in {len(found):,} files, more than --max-mib {max_mib:g}. "
            f"The largest: {largest}. Name what the job does not need in .gitignore or .rayignore; keep images in "
            "a store that the nodes can read (s3://…)"
        )
    return unsafe


def _client(address: str) -> JobSubmissionClient:
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address or None)
    except AuthenticationError as error:
        raise ConfigError(
            "the cluster asks for its token, and did not get the right one: set RAY_AUTH_MODE=token, with the "
            "token in ~/.ray/auth_token or RAY_AUTH_TOKEN; docs/cluster.md says where it comes from"
        ) from error
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
