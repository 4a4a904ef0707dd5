"""Starts one of Ray's agents later; until then this script holds its ports, for 0.01 CPU seconds.

    python later.py PYTHON … agent.py --session-dir=… --node-id=… --…-port=0 …

A raylet waits until its agents have written their ports to files, and an agent imports for half a second or more.
This script writes these files, waits, and becomes the agent, in the same process:

    agent of runtime environments     waits for a connection: the raylet asks it for the environment of a worker
                                      that has one, and asks again until it answers
    agent of the dashboard            waits for `_DELAY_S`: all processes try for longer to send it their metrics

Ray starts the script, so it imports nothing but the standard library.
"""

import os
import random
import select
import socket
import sys
import time
from pathlib import Path

_DELAY_S = 8.0
# The raylet's end is noticed within this time.
_LOOK_S = 1.0
# Option of an agent → name of its port, which is also the name of the raylet's file.
_ON_DEMAND = {"--runtime-env-agent-port": "runtime_env_agent_port"}
_DELAYED = {
    "--grpc-port": "metrics_agent_port",
    "--metrics-export-port": "metrics_export_port",
    "--listen-port": "dashboard_agent_listen_port",
}
_LEAST_PORT = 10_000
_TRIES = 100


def _options(command: list[str]) -> dict[str, str]:
    return dict(
        argument.split("=", 1)
        for argument in command
        if argument.startswith("--") and "=" in argument
    )


def _first_ephemeral_port() -> int:
    try:
        ports = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
        return int(ports.split()[0])
    except (OSError, ValueError):
        return 0


def _held_port() -> socket.socket:
    """Bind a socket to a free port, which Linux gives to nobody who asks for any."""
    limit = _first_ephemeral_port()
    for _ in range(_TRIES if limit > _LEAST_PORT + _TRIES else 0):
        held = (
            socket.socket()
        )  # without SO_REUSEADDR, which would let others bind it too
        try:
            held.bind(("", random.randrange(_LEAST_PORT, limit)))
        except OSError:
            held.close()
            continue
        return held
    held = socket.socket()
    held.bind(("", 0))
    return held


def _write_port(folder: str, node: str, name: str, port: int) -> None:
    """Write a port where the raylet looks for it."""
    path = Path(folder, f"{name}_{node}")
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(str(port))
    partial.replace(path)


def _wait(held: dict[str, socket.socket], on_demand: bool) -> None:
    """Wait for a connection or for a time; exit if the raylet ends."""
    raylet = os.getppid()
    until = time.monotonic() + _DELAY_S
    if on_demand:
        for listener in held.values():
            listener.listen()
    while on_demand or time.monotonic() < until:
        if os.getppid() != raylet:
            sys.exit()
        listeners = list(held.values()) if on_demand else []
        if select.select(listeners, [], [], _LOOK_S)[0]:
            return


def start_later(command: list[str]) -> None:
    """Hold an agent's ports, wait, and become the agent."""
    options = _options(command)
    on_demand = "--runtime-env-agent-port" in options
    names = _ON_DEMAND if on_demand else _DELAYED
    held: dict[str, socket.socket] = {}
    # Without the dashboard's packages, the agent has no ports.
    if "--minimal" not in command:
        held = {option: _held_port() for option in names if options[option] == "0"}
    for option, name in names.items():
        port = held[option].getsockname()[1] if option in held else -1
        if options[option] == "0":
            _write_port(options["--session-dir"], options["--node-id"], name, port)
    ports = {f"{option}=0": option for option in held}
    changed = [
        f"{ports[argument]}={held[ports[argument]].getsockname()[1]}"
        if argument in ports
        else argument
        for argument in command
    ]
    _wait(held, on_demand)
    for socket_of_port in held.values():
        socket_of_port.close()
    os.execv(changed[0], changed)


if __name__ == "__main__":
    start_later(sys.argv[1:])
