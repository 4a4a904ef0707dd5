"""Leases of a run's folder, which one process at a time may have, on a disk and in object storage.

RUN/lease/TOKEN.json is a claim: machine, process, start. Its process renews it every 10 s. If that process is
dead, another process of the same machine detects this and takes the folder at once. A process of another machine
waits: if the claim is renewed, it gives up; if not for a minute, it takes the folder.

Two processes that start at the same time each write a claim, then look for others. Since both write first, at
least one of them sees the other, and the later one withdraws its claim. So two never have the folder, on any
storage where a written file is visible at once. Clocks of different machines are never compared.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.fs

from raypipe.background import Repeating, process_state
from raypipe.errors import ConfigError
from raypipe.storage.files import open_input, write_synced
from raypipe.storage.filesystem import (
    as_uri,
    errors_as,
    exists,
    join_address,
    open_filesystem,
)
from raypipe.storage.local_file import boot_id
from raypipe.storage.retries import tried_once, without_retries

logger = logging.getLogger(__name__)

_FOLDER = "lease"
_RENEW_S = 10.0
_EXPIRES_S = 60.0  # six renewals, so a run survives half a minute of slow storage
_LOOK_S = 0.5
_RACE_S = 3.0  # time for a process that started simultaneously to withdraw its claim


def check_owner(run: str, trusted: bool) -> None:
    """Raise ConfigError if a run's local folder, or anything in it, belongs to another user, unless trusted.

    A resume imports the code that the run's configuration names. Object storage has no owners to check: anybody
    who may write to a bucket may run code through a resume from it.
    """
    filesystem, root = open_filesystem(as_uri(run))
    if trusted or not isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        return
    for folder, _, files in os.walk(root):
        for path in (Path(folder), *(Path(folder, name) for name in files)):
            owners = {path.lstat().st_uid} | (
                {path.stat().st_uid} if path.exists() else set()
            )
            for owner in owners - {os.getuid(), 0}:  # root could run code here anyway
                raise ConfigError(
                    f"{path} belongs to user {owner}, not to you, and a resume runs the code that "
                    "config.yaml names, and the pickles of a search: inspect the folder, then add --trust-run-code"
                )


class RunExistsError(ConfigError):
    """The folder of a run is in use by another run."""


def _machine() -> str:
    """Return an id of the machine's current boot and of this process's container; empty if unknown."""
    try:
        return f"{boot_id()}-{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _runs(pid: int, started: str) -> bool:
    state, now_started = process_state(pid)
    return state not in ("", "Z") and now_started == started


@contextlib.contextmanager
def lease(run_dir: str | Path) -> Iterator[str]:
    """Context manager: hold the lease of a run's folder, which one process at a time can have.

    The folder is made if needed. The lease ends with the block, and by itself with the process.

    Args:
        run_dir: the folder: a path or a URI.

    Yields:
        The lease's token, for `raypipe.loader(…, lease=token)`, in any process that can see the folder.

    Raises:
        ConfigError: another process has the folder, which the error names; or it cannot be written to.
    """
    run_uri = as_uri(str(run_dir))
    claim = _Claim(run_uri)

    def renew() -> None:
        if not claim.renew():
            renewing.left.set()

    renewing = Repeating(renew, _RENEW_S, "raypipe-lease")
    try:
        with errors_as(ConfigError, f"{run_uri} cannot be written to"):
            claim.win()
        renewing.start()
        yield claim.token
    finally:
        # a late renewal in object storage would write the claim again, forever
        renewing.stop(None)
        claim.give_back()


def is_held(run_uri: str, token: str) -> bool:
    """Return whether a lease is still valid, from any machine that can read the run's folder."""
    return exists(join_address(run_uri, _FOLDER, f"{token}.json"))


def holder(run_uri: str) -> str:
    """Describe the process that has a run's folder; "" if it is dead, or has not renewed for a minute."""
    now = datetime.datetime.now(datetime.UTC)
    with contextlib.suppress(FileNotFoundError):
        for rival in _Claim(run_uri)._rivals():
            age_s = (now - rival.renewed).total_seconds()
            if rival.runs or (rival.runs is None and age_s <= _EXPIRES_S):
                return rival.who
    return ""


class _Rival(NamedTuple):
    """Another process's claim.

    Attributes:
        path: path of its file.
        who: the process, in words.
        since: its start, by its own clock.
        renewed: time of the last renewal, by the storage's clock.
        runs: whether the process runs; None = it is one of another machine.
    """

    path: str
    who: str
    since: float
    renewed: datetime.datetime
    runs: bool | None


class _Claim:
    """This process's claim on a run's folder."""

    def __init__(self, run_uri: str) -> None:
        self.token = secrets.token_hex(8)
        self._run_uri = run_uri
        self._since = time.time()
        self._filesystem, self._folder = open_filesystem(join_address(run_uri, _FOLDER))
        self._path = f"{self._folder}/{self.token}.json"

    def win(self) -> None:
        """Wait until this is the only claim on the folder, or raise RunExistsError."""
        self._filesystem.create_dir(self._folder, recursive=True)
        self._write()
        begun = time.monotonic()
        # path of a rival's claim → its last renewal when this process first looked
        first_renewals = dict[str, datetime.datetime]()
        while rivals := self._rivals():
            waited_s = time.monotonic() - begun
            for rival in rivals:
                if rival.path not in first_renewals and rival.runs is None:
                    logger.warning(
                        "the run's folder is held by %s; waiting up to a minute to see if it is alive",
                        rival.who,
                    )
                first = first_renewals.setdefault(rival.path, rival.renewed)
                self._face(rival, first != rival.renewed, waited_s)
            time.sleep(_LOOK_S)
            self._renew()

    def _face(self, rival: _Rival, has_renewed: bool, waited_s: float) -> None:
        """Remove a dead rival's claim; raise RunExistsError if a living one has the folder; else leave it."""
        is_silent = rival.runs is None and not has_renewed
        if rival.runs is False or (is_silent and waited_s > _EXPIRES_S):
            with contextlib.suppress(pa.ArrowException, OSError):
                self._filesystem.delete_file(rival.path)
            return
        # If several start at the same time, the first keeps its claim and waits for the others to withdraw.
        is_first = rival.since < self._since or waited_s > _RACE_S
        if is_first and not is_silent:
            raise RunExistsError(
                f"{self._run_uri} is in use by {rival.who}: wait for that run, end it with `raypipe stop`, or "
                "choose another --name"
            )

    def _rivals(self) -> list[_Rival]:
        """Return the other processes' claims."""
        rivals = []
        for info in self._filesystem.get_file_info(
            pyarrow.fs.FileSelector(self._folder)
        ):
            if info.extension == "json" and info.path != self._path:
                with contextlib.suppress(FileNotFoundError):  # withdrawn at this moment
                    rivals.append(self._read(info))
        return rivals

    def _read(self, info: pyarrow.fs.FileInfo) -> _Rival:
        """Return the claim of another process; if it is malformed, a claim of an unknown process elsewhere."""
        with open_input(self._filesystem, info.path) as file:
            content = file.read(1 << 16)
        try:
            claim = json.loads(content)
            runs = None
            if claim["machine"] == _machine() != "":
                runs = _runs(int(claim["pid"]), claim["started"])
            who = str(claim["who"])
            return _Rival(info.path, who, float(claim["since"]), info.mtime, runs)
        except (ValueError, TypeError, LookupError):
            return _Rival(info.path, info.path, 0.0, info.mtime, None)

    def _write(self) -> None:
        pid = os.getpid()
        since = datetime.datetime.fromtimestamp(self._since, datetime.UTC)
        who = f"process {pid} on {socket.gethostname()}, since {since:%Y-%m-%d %H:%M:%S} UTC"
        _, started = process_state(pid)
        process = {"machine": _machine(), "pid": pid, "started": started}
        content = json.dumps({"who": who, "since": self._since, **process})
        write_synced(self._filesystem, self._path, content.encode())

    def _renew(self) -> None:
        if isinstance(self._filesystem, pyarrow.fs.LocalFileSystem):
            os.utime(self._path)  # works on a full disk too
        elif is_held(self._run_uri, self.token):
            self._write()

    def renew(self) -> bool:
        """Renew it; return whether it is still there.

        If another process took the folder, the trainers detect that at their next checkpoint.
        """
        try:
            with without_retries():  # the next call retries soon
                self._renew()
        except FileNotFoundError:
            return False
        except (pa.ArrowException, OSError) as error:
            logger.warning("cannot renew the lease of %s: %s", self._run_uri, error)
        return True

    def give_back(self) -> None:
        """Withdraw the claim, and remove the folder if it is empty; object storage has no folders."""
        with tried_once():
            self._filesystem.delete_file(self._path)
            Path(self._folder).rmdir()
            Path(self._folder).parent.rmdir()
