"""Whose the folder of a run is, and which process has it: one at a time, on a disk and in object storage.

RUN/lease/TOKEN.json says who: machine, process, since when. Its process renews it every 10 s. Once that process is
dead, another one of the same machine sees so and takes the folder at once, and one of another machine after a
minute.

Two processes that start at one time each write such a claim, then look for others. Since both write first, at
least one of them sees the other, and the later one gives up its own. So two never have the folder, on any storage
that shows a file to all as soon as it is written. No clock is compared with that of another machine: ages are
differences between times that the storage gave.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import pwd
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
from raypipe.storage.filesystem import as_uri, exists, explained, join, open_filesystem, open_input
from raypipe.storage.local_file import boot_id
from raypipe.storage.whole_file import synced_output

logger = logging.getLogger(__name__)

_FOLDER = "lease"
_RENEW_S = 10.0
_EXPIRES = datetime.timedelta(minutes=1)  # six renewals: a store that is slow for half a minute loses nobody's run
_LOOK_S = 1.0
_RACE_S = 3.0  # in which who started at the same time gives up
_ROOT = 0  # who needs no planted file to run code here


def check_owner(run: str, trusted: bool) -> None:
    """Raise ConfigError where a local folder, or anything in it, belongs to another user, unless that is trusted.

    A resume imports the code that the configuration in it names. Object storage knows no users of this machine:
    who may write a bucket may run code through a resume from it.

    Args:
        run: folder or URI of a run; it need not be there.
        trusted: what the user said of it.
    """
    filesystem, root = open_filesystem(as_uri(run))
    if trusted or not isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        return
    for folder, _, files in os.walk(root):
        for path in (Path(folder), *(Path(folder, name) for name in files)):
            owners = {path.lstat().st_uid} | ({path.stat().st_uid} if path.exists() else set())
            for owner in owners - {os.getuid(), _ROOT}:
                raise ConfigError(
                    f"{path} belongs to user {_user_name(owner)}, not to you, and a resume runs the code that "
                    "config.yaml names and what a search has pickled: look at what is there, then add --trust=true"
                )


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


class RunExistsError(ConfigError):
    """A run's folder is another run's."""


def _claim() -> dict[str, Any]:
    """What tells this process from any other one of any machine."""
    now, pid = datetime.datetime.now(datetime.UTC), os.getpid()
    user, host = _user_name(os.getuid()), socket.gethostname()
    return {
        "who": f"process {pid} of {user} on {host}, since {now:%Y-%m-%d %H:%M:%S} UTC",
        "since": now.timestamp(),
        "machine": _machine(),
        "pid": pid,
        "started": _started(pid),
    }


def _is_dead(claim: dict[str, Any], age: datetime.timedelta) -> bool:
    """Whether a claim's process is, as far as can be seen; age is that of its last renewal."""
    if claim.get("machine") and claim["machine"] == _machine():
        return _started(claim.get("pid")) != claim.get("started")
    return age > _EXPIRES


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


class Lease:
    """A claim on a run's folder that this process renews until `give_back`. Made by `taken`."""

    def __init__(self, run_uri: str) -> None:
        self.run_uri, self.token, self._claim = run_uri, secrets.token_hex(8), _claim()
        self._filesystem, self._folder = open_filesystem(join(run_uri, _FOLDER))
        self._path = f"{self._folder}/{self.token}.json"
        self._is_local = isinstance(self._filesystem, pyarrow.fs.LocalFileSystem)
        self._made: list[Path] = []
        if self._is_local:
            folder = Path(self._folder)
            self._made = [folder, *(parent for parent in folder.parents if not parent.exists())]
        self._ended, self._one_by_one = threading.Event(), threading.Lock()
        self._renewing = threading.Thread(target=self._renew_until_ended, daemon=True, name="raypipe-lease")

    def win(self) -> None:
        """Come to be the only one that claims the folder, then renew the claim; or raise RunExistsError."""
        self._filesystem.create_dir(self._folder, recursive=True)
        self._write()
        begun, own = time.monotonic(), (self._claim["since"], self.token)
        while rivals := self._rivals():
            # Of several that start at one time, the first stays and waits until the others have given up.
            since, token, who = min(rivals)
            if (since, token) < own or time.monotonic() - begun > _RACE_S:
                raise RunExistsError(
                    f"{self.run_uri} is in use by {who}: wait for that run, end it with `raypipe stop`, or choose "
                    "another --name; if it died on another machine, try again in a minute"
                )
            time.sleep(_LOOK_S)
            self._renew()
        self._renewing.start()

    def _rivals(self) -> list[tuple[float, str, str]]:
        """Who else claims the folder and may live: since when, token, name. The claims of the dead are removed."""
        renewed, claims = {}, {}
        for info in self._filesystem.get_file_info(pyarrow.fs.FileSelector(self._folder)):
            if info.type == pyarrow.fs.FileType.File and info.extension == "json":
                token = info.base_name.removesuffix(".json")
                with contextlib.suppress(FileNotFoundError):  # given back in this moment
                    claims[token] = self._read(info.path)
                    renewed[token] = info.mtime
        if self.token not in claims:
            raise RunExistsError(f"{self.run_uri} was taken by another process at this moment")
        rivals = []
        for token, claim in claims.items():
            if token != self.token and _is_dead(claim, renewed[self.token] - renewed[token]):
                with contextlib.suppress(pa.ArrowException, OSError):
                    self._filesystem.delete_file(f"{self._folder}/{token}.json")
            elif token != self.token:
                rivals.append((claim["since"], token, claim["who"]))
        return rivals

    def _read(self, path: str) -> dict[str, Any]:
        """Another's claim, or that of a process that nothing is known of."""
        with open_input(self._filesystem, path) as file:
            content = file.read(1 << 16)
        try:
            claim = json.loads(content)
            return claim | {"since": float(claim["since"]), "who": str(claim["who"])}
        except (ValueError, TypeError, KeyError):
            return {"since": 0.0, "who": path}

    def _write(self) -> None:
        with synced_output(self._filesystem, self._path) as file:
            file.write(json.dumps(self._claim).encode())

    def _renew(self) -> None:
        if self._is_local:
            os.utime(self._path)  # a full disk does not matter to it
        elif is_held(self.run_uri, self.token):
            self._write()

    def _renew_until_ended(self) -> None:
        while not self._ended.wait(_RENEW_S):
            try:
                # In object storage it writes the claim; behind `give_back` nobody would take that back.
                with self._one_by_one:
                    if not self._ended.is_set():
                        self._renew()
            except FileNotFoundError:
                return  # taken away; the trainers find out at their next checkpoint
            except (pa.ArrowException, OSError) as error:
                logger.warning("the lease of %s cannot be renewed: %s", self.run_uri, error)

    def give_back(self) -> None:
        """Let others have the folder; one that was made for the lease, and is empty still, goes."""
        self._ended.set()
        with self._one_by_one, contextlib.suppress(pa.ArrowException, OSError):
            self._filesystem.delete_file(self._path)
            for empty in self._made:
                empty.rmdir()


@contextlib.contextmanager
def taken(run_uri: str) -> Iterator[Lease]:
    """Within, this process alone has a run's folder, which is made if it is not there.

    Raises:
        RunExistsError: another process has it; says who.
        ConfigError: it cannot be written to.
    """
    lease = Lease(run_uri)
    try:
        with explained(ConfigError, f"{run_uri} cannot be written to"):
            lease.win()
        yield lease
    finally:
        lease.give_back()


def is_held(run_uri: str, token: str) -> bool:
    """Whether a lease is still the run's, seen from any machine that can see the run's folder."""
    return exists(join(run_uri, _FOLDER, f"{token}.json"))
