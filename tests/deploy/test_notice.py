"""The notice that a cloud gives to a spot machine becomes a drained node."""

from __future__ import annotations

import datetime
import http.server
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from ray.scripts.scripts import cli as ray_cli

NOTICE = Path(__file__).parents[2] / "deploy/notice.py"


class Metadata(http.server.BaseHTTPRequestHandler):
    """A cloud's metadata server: its documents by path, and IMDSv2's token."""

    documents: ClassVar[dict[str, str]]
    token = ""

    def do_PUT(self) -> None:
        self._answer(self.token if self.path == "/latest/api/token" else "")

    def do_GET(self) -> None:
        aws = self.path.startswith("/latest/")
        allowed = (
            self.headers.get("X-aws-ec2-metadata-token") == self.token
            if aws
            else not self.token
        )
        allowed = allowed and (aws or self.headers.get("Metadata-Flavor") == "Google")
        self._answer(self.documents.get(self.path, "") if allowed else "")

    def _answer(self, text: str) -> None:
        self.send_response(200 if text else 404)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[type[Metadata]]:
    class Own(Metadata):
        documents: ClassVar[dict[str, str]] = {}

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Own) as listening:
        Own.address = f"http://127.0.0.1:{listening.server_port}"  # type: ignore[attr-defined]
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield Own
        listening.shutdown()


def start(folder: Path, server: type[Metadata]) -> subprocess.Popen[str]:
    """`notice.py watch` of a machine whose `ray` writes down what it is told."""
    ray = folder / "ray"
    ray.write_text(
        f"#!{sys.executable}\nimport shlex, sys\nopen('{folder}/told', 'a').write(shlex.join(sys.argv[1:]))\n"
    )
    ray.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "TMPDIR": str(folder),
    }
    environment["RAYPIPE_METADATA_SERVER"] = server.address  # type: ignore[attr-defined]
    return subprocess.Popen(
        [sys.executable, NOTICE, "watch"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_notice_of_aws_drains_the_node_with_the_time_that_is_left(
    tmp_path: Path, server: type[Metadata]
) -> None:
    server.token = "of-imdsv2"
    at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=120)
    notice = f'{{"action": "terminate", "time": "{at:%Y-%m-%dT%H:%M:%SZ}"}}'
    server.documents["/latest/meta-data/spot/instance-action"] = notice
    with start(tmp_path, server) as watching:
        said, _ = watching.communicate()
    assert watching.returncode == 0 and "drained" in said, said
    command, *options = shlex.split((tmp_path / "told").read_text())
    # Ray itself reads them
    given = ray_cli.commands[command].make_context(command, options).params
    assert (
        given["reason"] == "DRAIN_NODE_REASON_PREEMPTION" and given["node_id"] is None
    )
    assert 0 < given["deadline_remaining_seconds"] <= 120


def test_a_notice_of_google_drains_the_node(
    tmp_path: Path, server: type[Metadata]
) -> None:
    server.documents["/computeMetadata/v1/instance/preempted"] = "TRUE"
    with start(tmp_path, server) as watching:
        watching.communicate()
    assert (tmp_path / "told").read_text().endswith("--deadline-remaining-seconds 25")


def test_a_machine_without_a_notice_is_watched_and_not_drained(
    tmp_path: Path, server: type[Metadata]
) -> None:
    server.documents["/computeMetadata/v1/instance/preempted"] = "FALSE"
    with start(tmp_path, server) as watching:
        while not (tmp_path / "raypipe-notice.lock").exists():
            assert watching.poll() is None
            time.sleep(0.01)
        # Whichever took the lock goes on; the other ends at once.
        with start(tmp_path, server) as second:
            assert wait_for_one(watching, second) == 1
            for process in (watching, second):
                process.terminate()
    assert not (tmp_path / "told").exists()


def wait_for_one(*processes: subprocess.Popen[str]) -> int:
    """How many of two processes have ended, once one has."""
    while not (
        ended := [process for process in processes if process.poll() is not None]
    ):
        time.sleep(0.01)
    assert all(process.returncode == 0 for process in ended)
    return len(ended)
