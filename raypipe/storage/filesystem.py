"""Every address as a file system and a path on it, in one place: local paths, file://, s3://, gs://, az://, abfs://,
and hf://, to read.

The file systems are pyarrow's own, with time-outs and patience. Their settings, like credentials, come from the
environment of each process, so on a cluster every node has them:

    s3://bucket/key            AWS_ACCESS_KEY_ID and all else that AWS knows; AWS_REGION, or the bucket's own;
                               AWS_ENDPOINT_URL for another server; s3://anonymous@bucket/key
    gs://bucket/key            GOOGLE_APPLICATION_CREDENTIALS, or the machine's own; gs://anonymous@bucket/key
    az://container/path        AZURE_STORAGE_ACCOUNT; AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN or the machine's
    abfs://container@account.dfs.core.windows.net/path     the same, with the account in the address
    hf://datasets/OWNER/NAME@REVISION/path                 HF_TOKEN, or the machine's own login; see `_Hub`

An address holds no credentials, and no options: it is printed, logged and kept with the run. One that does is
refused.

How long one that does not answer is waited for, `raypipe.storage.patience` says.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import pyarrow as pa
import pyarrow.fs

from raypipe.errors import ConfigError, RaypipeError, without_credentials
from raypipe.lookup import to_install
from raypipe.storage.patience import one_line, patience_s
from raypipe.storage.patient import PatientFileSystem

_CONNECT_S = 5
_SILENT_S = 20  # without a byte, after which a request is tried again
_GOOGLE_RETRY = timedelta(seconds=15)  # for a request with all its attempts
# Scheme → its kind of file system.
_KINDS = {"s3": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az", "hf": "hf"}
# Where credentials stand, instead of in an address.
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN",
    "hf": "HF_TOKEN",
}
# What a file system is made of beside its address begins with one of these: another value makes another one.
_ENVIRONMENT = ("AWS_", "AZURE_STORAGE_", "GOOGLE_", "HF_", "RAYPIPE_STORAGE_")
# In the path of Ray's copies of working directories.
_RAYS_COPIES = "/runtime_resources/working_dir_files/"


def is_remote(address: str | Path) -> bool:
    """Whether an address is on another file system than this machine's."""
    return "://" in str(address) and not str(address).startswith("file://")


def as_uri(address: str) -> str:
    """A local path or a URI as a URI that every process understands."""
    return address if "://" in address else Path(address).expanduser().resolve().as_uri()


def join(address: str, *names: str) -> str:
    """The address of something in the folder at an address."""
    return "/".join((address.rstrip("/"), *(map(quote, names) if "://" in address else names)))


def split(address: str) -> tuple[str, str]:
    """The address of the folder that something is in, "" for a bare name, and its name; the reverse of `join`."""
    folder, _, name = address.rstrip("/").rpartition("/")
    return folder, unquote(name) if "://" in address else name


def refuse_credentials(address: str | Path) -> None:
    """Raise ConfigError, which does not show them, where an address holds a login or options."""
    scheme, mark, rest = str(address).partition("://")
    if mark and (without_credentials(str(address)) != str(address) or "?" in rest):
        names = _CREDENTIALS.get(_KINDS.get(scheme, scheme), "variables")
        raise ConfigError(
            f"{address} holds credentials or options, which would be printed, logged and kept with the run: take "
            f"them out of the address, and set {names} in the environment of every node; a ? in a name is %3F"
        )


def open_filesystem(address: str | Path) -> tuple[pyarrow.fs.FileSystem, str]:
    """The file system of an address, and the path on it, without a slash at its end.

    ConfigError where the address is malformed, holds credentials, or has another scheme; OSError where the file
    system cannot be reached, see `explained`.
    """
    uri = str(address)
    scheme, mark, rest = uri.partition("://")
    if not mark:
        return pyarrow.fs.LocalFileSystem(), str(Path(address).expanduser().absolute())
    refuse_credentials(uri)
    if scheme == "file":
        filesystem, path = pyarrow.fs.FileSystem.from_uri(uri)
        return filesystem, path
    if scheme not in _KINDS:
        understood = "local paths, file://, s3://, gs://, az://, abfs:// and hf://"
        raise ConfigError(f"{uri} has an unknown scheme; understood are {understood}")
    host, _, path = rest.partition("/")
    bucket = host.partition("@")[0] if scheme.startswith("abfs") else host.rpartition("@")[2]
    if not bucket:
        raise ConfigError(f"{uri} names no bucket")
    settings = frozenset((name, value) for name, value in os.environ.items() if name.startswith(_ENVIRONMENT))
    try:
        filesystem = _filesystem(_KINDS[scheme], host, settings, os.getpid())
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{uri}: {one_line(error)}") from error
    return filesystem, f"{bucket}/{unquote(path)}".rstrip("/")


@functools.lru_cache(maxsize=64)
def _filesystem(kind: str, host: str, settings: frozenset[tuple[str, str]], pid: int) -> PatientFileSystem:
    """One per process, so that connections are used again; never one that a parent process made."""
    patience_s()  # a wrong setting is told before it is needed
    return PatientFileSystem(kind, host, _make)


def _make(kind: str, host: str) -> pyarrow.fs.FileSystem:
    if kind == "gs":
        anonymous = host.startswith("anonymous@")
        return pyarrow.fs.GcsFileSystem(anonymous=anonymous, retry_time_limit=_GOOGLE_RETRY)
    if kind == "hf":
        return _hub()
    return _s3(host) if kind == "s3" else _azure(host)


def _s3(host: str) -> pyarrow.fs.FileSystem:
    environment = os.environ.get
    options: dict[str, Any] = {
        "anonymous": host.startswith("anonymous@"),
        "region": environment("AWS_REGION") or environment("AWS_DEFAULT_REGION"),
        "connect_timeout": _CONNECT_S,
        "request_timeout": _SILENT_S,
        "allow_delayed_open": True,  # a small object is then one request, not three
    }
    endpoint = environment("AWS_ENDPOINT_URL_S3") or environment("AWS_ENDPOINT_URL")
    if endpoint:
        if "@" in endpoint:
            raise ConfigError(f"AWS_ENDPOINT_URL holds a login, and may not: set {_CREDENTIALS['s3']}")
        parts = urlsplit(endpoint if "://" in endpoint else f"https://{endpoint}")
        options |= {"endpoint_override": parts.netloc, "scheme": parts.scheme}
    if not options["region"]:
        # A server of one's own has no regions, and AWS must be asked which one the bucket is in.
        bucket = host.rpartition("@")[2]
        options["region"] = "us-east-1" if endpoint else pyarrow.fs.resolve_s3_region(bucket)
    return pyarrow.fs.S3FileSystem(**options)


def _azure(host: str) -> pyarrow.fs.FileSystem:
    container, at, server = host.partition("@")
    account = server.partition(".")[0] if at else os.environ.get("AZURE_STORAGE_ACCOUNT")
    if not account:
        raise ConfigError(
            f"az://{container}: set AZURE_STORAGE_ACCOUNT; addresses are az://container/path, or "
            "abfs://container@account.dfs.core.windows.net/path"
        )
    key, token = os.environ.get("AZURE_STORAGE_KEY"), os.environ.get("AZURE_STORAGE_SAS_TOKEN")
    return pyarrow.fs.AzureFileSystem(account, account_key=key or None, sas_token=(not key and token) or None)


def _hub() -> pyarrow.fs.FileSystem:
    try:
        from huggingface_hub import HfFileSystem
    except ImportError as error:
        extra = f"{to_install('huggingface')}, on every node"
        raise ConfigError(f"hf:// needs huggingface-hub ({error}): {extra}") from error
    # As AWS_ENDPOINT_URL is, for a mirror: the client itself looks at it only when it is imported.
    client = HfFileSystem(endpoint=os.environ.get("HF_ENDPOINT"), skip_instance_cache=True)
    return pyarrow.fs.PyFileSystem(_Hub(client))


class _Hub(pyarrow.fs.FSSpecHandler):
    """The Hugging Face Hub: it reads ranges of a file and nothing around them, and writes nothing.

    Its client lists each folder once in a process, so a data set that changes while it is read is best named with
    a revision, such as a commit.
    """

    def open_input_file(self, path: str) -> pa.NativeFile:
        if not self.fs.isfile(path):
            raise FileNotFoundError(path)
        return pa.PythonFile(self.fs.open(path, "rb", cache_type="none"), mode="r")

    def open_output_stream(self, *args: Any) -> Any:
        raise OSError("the Hub is only read; write to a disk or to a bucket, and upload it by `hf upload`")

    create_dir = delete_dir = delete_file = open_output_stream


@contextlib.contextmanager
def explained(failure: type[RaypipeError], what: str) -> Iterator[None]:
    """Within, what a file system raises becomes one line: `what`, why, and what to do about it."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise failure(f"{what}: {one_line(error)}") from error


def exists(address: str) -> bool:
    """Whether there is a file at an address; folders do not count."""
    filesystem, path = open_filesystem(address)
    return filesystem.get_file_info(path).type == pyarrow.fs.FileType.File


def check_bucket(address: str) -> None:
    """Raise ConfigError where the bucket of a remote address cannot be reached, before work is done for it."""
    if is_remote(address):
        with explained(ConfigError, f"{address} cannot be used"):
            filesystem, path = open_filesystem(address)
            bucket = path.partition("/")[0]
            if filesystem.get_file_info(bucket).type == pyarrow.fs.FileType.NotFound:
                raise ConfigError(f"{address} cannot be used: there is no bucket {bucket}: make it first")


def check_lasting(address: str, setting: str) -> None:
    """Raise ConfigError for a place in Ray's copy of a job's working directory, which Ray removes with the job."""
    filesystem, path = open_filesystem(address)
    if isinstance(filesystem, pyarrow.fs.LocalFileSystem) and _RAYS_COPIES in f"{path}/":
        raise ConfigError(
            f"{setting} leads to {path}, Ray's temporary copy of the job's working directory, which goes with the "
            f"job: set {setting} to an absolute path that all nodes share, or to a bucket (s3://bucket/runs)"
        )
