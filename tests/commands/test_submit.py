from __future__ import annotations

import os
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from ray._private.runtime_env import packaging

from raypipe.commands.submit import SECRETS, check_upload, submit, survey
from raypipe.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / ".gitignore").write_text("secret.txt\n")
    (tmp_path / ".rayignore").write_text("big/\n")
    for name in (
        "train.py",
        "secret.txt",
        "big/data.bin",
        "runs/one/state.pt",
        "train.lmdb",
        ".venv/bin/python",
        "package/__init__.py",
        "package/__pycache__/x.pyc",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(100))
    return tmp_path


def test_only_the_program_is_uploaded(folder: Path) -> None:
    found, unsafe = survey(folder)
    assert not unsafe
    assert {name for name, size in found.items() if size == 100} == {"train.py", "package/__init__.py"}


SECRET_FILES = (
    *(".env", ".env.local", "package/.netrc", ".ssh/config", ".aws/credentials", ".config/gcloud/credentials.db"),
    *(".docker/config.json", "id_ed25519", "id_rsa.bak", "server.pem", "tls.key", "service-account-1.json"),
    *("google_credentials.json", ".git-credentials", "package/secrets.yaml", ".ray/auth_token"),
)


@pytest.fixture
def unsafe_folder(folder: Path) -> Path:
    """A program beside secrets, links that lead elsewhere, and what is no file."""
    for name in SECRET_FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("SECRET")
    (folder / "deploy-key").write_text("\n-----BEGIN OPENSSH PRIVATE KEY-----\nSECRET\n")
    (folder / "bucket-account.json").write_text('{\n  "type": "x",\n  "private_key": "SECRET"\n}')
    (folder / "cloud.txt").write_text("[default]\naws_secret_access_key = SECRET\n")
    outside = folder.parent / f"{folder.name}-outside"
    outside.mkdir()
    (outside / "data.txt").write_text("SECRET")
    for name, target in (
        ("out", outside),
        ("package/out.txt", outside / "data.txt"),
        ("harmless.txt", Path(".env")),
        ("harmless", Path(".ssh")),
        ("package/round", folder),
        ("gone", folder / "nowhere"),
        ("[a] *.txt", outside / "data.txt"),
        ("inside.py", Path("train.py")),
        ("inside", Path("package")),
    ):
        (folder / name).symlink_to(target)
    os.mkfifo(folder / "pipe")
    return folder


class JobServer:
    """Keeps what is submitted, in place of a cluster."""

    def submit_job(self, entrypoint: str, runtime_env: dict[str, Any]) -> str:
        self.environment = runtime_env
        return "job"


def test_neither_secrets_nor_what_links_lead_to_are_uploaded_and_each_is_named(
    unsafe_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = JobServer()
    monkeypatch.setattr("raypipe.commands.submit._client", lambda address: server)
    submit(["true"], working_dir=str(unsafe_folder), follow=False)
    package = tmp_path.parent / f"{tmp_path.name}.zip"
    given = server.environment
    packaging._zip_files(
        given["working_dir"], given["excludes"], str(package), include_gitignore=True
    )  # as Ray does
    with zipfile.ZipFile(package) as uploaded:
        carried = {name for name in uploaded.namelist() if not name.endswith("/")}
        assert not [name for name in carried if b"SECRET" in uploaded.read(name)]
    programs = {"train.py", "package/__init__.py", "inside.py", "inside/__init__.py"}
    assert carried == {".gitignore", ".rayignore", *programs}
    unsafe = survey(unsafe_folder)[1]
    for name, reason in {
        ".env": "its name is that of a secret",
        "out": f"a link out of the folder, to {unsafe_folder}-outside",
        "[a] *.txt": f"a link out of the folder, to {unsafe_folder}-outside/data.txt",
        "harmless.txt": "a link to .env, which is not uploaded",
        "harmless": "a link to .ssh, which is not uploaded",
        "deploy-key": "it holds a key",
        "package/round": "a link to a folder that it is in",
        "pipe": "no regular file",
        "gone": "no regular file",
    }.items():
        assert unsafe[name] == reason
    told = [f"not uploaded: {name} ({reason})" for name, reason in unsafe.items()]
    shown = capsys.readouterr().out.splitlines()
    assert shown[:20] == told[:20] and shown[20] == f"not uploaded: {len(told) - 20} more"


def test_ray_leaves_the_same_secrets_of_a_checkout_behind() -> None:
    ignored = (Path(__file__).parents[2] / ".rayignore").read_text().splitlines()
    assert set(SECRETS) <= set(ignored)


def test_a_command_with_credentials_is_not_submitted(folder: Path) -> None:
    command = ["python", "train.py", "--store.train", "s3://AKIA:SECRET@bucket/a.lmdb"]
    with pytest.raises(ConfigError, match=r"s3://…@bucket/a\.lmdb holds credentials"):
        submit(command, working_dir=str(folder))
    with pytest.raises(ConfigError, match=r"http://…@host:8265 holds credentials.* RAY_JOB_HEADERS"):
        submit(["true"], address="http://me:SECRET@host:8265", working_dir=str(folder))


class AsksForAToken(BaseHTTPRequestHandler):
    """Answers as a job server with authentication does."""

    def do_GET(self) -> None:
        self.send_error(401, "Unauthorized: Missing authentication token")

    def log_message(self, *args: object) -> None:
        pass


def test_a_cluster_that_asks_for_its_token_is_one_error(folder: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), AsksForAToken) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(
                ConfigError, match=r"asks for its token.* set RAY_AUTH_MODE=token, with the token in"
            ):
                submit(["true"], address=f"http://127.0.0.1:{server.server_port}", working_dir=str(folder))
        finally:
            server.shutdown()


def test_a_folder_that_is_too_large_is_refused_before_the_upload_by_its_largest_files(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(bytes(3 << 20))
    check_upload(folder, 4)
    with pytest.raises(ConfigError, match=r"3 MiB to upload in 5 files.*--max-mib 2.*weights\.bin \(3 MiB\)"):
        check_upload(folder, 2)


def test_what_cannot_be_submitted_is_one_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="nothing to submit: raypipe submit -- python"):
        submit([])
    with pytest.raises(ConfigError, match="nowhere is no folder"):
        submit(["true"], working_dir=str(folder / "nowhere"))
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9.* Set --address http://HOST:8265"):
        submit(["true"], address="http://127.0.0.1:9", working_dir=str(folder))
