"""Map from addresses to a file system and a path on it: local paths, file://, s3://, gs://, az://, abfs://, hdfs://,
and the schemes of fsspec.

All but the last are pyarrow's own. Remote ones have timeouts and retries, see `raypipe.storage.retries`. Settings
and credentials come from the environment of each process, so every node of a cluster needs them:

    s3://bucket/key            AWS_ACCESS_KEY_ID or any other AWS login; AWS_REGION, else the bucket's region;
                               AWS_ENDPOINT_URL for another server; s3://anonymous@bucket/key
    gs://bucket/key            GOOGLE_APPLICATION_CREDENTIALS or the machine's login; gs://anonymous@bucket/key
    az://container/path        AZURE_STORAGE_ACCOUNT; AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN or the machine's
    abfs://container@account.dfs.core.windows.net/path     the same, with the account in the address
    hdfs://namenode:port/path  JAVA_HOME, HADOOP_HOME or ARROW_LIBHDFS_DIR, CLASSPATH; hdfs:///path = Hadoop's own
                               fs.defaultFS; viewfs://cluster/path; KERBEROS_TICKET_CACHE_PATH, HADOOP_USER_NAME
    hf://datasets/user/name/path                           HF_TOKEN; the package huggingface_hub
    SCHEME://host/path         any other that fsspec knows (sftp, oss, webhdfs, https, …): its package, and FSSPEC_
                               variables or files in ~/.config/fsspec

An address is printed, logged and kept with the run, so addresses with credentials or options are rejected.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import pyarrow as pa
import pyarrow.fs

from raypipe.errors import ConfigError, RaypipeError, without_credentials
from raypipe.importing import texts_in
from raypipe.storage.retries import error_reason, patience_s
from raypipe.storage.retrying_filesystem import RetryingFileSystem

_CONNECT_S = 5
_SILENT_S = 20  # a request without a byte for so long is retried
_GOOGLE_RETRY = timedelta(seconds=15)  # limit for all attempts of a request
# Answers of a web server that has no such file, or not for us.
_ABSENT = (401, 403, 404, 410, 451)
_WHOLE_BYTES = (
    1 << 26
)  # smaller files are read with one request, also if their size is unknown
# Scheme → kind of file system; the kind of those of fsspec is the scheme.
_KINDS = {
    "s3": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "abfs": "az",
    "abfss": "az",
    "hdfs": "hdfs",
    "viewfs": "viewfs",
}
_HADOOP = ("hdfs", "viewfs")
# Kind of file system → variables for credentials, which must not be in an address.
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN",
}
# Prefixes of the variables that configure a file system; when one changes, a new file system is made.
_ENVIRONMENT = (
    "AWS_",
    "AZURE_STORAGE_",
    "GOOGLE_",
    "RAYPIPE_STORAGE_",
    "FSSPEC_",
    "HADOOP_",
    "HF_",
    "KERBEROS_",
)
# The begin of an address, unlike an expression that contains one.
_REMOTE = re.compile(r"[\w.+:-]+://")
# Part of the path of Ray's copies of working directories.
_RAYS_COPIES = "/runtime_resources/working_dir_files/"


def is_remote(address: str | Path) -> bool:
    """Return whether an address is not on this machine's file system."""
    return "://" in str(address) and not str(address).startswith("file://")


def check_named_addresses(
    values: Mapping[str, Any], folder: str, trusted: bool
) -> None:
    """Check the addresses that a run's record names, before this machine calls them with its user's credentials.

    Args:
        values: plain values by their names, as JSON has them.
        folder: URI of the run's folder; addresses in its bucket, or on its host, need no trust.
        trusted: whether the user has given the word of trust.

    Raises:
        ConfigError: a remote address is elsewhere, and not trusted.
    """
    if trusted:
        return
    host = folder.split("/")[:3]
    for name, value in values.items():
        for text in texts_in(value):
            is_elsewhere = is_remote(text) and text.split("/")[:3] != host
            if _REMOTE.match(text) and is_elsewhere:
                raise ConfigError(
                    f"{folder.removeprefix('file://')} names the address {text} ({name}), which would be "
                    "called with your credentials: give --train or --val (train=…, val=…) if the store "
                    "is yours, or add --trust-run-code (trust_run_code=True)"
                )


def as_uri(address: str) -> str:
    """Return a local path or URI as a URI that means the same in every process."""
    if "://" in address:
        return address
    return Path(address).expanduser().resolve().as_uri()


def join_address(address: str, *names: str) -> str:
    """Return the address of a name below the folder at an address."""
    return "/".join(
        (address.rstrip("/"), *(map(quote, names) if "://" in address else names))
    )


def split_address(address: str) -> tuple[str, str]:
    """Return the address of the parent folder, "" for a bare name, and the last name; the reverse of `join`."""
    folder, _, name = address.rstrip("/").rpartition("/")
    return folder, unquote(name) if "://" in address else name


def refuse_credentials(address: str | Path) -> None:
    """Raise ConfigError if an address contains a login or options; the message does not show them."""
    scheme, mark, location = str(address).partition("://")
    if mark and (without_credentials(str(address)) != str(address) or "?" in location):
        names = _CREDENTIALS.get(_KINDS.get(scheme, scheme), "variables")
        raise ConfigError(
            f"{address} contains credentials or options, which would be printed, logged and kept with the run: "
            f"remove them from the address, and set {names} in the environment of every node. Write %3F for a ? "
            "in a name"
        )


def open_filesystem(address: str | Path) -> tuple[pyarrow.fs.FileSystem, str]:
    """Return the file system of an address, and the path on it, without a slash at its end.

    Raises:
        ConfigError: the address is malformed, contains credentials, or has an unknown scheme.
        OSError: the file system cannot be reached, see `errors_as`.
    """
    uri = str(address)
    scheme, mark, location = uri.partition("://")
    if not mark:
        return pyarrow.fs.LocalFileSystem(), str(Path(address).expanduser().absolute())
    refuse_credentials(uri)
    if scheme == "file":
        filesystem, path = pyarrow.fs.FileSystem.from_uri(uri)
        return filesystem, path
    host = location.partition("/")[0]
    kind = _KINDS.get(scheme, scheme)
    path = _path_of(uri, kind)
    settings = frozenset(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith(_ENVIRONMENT)
    )
    try:
        filesystem = _filesystem(kind, host, settings, os.getpid())
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{uri}: {error_reason(error)}") from error
    return filesystem, path.rstrip("/") or "/"


def _path_of(uri: str, kind: str) -> str:
    """Return the path of a remote address on its file system."""
    scheme, _, location = uri.partition("://")
    host, _, path = location.partition("/")
    if kind in _HADOOP:
        return f"/{unquote(path)}"
    if scheme not in _KINDS:
        return str(_fsspec_class(scheme, uri)._strip_protocol(unquote(uri)))
    if scheme.startswith("abfs"):
        bucket = host.partition("@")[0]
    else:
        bucket = host.rpartition("@")[2]
    if not bucket:
        raise ConfigError(f"{uri} names no bucket")
    return f"{bucket}/{unquote(path)}"


@functools.lru_cache(maxsize=64)
def _filesystem(
    kind: str, host: str, settings: frozenset[tuple[str, str]], pid: int
) -> RetryingFileSystem:
    """Make or reuse this process's file system; `pid` keeps a forked child from using its parent's."""
    patience_s()  # raises early for a wrong setting
    return RetryingFileSystem(kind, host, _make)


def _make(kind: str, host: str) -> pyarrow.fs.FileSystem:
    if kind == "gs":
        anonymous = host.startswith("anonymous@")
        return pyarrow.fs.GcsFileSystem(
            anonymous=anonymous, retry_time_limit=_GOOGLE_RETRY
        )
    if kind in _HADOOP:
        return _hadoop(kind, host)
    if kind not in _KINDS.values():
        return _fsspec(kind, host)
    return _s3(host) if kind == "s3" else _azure(host)


def _s3(host: str) -> pyarrow.fs.FileSystem:
    environment = os.environ.get
    options: dict[str, Any] = {
        "anonymous": host.startswith("anonymous@"),
        "region": environment("AWS_REGION") or environment("AWS_DEFAULT_REGION"),
        "connect_timeout": _CONNECT_S,
        "request_timeout": _SILENT_S,
        "allow_delayed_open": True,  # makes a small object one request instead of three
    }
    endpoint = environment("AWS_ENDPOINT_URL_S3") or environment("AWS_ENDPOINT_URL")
    if endpoint:
        if "@" in endpoint:
            raise ConfigError(
                f"AWS_ENDPOINT_URL must not contain a login: set {_CREDENTIALS['s3']}"
            )
        parts = urlsplit(endpoint if "://" in endpoint else f"https://{endpoint}")
        options |= {"endpoint_override": parts.netloc, "scheme": parts.scheme}
    if not options["region"]:
        # A private server has no regions; for AWS, a request finds the bucket's region.
        bucket = host.rpartition("@")[2]
        options["region"] = (
            "us-east-1" if endpoint else pyarrow.fs.resolve_s3_region(bucket)
        )
    return pyarrow.fs.S3FileSystem(**options)


def _azure(host: str) -> pyarrow.fs.FileSystem:
    container, _, server = host.partition("@")
    if server:
        account = server.partition(".")[0]
    else:
        account = os.environ.get("AZURE_STORAGE_ACCOUNT", "")
    if not account:
        raise ConfigError(
            f"az://{container}: set AZURE_STORAGE_ACCOUNT; addresses are az://container/path, or "
            "abfs://container@account.dfs.core.windows.net/path"
        )
    key = os.environ.get("AZURE_STORAGE_KEY")
    token = os.environ.get("AZURE_STORAGE_SAS_TOKEN")
    return pyarrow.fs.AzureFileSystem(
        account, account_key=key or None, sas_token=(not key and token) or None
    )


def _hadoop(scheme: str, host: str) -> pyarrow.fs.FileSystem:
    name, _, port = host.partition(":")
    host = f"{scheme}://{name}" if scheme == "viewfs" else name
    ticket = os.environ.get("KERBEROS_TICKET_CACHE_PATH")
    try:
        return pyarrow.fs.HadoopFileSystem(
            host or "default", int(port or 0), kerb_ticket=ticket
        )
    except OSError as error:
        # more than a hundred lines follow, of places that it looked in
        reason = str(error).partition("\n")[0]
        if "Unable to load" not in reason:
            raise
        raise ConfigError(
            f"{scheme}://{name}: {reason}: HDFS needs Java and Hadoop's native client on every node. Set "
            "JAVA_HOME, HADOOP_HOME (or ARROW_LIBHDFS_DIR, the folder of libhdfs.so), and CLASSPATH to what "
            "`hadoop classpath --glob` prints; or use webhdfs://namenode:9870/path, which needs neither"
        ) from None


def _fsspec_class(scheme: str, uri: str) -> Any:
    """Return fsspec's class for a scheme; raise ConfigError if there is none, or its package is missing."""
    import fsspec

    try:
        return fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise ConfigError(f"{uri}: {error} (on every node)") from None
    except ValueError:
        raise ConfigError(
            f"unsupported scheme in {uri}; use a local path, file://, s3://, gs://, az://, abfs://, hdfs://, or "
            "one that fsspec knows"
        ) from None


def _fsspec(scheme: str, host: str) -> pyarrow.fs.FileSystem:
    import fsspec

    filesystem, _ = fsspec.core.url_to_fs(f"{scheme}://{host}/")
    filesystem.use_listings_cache = False  # other processes' writes must be visible
    handler = _WebHandler if scheme.startswith("http") else pyarrow.fs.FSSpecHandler
    return pyarrow.fs.PyFileSystem(handler(filesystem))


class _WebHandler(pyarrow.fs.FSSpecHandler):
    """A web server's handler: if the server does not answer, this is an outage, and its files may exist."""

    def open_input_file(self, path: str) -> pa.NativeFile:
        try:
            file = self.fs.open(path)
            if (file.size or 0) > _WHOLE_BYTES:
                return pa.PythonFile(file, mode="r")
            return pa.BufferReader(file.read(_WHOLE_BYTES))
        except Exception as error:
            cause = error.__cause__ or error
            is_absent = getattr(cause, "status", 0) in _ABSENT
            if is_absent or isinstance(cause, FileNotFoundError):
                raise FileNotFoundError(path) from error
            raise ConnectionError(str(cause)) from error


@contextlib.contextmanager
def errors_as(failure: type[RaypipeError], message: str) -> Iterator[None]:
    """Context manager: turn a file system's error into `failure` with one line: message, reason, and remedy."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise failure(f"{message}: {error_reason(error)}") from error


def exists(address: str) -> bool:
    """Return whether a file, not a folder, exists at an address."""
    filesystem, path = open_filesystem(address)
    return filesystem.get_file_info(path).type == pyarrow.fs.FileType.File


def is_folder(address: str) -> bool:
    """Return whether a folder exists at an address; in object storage, whether an object is below it."""
    filesystem, path = open_filesystem(address)
    return filesystem.get_file_info(path).type == pyarrow.fs.FileType.Directory


def check_bucket(address: str) -> None:
    """Raise ConfigError if the bucket of a remote address cannot be reached, before work is done for it."""
    if is_remote(address):
        with errors_as(ConfigError, f"{address} cannot be used"):
            filesystem, path = open_filesystem(address)
            bucket = path.partition("/")[0] or "/"
            if filesystem.get_file_info(bucket).type == pyarrow.fs.FileType.NotFound:
                raise ConfigError(
                    f"{address} cannot be used: bucket {bucket} does not exist: create it first"
                )


def check_lasting(address: str, setting: str) -> None:
    """Raise ConfigError for a path in Ray's copy of a job's working directory, which Ray removes with the job."""
    filesystem, path = open_filesystem(address)
    if (
        isinstance(filesystem, pyarrow.fs.LocalFileSystem)
        and _RAYS_COPIES in f"{path}/"
    ):
        raise ConfigError(
            f"{setting} leads to {path}, Ray's temporary copy of the job's working directory, which Ray removes "
            f"with the job: set {setting} to an absolute path that all nodes share, or a bucket (s3://bucket/runs)"
        )
