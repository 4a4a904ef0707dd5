"""Whose the folder of a run is, and which process has it: one at a time, on a disk and in object storage.

RUN/lease/TOKEN.json says who: machine, process, since when. Its process renews it every 10 s. Once that process is
dead, another one of the same machine sees so and takes the folder at once. One of another machine waits until the
claim is renewed, and gives up, or has not been for a minute, and takes it.

Two processes that start at one time each write such a claim, then look for others. Since both write first, at
least one of them sees the other, and the later one gives up its own. So two never have the folder, on any storage
that shows a file to all as soon as it is written. No clock is compared with that of another machine.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs

from raypipe.errors import ConfigError
from raypipe.storage.files import open_input, write_synced
from raypipe.storage.filesystem import as_uri, exists, explained, join, open_filesystem
from raypipe.storage.local_file import boot_id
from raypipe.storage.patience import impatient

logger = logging.getLogger(__name__)

_FOLDER = "lease"
_RENEW_S = 10.0
_EXPIRES_S = 60.0  # six renewals: a store that is slow for half a minute loses nobody's run
_LOOK_S = 0.5
_RACE_S = 3.0  # in which who started at the same time gives up


def check_owner(run: str, trusted: bool) -> None:
    """Raise ConfigError where a run's local folder, or anything in it, is another user's, unless that is trusted.

    A resume imports the code that the configuration in it names. Object storage knows no users of this machine:
    who may write a bucket may run code through a resume from it.
    """
    filesystem, root = open_filesystem(as_uri(run))
    if trusted or not isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        return
    for folder, _, files in os.walk(root):
        for path in (Path(folder), *(Path(folder, name) for name in files)):
            owners = {path.lstat().st_uid} | ({path.stat().st_uid} if path.exists() else set())
            for owner in owners - {os.getuid(), 0}:  # root needs no planted file to run code here
                raise ConfigError(
                    f"{path} belongs to user {owner}, not to you, and a resume runs the code that "
                    "config.yaml names and what a search has pickled: look at what is there, then add "
                    "--trust-run-code"
                )


class RunExistsError(ConfigError):
    """A run's folder is another run's."""


def _machine() -> str:
    """This start of the machine, and this process's container on it; empty where that is not known."""
    try:
        return f"{boot_id()}-{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _started(pid: Any) -> int | None:
    """When a process of this machine was started, in clock ticks since the machine was; None where it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


@contextlib.contextmanager
def leased(run_uri: str) -> Iterator[str]:
    """Within, this process alone has a run's folder, which is made if it is not there. Yields the lease's token.

    RunExistsError says which other process has it.
    """
    claim, ended = _Claim(run_uri), threading.Event()
    renewing = threading.Thread(target=claim.renew_until, args=(ended,), daemon=True, name="raypipe-lease")
    try:
        with explained(ConfigError, f"{run_uri} cannot be written to"):
            claim.win()
        renewing.start()
        yield claim.token
    finally:
        ended.set()
        if renewing.is_alive():
            renewing.join()  # in object storage it writes the claim, which nobody would take back afterwards
        claim.give_back()


def is_held(run_uri: str, token: str) -> bool:
    """Whether a lease is still the run's, seen from any machine that can see the run's folder."""
    return exists(join(run_uri, _FOLDER, f"{token}.json"))


def holder(run_uri: str) -> str:
    """The process that has a run's folder, for people; "" = none has renewed its claim for a minute, or lives."""
    now = datetime.datetime.now(datetime.UTC)
    with contextlib.suppress(FileNotFoundError):
        for _, claim, renewed in _Claim(run_uri)._rivals():
            is_here = claim["machine"] == _machine() != ""
            is_silent = (now - renewed).total_seconds() > _EXPIRES_S
            if _started(claim["pid"]) == claim["started"] if is_here else not is_silent:
                return str(claim["who"])
    return ""


class _Claim:
    """This process's claim on a run's folder."""

    def __init__(self, run_uri: str) -> None:
        self.token = secrets.token_hex(8)
        self._run_uri, self._since = run_uri, time.time()
        self._filesystem, self._folder = open_filesystem(join(run_uri, _FOLDER))
        self._path = f"{self._folder}/{self.token}.json"

    def win(self) -> None:
        """Come to be the only one that claims the folder; or raise RunExistsError."""
        self._filesystem.create_dir(self._folder, recursive=True)
        self._write()
        begun, renewals = time.monotonic(), dict[str, Any]()
        while rivals := self._rivals():
            waited_s = time.monotonic() - begun
            for path, claim, renewed in rivals:
                is_here = claim["machine"] == _machine() != ""
                if path not in renewals and not is_here:
                    logger.warning("waiting a minute at most for a sign of life of %s", claim["who"])
                is_silent = not is_here and renewals.setdefault(path, renewed) == renewed
                if waited_s > _EXPIRES_S if is_silent else is_here and _started(claim["pid"]) != claim["started"]:
                    with contextlib.suppress(pa.ArrowException, OSError):
                        self._filesystem.delete_file(path)
                # Of several that start at one time, the first stays and waits until the others have given up.
                elif not is_silent and (claim["since"] < self._since or waited_s > _RACE_S):
                    raise RunExistsError(
                        f"{self._run_uri} is in use by {claim['who']}: wait for that run, end it with "
                        "`raypipe stop`, or choose another --name"
                    )
            time.sleep(_LOOK_S)
            self._renew()

    def _rivals(self) -> list[tuple[str, dict[str, Any], datetime.datetime]]:
        """The claims of others: path, content, and when each was renewed."""
        rivals = []
        for info in self._filesystem.get_file_info(pyarrow.fs.FileSelector(self._folder)):
            if info.extension == "json" and info.path != self._path:
                with contextlib.suppress(FileNotFoundError):  # given back in this moment
                    rivals.append((info.path, self._read(info.path), info.mtime))
        return rivals

    def _read(self, path: str) -> dict[str, Any]:
        """Another's claim, or that of a process that nothing is known of."""
        with open_input(self._filesystem, path) as file:
            content = file.read(1 << 16)
        unknown = {"since": 0.0, "who": path, "machine": "", "pid": 0, "started": 0}
        try:
            claim = unknown | json.loads(content)
            return claim | {"since": float(claim["since"]), "who": str(claim["who"])}
        except (ValueError, TypeError):
            return unknown

    def _write(self) -> None:
        pid, since = os.getpid(), datetime.datetime.fromtimestamp(self._since, datetime.UTC)
        who = f"process {pid} on {socket.gethostname()}, since {since:%Y-%m-%d %H:%M:%S} UTC"
        here = {"machine": _machine(), "pid": pid, "started": _started(pid)}
        content = json.dumps({"who": who, "since": self._since, **here})
        write_synced(self._filesystem, self._path, content.encode())

    def _renew(self) -> None:
        if isinstance(self._filesystem, pyarrow.fs.LocalFileSystem):
            os.utime(self._path)  # a full disk does not matter to it
        elif is_held(self._run_uri, self.token):
            self._write()

    def renew_until(self, ended: threading.Event) -> None:
        while not ended.wait(_RENEW_S):
            try:
                with impatient():  # it looks again in a moment
                    self._renew()
            except FileNotFoundError:
                return  # taken away; the trainers find out at their next checkpoint
            except (pa.ArrowException, OSError) as error:
                logger.warning("the lease of %s cannot be renewed: %s", self._run_uri, error)

    def give_back(self) -> None:
        """Let others have the folder, which goes if nothing is in it; object storage knows no folders."""
        with contextlib.suppress(pa.ArrowException, OSError), impatient():
            self._filesystem.delete_file(self._path)
            Path(self._folder).rmdir()
            Path(self._folder).parent.rmdir()
