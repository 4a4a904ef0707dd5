from __future__ import annotations

import os
import pickle
import re
import threading
import traceback
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow.fs
import pytest
from fsspec.registry import known_implementations
from s3_server import FaultyProxy, environment

from raypipe.errors import ConfigError, OutageError, RaypipeError, StoreError
from raypipe.storage.files import check_place, read_json, write_json
from raypipe.storage.filesystem import (
    as_uri,
    check_bucket,
    check_lasting,
    errors_as,
    exists,
    join_address,
    open_filesystem,
    split_address,
)
from raypipe.storage.retrying_filesystem import upload
from raypipe.stores import open_store
from raypipe.stores.image_files import read_files


@pytest.fixture(autouse=True)
def no_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(
            ("AWS_", "AZURE_", "GOOGLE_", "RAYPIPE_STORAGE_", "KERBEROS_")
        ):
            monkeypatch.delenv(name)


# Addresses


def test_as_uri_makes_paths_absolute_and_leaves_uris(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/somewhere")
    assert as_uri("runs") == (tmp_path / "runs").as_uri()
    assert as_uri("~/my runs") == "file:///somewhere/my%20runs"
    assert as_uri("s3://bucket/runs") == "s3://bucket/runs"


@pytest.mark.parametrize(
    ("folder", "joined"),
    [
        ("/a/b", "/a/b/my run/c"),
        ("/a/b/", "/a/b/my run/c"),
        ("file:///a", "file:///a/my%20run/c"),
        ("s3://bucket", "s3://bucket/my%20run/c"),
        ("s3://bucket/a/", "s3://bucket/a/my%20run/c"),
    ],
)
def test_join_adds_names_and_split_takes_them_off(folder: str, joined: str) -> None:
    assert join_address(folder, "my run", "c") == joined
    parent, name = split_address(joined)
    assert name == "c" and join_address(parent, name) == joined
    assert split_address(parent)[1] == "my run"


# What each scheme becomes


AZURE = {"AZURE_STORAGE_ACCOUNT": "of-the-environment", "AZURE_STORAGE_KEY": "a2V5"}
NO_HURRY = {"connect_timeout": 5, "request_timeout": 20}
OF_GOOGLE = {"retry_time_limit": timedelta(seconds=15), "anonymous": True}
# Address → the environment, and the file system's class, path and options.
SCHEMES: dict[str, tuple[dict[str, str], str, str, dict[str, Any]]] = {
    "s3://bucket/a%20b/c/": (
        {"AWS_ENDPOINT_URL": "http://127.0.0.1:9000"},
        "S3FileSystem",
        "bucket/a b/c",
        {"endpoint_override": "127.0.0.1:9000", "scheme": "http", **NO_HURRY},
    ),
    "s3://anonymous@bucket/a": (
        {"AWS_REGION": "eu-west-1"},
        "S3FileSystem",
        "bucket/a",
        {"endpoint_override": "", "region": "eu-west-1", "anonymous": True},
    ),
    "gs://anonymous@bucket/a/b": ({}, "GcsFileSystem", "bucket/a/b", OF_GOOGLE),
    "gcs://anonymous@bucket/a/b": ({}, "GcsFileSystem", "bucket/a/b", OF_GOOGLE),
    "az://container/a/b": (
        AZURE,
        "AzureFileSystem",
        "container/a/b",
        {"account_name": "of-the-environment", "account_key": "a2V5"},
    ),
    "abfss://container@mine.dfs.core.windows.net/a/b": (
        AZURE,
        "AzureFileSystem",
        "container/a/b",
        {"account_name": "mine", "account_key": "a2V5"},
    ),
}


@pytest.mark.parametrize("address", SCHEMES)
def test_each_scheme_has_its_file_system_with_the_environments_options(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, kind, path, options = SCHEMES[address]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    filesystem, found = open_filesystem(address)
    inner = filesystem.handler.inner()
    assert type(inner).__name__ == kind and found == path
    made = inner.__reduce__()[1][0]
    assert {name: made[name] for name in options} == options


def test_any_scheme_of_fsspec_reads_and_writes_whole_files(tmp_path: Path) -> None:
    folder = "memory://raypipe/a%20b"
    try:
        write_json(f"{folder}/one.json", {"a": 1})
        write_json(f"{folder}/one.json", {"a": 2})
        assert read_json(f"{folder}/one.json") == {"a": 2} and exists(
            f"{folder}/one.json"
        )
        (tmp_path / "file").write_bytes(b"abc")
        upload(str(tmp_path / "file"), *open_filesystem(f"{folder}/file"))
        filesystem, path = open_filesystem(folder)
        found = filesystem.get_file_info(pyarrow.fs.FileSelector(path))
        assert sorted((Path(file.path).name, file.size) for file in found) == [
            ("file", 3),
            ("one.json", 11),
        ]
        with open_filesystem(f"{folder}/file")[0].open_input_file(
            f"{path}/file"
        ) as file:
            assert file.read_at(2, 1) == b"bc"
        check_bucket(folder)
    finally:
        fsspec.filesystem("memory").rm("/raypipe", recursive=True)


def test_a_store_at_an_address_of_fsspec_is_read_in_place(
    stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path))
    local = open_store(str(stores["parquet"]))
    try:
        upload(
            str(stores["parquet"]), *open_filesystem("memory://raypipe/train.parquet")
        )
        store = open_store("memory://raypipe/train.parquet")
        indices = np.array([3, 97, 42])
        assert list(store.read(indices)["image"]) == list(local.read(indices)["image"])
    finally:
        fsspec.filesystem("memory").rm("/raypipe", recursive=True)


def test_hdfs_without_java_is_one_error_that_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loads(host: str, port: int, kerb_ticket: str | None) -> None:
        made.append((host, port, kerb_ticket))
        raise OSError("Unable to load libjvm\ndlopen(a) failed\ndlopen(b) failed")

    made = list[tuple[str, int, str | None]]()
    monkeypatch.setattr(pyarrow.fs, "HadoopFileSystem", loads)
    monkeypatch.setenv("KERBEROS_TICKET_CACHE_PATH", "/tmp/ticket")
    for address in ("hdfs://namenode:8020/a/b", "hdfs:///a", "viewfs://cluster/a"):
        with pytest.raises(
            ConfigError,
            match=r"^\w+://\w*: Unable to load libjvm: .* JAVA_HOME.*webhdfs://",
        ) as told:
            open_filesystem(address)
        assert "\n" not in str(told.value)
    expected = [("namenode", 8020), ("default", 0), ("viewfs://cluster", 0)]
    assert made == [(*host, "/tmp/ticket") for host in expected]


# What is wrong is told in one line


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "fttp://a/b",
            r"unsupported scheme in fttp://a/b; use a local path, file://, s3://.* that fsspec knows",
        ),
        ("lacks://a/b", r"lacks://a/b: Install no_such_package \(on every node\)"),
        ("s3:///a", "names no bucket"),
        (
            "s3://b/a?",
            "contains credentials or options, .* Write %3F for a . in a name",
        ),
        (
            "az://c/a",
            r"set AZURE_STORAGE_ACCOUNT; addresses are az://container/path, or abfs://",
        ),
        (
            "abfs://c@a.dfs.core.windows.net/b?colour=red",
            r"/b\?colour=… contains credentials or options",
        ),
    ],
)
def test_a_wrong_address(
    address: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks = {"class": "no_such_package.FileSystem", "err": "Install no_such_package"}
    monkeypatch.setitem(known_implementations, "lacks", lacks)
    with pytest.raises(ConfigError, match=message):
        open_filesystem(address)


@pytest.mark.parametrize(
    ("address", "shown", "variable"),
    [
        ("s3://AKIA:SECRET@bucket/a", "s3://…@bucket/a", "AWS_SECRET_ACCESS_KEY"),
        (
            "s3://AKIA:SEC/RET+SECRET@bucket/a",
            "s3://…@bucket/a",
            "AWS_SECRET_ACCESS_KEY",
        ),
        ("s3://SECRET@bucket/a", "s3://…@bucket/a", "AWS_SECRET_ACCESS_KEY"),
        (
            "s3://bucket/a?endpoint_override=me:SECRET@host",
            "a?endpoint_override=… contains",
            "AWS_ACCESS_KEY_ID",
        ),
        (
            "s3://bucket/a?secret_key=SECRET",
            "a?secret_key=… contains",
            "AWS_ACCESS_KEY_ID",
        ),
        (
            "gs://me:SECRET@bucket/a",
            "gs://…@bucket/a",
            "GOOGLE_APPLICATION_CREDENTIALS",
        ),
        ("gs://SECRET@bucket/a", "gs://…@bucket/a", "GOOGLE_APPLICATION_CREDENTIALS"),
        (
            "az://container/a?sv=2024&sig=SECRET",
            "a?sv=…&sig=… contains",
            "AZURE_STORAGE_SAS_TOKEN",
        ),
        (
            "abfs://c:SECRET@account.dfs.core.windows.net/a",
            "abfs://…@account",
            "AZURE_STORAGE_SAS_TOKEN",
        ),
        ("https://me:SECRET@host/a", "https://…@host/a", ""),
    ],
)
def test_an_address_with_credentials_is_refused_and_nothing_shows_them(
    address: str, shown: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "mine")
    for use in (
        open_filesystem,
        check_bucket,
        check_place,
        read_json,
        lambda a: len(open_store(f"{a}.lmdb")),
    ):
        with pytest.raises(RaypipeError, match=re.escape(shown)) as caught:
            use(address)
        assert variable in str(caught.value)
        told = "".join(
            traceback.format_exception(pickle.loads(pickle.dumps(caught.value)))
        )
        assert "SECRET" not in told.replace("AWS_SECRET_", ""), told


def test_a_login_in_the_environments_endpoint_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://me:password@host")
    with pytest.raises(
        ConfigError,
        match="AWS_ENDPOINT_URL must not contain a login: set AWS_ACCESS_KEY_ID",
    ) as e:
        open_filesystem("s3://bucket/a")
    assert "password" not in str(e.value)


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/date=12:30/a@b.tar is no store",
        "gs://anonymous@bucket/a, abfs://container@account.dfs.core.windows.net/a",
        "AWS Error NETWORK_CONNECTION: http://127.0.0.1:9000/bucket",
        "file:///a/b:c@d",
    ],
)
def test_errors_show_addresses_without_credentials_as_they_are(text: str) -> None:
    assert str(StoreError(text)) == text


@pytest.mark.parametrize("value", ["x", "-1", "inf", "nan"])
def test_a_wrong_setting(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("RAYPIPE_STORAGE_PATIENCE_S", value)
    with pytest.raises(
        ConfigError,
        match=rf"STORAGE_PATIENCE_S must be a number of seconds, got '{value}'",
    ):
        open_filesystem("s3://bucket")


def test_a_missing_bucket_is_told_before_work_begins(bucket: str) -> None:
    check_bucket(f"{bucket}/runs/mine")
    check_bucket("/nowhere")
    with pytest.raises(
        ConfigError,
        match="s3://no-such/runs cannot be used: bucket no-such does not exist: create it",
    ):
        check_bucket("s3://no-such/runs")
    filesystem, path = open_filesystem("s3://no-such/x")
    with (
        pytest.raises(
            StoreError,
            match=r"^it cannot be written: .*create the bucket, or correct the address$",
        ),
        errors_as(StoreError, "it cannot be written"),
        filesystem.open_output_stream(path) as file,
    ):
        file.write(b"x")


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAYPIPE_STORAGE_PATIENCE_S", "0")
    with pytest.raises(
        OutageError,
        match=r"s3://bucket was unavailable .*check the network, and AWS_ENDPOINT_URL",
    ):
        check_bucket("s3://bucket/a")


# Against a server


def test_what_is_written_is_read_through_every_kind_of_fault(
    bucket: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # one request; several parts
    contents = [
        os.urandom(300_000),
        os.urandom(11_000_000),
    ]
    rates = {"throttle": 0.1, "drop": 0.1, "cut": 0.1, "slow": 0.1}
    with FaultyProxy(s3_endpoint, seed=243, rates=rates) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        for number, content in enumerate(contents):
            filesystem, path = open_filesystem(f"{bucket}/a%20{number}")
            with filesystem.open_output_stream(path) as file:
                file.write(content)
            with filesystem.open_input_file(path) as file:
                assert (
                    b"".join(
                        file.read_at(100_000, at) for at in range(0, 300_000, 100_000)
                    )
                    == content[:300_000]
                )
            assert exists(f"{bucket}/a%20{number}") and not exists(f"{bucket}/b")
        assert set(proxy.faults) == set(rates), proxy.faults


def test_a_place_in_rays_copy_of_a_jobs_folder_is_none_that_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    copy.mkdir(parents=True)
    check_lasting(str(tmp_path), "runs")
    monkeypatch.chdir(copy)
    for address in ("runs", "./runs/x", copy.as_uri(), str(copy)):
        with pytest.raises(
            ConfigError, match=r"^runs leads to .*_ray_pkg_1.*, Ray's temporary copy"
        ):
            check_lasting(address, "runs")
    with pytest.raises(ConfigError, match=r"^the file to write leads to"):
        check_place("found.json")


# Web servers


class _Answers(BaseHTTPRequestHandler):
    """Answers with the status that a path names, and with its size unless this has `stream`."""

    def do_GET(self) -> None:
        content = b"" if self.command == "HEAD" else b"content"
        self.send_response(int(self.path.rpartition("/")[2]))
        if "stream" not in self.path:
            self.send_header("Content-Length", "7")
        self.end_headers()
        self.wfile.write(content)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def web() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize(
    ("path", "found"),
    [("200", b"content"), ("stream/200", b"content"), ("404", None), ("403", None)],
)
def test_a_web_server_says_what_exists(
    path: str, found: bytes | None, web: ThreadingHTTPServer
) -> None:
    assert read_files([f"http://127.0.0.1:{web.server_port}/{path}"]) == [found]


@pytest.mark.parametrize("path", ["500", "429", "200"])
def test_a_web_server_that_fails_is_an_outage(
    path: str, web: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPIPE_STORAGE_PATIENCE_S", "0")
    address = f"http://127.0.0.1:{web.server_port}/{path}"
    if path == "200":  # nobody answers any more
        web.shutdown()
        web.server_close()
    with pytest.raises(OutageError, match=rf"^{address} was unavailable"):
        read_files([address])
