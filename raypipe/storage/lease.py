"""Whose the folder of a run is, and which process has it: one at a time, on a disk and in object storage.

RUN/lease/TOKEN.json says who: machine, process, since when. Its process renews it every 10 s. Once that process is
dead, another one of the same machine sees so and takes the folder at once; one of another machine waits a minute.

Two processes that start at one time each write such a claim, then look for others. Since both write first, at
least one of them sees the other, and a process that sees another live claim gives up its own. So two never have
it, on any storage that shows a file to all as soon as it is written. No clock is compared with that of another
machine: ages are differences between times that the storage gave.
"""

from __future__ import annotations

import contextlib
import datetime
import getpass
import json
import logging
import os
import pwd
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.fs

from raypipe.errors import ConfigError
from raypipe.logs import progress
from raypipe.storage.filesystem import as_uri, exists, explained, join, open_filesystem, open_input
from raypipe.storage.local_file import boot_id
from raypipe.storage.whole_file import synced_output

logger = logging.getLogger(__name__)

_FOLDER = "lease"
_RENEW_S = 10.0
_EXPIRES_S = 60.0  # six renewals: a store that is slow for half a minute takes nobody's run away
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


@dataclass(frozen=True)
class _Owner:
    """A process, such that no other process of any machine is taken for it."""

    host: str
    user: str
    since: float  # seconds since 1970, by the machine's clock
    pid: int
    started: int  # clock ticks from the machine's start to the process's
    machine: str  # this start of the machine, and the process's container on it; empty where that is not known

    def __str__(self) -> str:
        since = datetime.datetime.fromtimestamp(self.since, datetime.UTC)
        return f"process {self.pid} of {self.user} on {self.host}, since {since:%Y-%m-%d %H:%M:%S} UTC"

    @staticmethod
    def here() -> _Owner:
        """This process."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):
            user = str(os.getuid())
        return _Owner(socket.gethostname(), user, time.time(), os.getpid(), _started(os.getpid()) or 0, _machine())

    @property
    def alive(self) -> bool | None:
        """Whether it lives; None where that cannot be seen from here."""
        if not self.machine or self.machine != _machine():
            return None
        return _started(self.pid) == self.started


def _machine() -> str:
    try:
        return f"{boot_id()}-{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


@dataclass(frozen=True)
class _Claim:
    name: str
    renewed: float  # by the storage's clock, seconds
    owner: _Owner | None  # None: the file is damaged

    @property
    def rank(self) -> tuple[float, str]:
        """Of two that start at one time, the first stays."""
        return (self.owner.since if self.owner else 0.0, self.name)

    def is_dead(self, now: float) -> bool:
        """Whether its process is, as far as can be seen; `now` by the storage's clock."""
        alive = self.owner.alive if self.owner else None
        return now - self.renewed > _EXPIRES_S if alive is None else not alive


class Lease:
    """A claim on a run's folder that this process renews until `give_back`. Made by `taken`."""

    def __init__(self, run_uri: str) -> None:
        self.run_uri, self.token, self._owner = run_uri, secrets.token_hex(8), _Owner.here()
        self._filesystem, self._folder = open_filesystem(join(run_uri, _FOLDER))
        self._path = f"{self._folder}/{self.token}.json"
        self._is_local = isinstance(self._filesystem, pyarrow.fs.LocalFileSystem)
        self._made: list[Path] = []
        if self._is_local:
            folder = Path(self._folder)
            self._made = [folder, *(parent for parent in folder.parents if not parent.exists())]
        self._ended, self._one_by_one = threading.Event(), threading.Lock()
        self._renewing = threading.Thread(target=self._renew_until_ended, daemon=True, name="raypipe-lease")

    def claims(self) -> list[_Claim]:
        """Of all who want the folder."""
        selector = pyarrow.fs.FileSelector(self._folder, allow_not_found=True)
        found = []
        for info in self._filesystem.get_file_info(selector):
            if info.type == pyarrow.fs.FileType.File and info.extension == "json":
                with contextlib.suppress(FileNotFoundError):  # given back in this moment
                    found.append(_Claim(info.base_name, (info.mtime_ns or 0) / 1e9, self._owner_in(info.path)))
        return found

    def _owner_in(self, path: str) -> _Owner | None:
        with open_input(self._filesystem, path) as file:
            content = file.read(1 << 16)
        try:
            return _Owner(**json.loads(content))
        except (ValueError, TypeError):
            return None

    def write(self) -> None:
        self._filesystem.create_dir(self._folder, recursive=True)
        with synced_output(self._filesystem, self._path) as file:
            file.write(json.dumps(asdict(self._owner)).encode())

    def renew(self) -> None:
        if self._is_local:
            os.utime(self._path)  # a full disk does not matter to it
        elif is_held(self.run_uri, self.token):
            self.write()

    def win(self) -> None:
        """Come to be the only one that claims the folder, then renew the claim; or raise RunExistsError."""
        begun, told = time.monotonic(), False
        first_seen: dict[str, float] = {}
        while True:
            claims = {claim.name: claim for claim in self.claims()}
            own = claims.pop(f"{self.token}.json", None)
            if own is None:
                raise RunExistsError(f"{self.run_uri} was taken by another process at this moment")
            dead = [claim for claim in claims.values() if claim.is_dead(own.renewed)]
            for claim in dead:
                with contextlib.suppress(pa.ArrowException, OSError):
                    self._filesystem.delete_file(f"{self._folder}/{claim.name}")
            rivals = [claim for claim in claims.values() if claim not in dead]
            if not rivals:
                self._renewing.start()
                return
            waited = time.monotonic() - begun
            for rival in rivals:
                lives = rival.renewed > first_seen.setdefault(rival.name, rival.renewed)
                lives = lives or bool(rival.owner and rival.owner.alive)
                if lives and (rival.rank < own.rank or waited > _RACE_S):
                    raise RunExistsError(
                        f"{self.run_uri} is in use by {rival.owner or rival.name}: wait for that run, end it with "
                        "`raypipe stop`, or choose another --name"
                    )
            if waited > _RACE_S and not told:
                told = True
                who = rivals[0].owner or rivals[0].name
                wait = f"waiting up to {_EXPIRES_S:g} s for a sign of life"
                progress(logger, f"{self.run_uri} is held by {who}: {wait}")
            time.sleep(_LOOK_S)
            self.renew()

    def _renew_until_ended(self) -> None:
        while not self._ended.wait(_RENEW_S):
            try:
                # In object storage it writes the claim; behind `give_back` nobody would take that back.
                with self._one_by_one:
                    if not self._ended.is_set():
                        self.renew()
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
            lease.write()
            lease.win()
        yield lease
    finally:
        lease.give_back()


def is_held(run_uri: str, token: str) -> bool:
    """Whether a lease is still the run's, seen from any machine that can see the run's folder."""
    return exists(join(run_uri, _FOLDER, f"{token}.json"))
