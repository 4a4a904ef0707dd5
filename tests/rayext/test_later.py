"""An agent of Ray's that starts later has the ports that were told before."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from patience import until

from raypipe.rayext import later

# What an agent would be: it prints its arguments.
_ECHO = [sys.executable, "-c", "import sys; print(*sys.argv[1:])"]


def _start(folder: Path, *options: str, delay_s: float = 30.0) -> subprocess.Popen[str]:
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('later', {later.__file__!r})\n"
        "later = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(later)\n"
        f"later._DELAY_S = {delay_s}\n"
        "later.start_later(sys.argv[1:])"
    )
    places = [f"--session-dir={folder}", "--node-id=n"]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code, *_ECHO, *places, *options],
        stdout=subprocess.PIPE,
        text=True,
    )


def _told(folder: Path, name: str) -> int:
    path = folder / f"{name}_n"
    until(lambda: path.exists() and path.read_text())
    return int(path.read_text())


def test_agent_of_environments_starts_when_it_is_asked(tmp_path: Path) -> None:
    agent = _start(tmp_path, "--runtime-env-agent-port=0")
    port = _told(tmp_path, "runtime_env_agent_port")
    assert agent.poll() is None
    socket.create_connection(("127.0.0.1", port)).close()
    printed, _ = agent.communicate()
    assert printed.split()[-1] == f"--runtime-env-agent-port={port}"
    with socket.socket() as free:  # as the agent's server does
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("", port))


def test_agent_of_metrics_gets_the_ports_that_were_told(tmp_path: Path) -> None:
    options = ("--metrics-export-port=0", "--grpc-port=0", "--listen-port=8")
    agent = _start(tmp_path, *options, delay_s=0.2)
    printed, _ = agent.communicate()
    assert printed.split()[-3:] == [
        f"--metrics-export-port={_told(tmp_path, 'metrics_export_port')}",
        f"--grpc-port={_told(tmp_path, 'metrics_agent_port')}",
        "--listen-port=8",
    ]
    assert not (tmp_path / "dashboard_agent_listen_port_n").exists()


def test_agent_without_dashboard_tells_that_it_has_no_ports(tmp_path: Path) -> None:
    options = ("--metrics-export-port=0", "--grpc-port=0", "--listen-port=0")
    agent = _start(tmp_path, *options, "--minimal", delay_s=0.0)
    printed, _ = agent.communicate()
    assert printed.split()[-4:] == [*options, "--minimal"]
    for name in (
        "metrics_export_port",
        "metrics_agent_port",
        "dashboard_agent_listen_port",
    ):
        assert _told(tmp_path, name) == -1
