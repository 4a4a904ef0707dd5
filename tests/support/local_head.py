"""A cluster's head on this machine, as `ray start --head` makes it, with a job server; apart from all others."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RAY_ON_THIS_MACHINE = {
    # Ray's workers are nice, and pytest is not: on two cores they would starve beside it.
    "RAY_worker_niceness": "0",
    # Under `uv run pytest` Ray would start each worker by `uv run`, which takes seconds of both cores.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # At its start Ray would start a worker for each core, and wait for them. Many actors of a run cannot use them:
    # these have an environment of their own.
    "RAY_prestart_worker_first_driver": "0",
    # It ends workers that are idle for a second, and each new one takes 2 s of a core for its imports.
    "RAY_num_workers_soft_limit": "12",
    # Else Ray Data has an actor for them, and others are told.
    "RAY_USAGE_STATS_ENABLED": "0",
    # A trainer's report waits until Ray Train's controller has asked for it, which it does every 2 s.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
}
"""For clusters of tests, and what connects to them."""

# `ray` lies beside the Python that runs the tests.
RAY = str(Path(sys.executable).parent / "ray")

# What Ray's provider of nodes on one machine takes the head's id for (fake_multi_node/node_provider.py).
HEAD_NODE_ID = "f" * 51 + "00000"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


# said of one that has just started
_NOT_READY = (
    "No available agent",
    "RemoteDisconnected",
    "Connection refused",
)


class LocalHead:
    """A context: the head runs within it. Clients need a token, as on any cluster that others can reach."""

    def __init__(
        self,
        num_cpus: int,
        environment: Mapping[str, str] | None = None,
        *,
        node_types: dict[str, dict[str, Any]] | None = None,
        idle_timeout_s: float = 10.0,
    ) -> None:
        """
        Args:
            num_cpus: of the head.
            environment: of the head, and of what runs on it.
            node_types: as in a cluster.yaml; Ray's autoscaler then adds nodes of these types, as further
                processes on this machine, and takes them away.
            idle_timeout_s: after which it does.
        """
        # short: sockets are made below it
        self._folder = tempfile.mkdtemp(prefix="head-", dir="/tmp")
        self.address = f"http://127.0.0.1:{free_port()}"
        ours = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RAY_", "RAYPIPE_"))
        }
        self.environment = {
            **ours,
            "RAY_TMPDIR": self._folder,
            **RAY_ON_THIS_MACHINE,
            "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # no cloud takes this machine away
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            **(environment or {}),
        }
        self._gcs_port = free_port()
        self.gcs_address = f"127.0.0.1:{self._gcs_port}"
        self._options = [
            f"--num-cpus={num_cpus}",
            f"--port={self._gcs_port}",
            "--object-store-memory=300000000",
        ]
        # with the usual one there is one head a machine
        self._options += [f"--ray-client-server-port={free_port()}"]
        if node_types is not None:
            self._scale(node_types, num_cpus, idle_timeout_s)

    def _scale(
        self,
        node_types: dict[str, dict[str, Any]],
        num_cpus: int,
        idle_timeout_s: float,
    ) -> None:
        head = {"resources": {"CPU": num_cpus}, "node_config": {}, "max_workers": 0}
        config = {
            "cluster_name": "local",
            "max_workers": sum(
                node_type["max_workers"] for node_type in node_types.values()
            ),
            "upscaling_speed": 10.0,
            "idle_timeout_minutes": idle_timeout_s / 60,
            "provider": {
                # Named by its module: Ray's wheel lacks the defaults that its own name for it asks for.
                "type": "external",
                "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
                "gcs_address": self.gcs_address,
                "launch_multiple": True,
                "disable_node_updaters": True,
                "head_node_id": HEAD_NODE_ID,
            },
            "available_node_types": {**node_types, "ray.head.default": head},
            "head_node_type": "ray.head.default",
            "docker": {},
            "auth": {},
            "file_mounts": {},
            "cluster_synced_files": [],
            **{
                f"{kind}_commands": []
                for kind in ("initialization", "setup", "head_setup", "worker_setup")
            },
            **{f"{kind}_start_ray_commands": [] for kind in ("head", "worker")},
        }
        path = Path(self._folder, "autoscaling.json")
        path.write_text(json.dumps(config))
        self._options += [f"--autoscaling-config={path}"]
        self.environment |= {
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAYPIPE_AUTOSCALING_CONFIG": str(path),
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": HEAD_NODE_ID,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_NODE_ID,
        }

    def __enter__(self) -> LocalHead:
        command = [RAY, "start", "--head", "--block", *self._options]
        command += [f"--dashboard-port={self.address.rpartition(':')[2]}"]
        # Its default is that of any other cluster of this machine, and without it the agent takes no jobs.
        command += [f"--dashboard-agent-listen-port={free_port()}"]
        with Path(self._folder, "head.log").open("w") as log:
            self._process = subprocess.Popen(
                command,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.environment["RAY_API_SERVER_ADDRESS"] = self.address
        deadline = time.monotonic() + 300
        while not self._is_ready():
            if time.monotonic() > deadline or self._process.poll() is not None:
                log_text = Path(self._folder, "head.log").read_text()
                self.__exit__()
                raise RuntimeError(f"the head did not start: {log_text[-2000:]}")
            time.sleep(0.5)
        return self

    def _is_ready(self) -> bool:
        """Whether it takes jobs."""
        try:
            self.jobs()
        except OSError:
            return False
        return True

    def jobs(self) -> Any:
        """What the job server tells of all jobs; a `ray` process for each look takes seconds of CPU.

        Raises:
            OSError: it cannot be reached, or says no.
        """
        token = {"Authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"}
        request = urllib.request.Request(f"{self.address}/api/jobs/", headers=token)
        for attempt in range(3):
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return json.load(answer)
            except ConnectionResetError:  # as `run` meets it
                if attempt == 2:
                    raise

    def __exit__(self, *error: object) -> None:
        for signum, patience_s in ((signal.SIGTERM, 8), (signal.SIGKILL, 5)):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signum)
                try:
                    self._process.wait(timeout=patience_s)
                except subprocess.TimeoutExpired:
                    continue
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(
        self, *arguments: str, check: bool = True, timeout_s: float = 300.0
    ) -> subprocess.CompletedProcess[str]:
        """What `ray ARGUMENTS` prints, asked of this cluster."""
        deadline, cut_off = time.monotonic() + timeout_s, False
        while True:
            done = subprocess.run(
                [RAY, *arguments],
                env=self.environment,
                capture_output=True,
                text=True,
                check=False,
            )
            said = done.stderr + done.stdout
            if cut_off and "already exists" in said:  # the answer was lost, not the job
                return done
            is_over = time.monotonic() > deadline or self._process.poll() is not None
            if is_over or not any(word in said for word in _NOT_READY):
                break
            cut_off |= "RemoteDisconnected" in said
            time.sleep(1)
        assert done.returncode == 0 or not check, (
            done.stdout[-3000:] + done.stderr[-3000:]
        )
        return done
