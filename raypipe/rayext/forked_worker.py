"""Starts one of Ray's workers as a fork of the process that has imported its modules, see `fork_server`.

    python -I -S forked_worker.py ADDRESS setup_worker.py default_worker.py --language=PYTHON --…

The raylet starts this script instead of Ray's own command, which follows ADDRESS, and the script ends once the
worker runs. A worker with a runtime environment, and one that nobody forks, starts by Ray's command.

It imports nothing but the standard library.
"""

import os
import socket
import sys

_ENVIRONMENT = "--serialized-runtime-env-context="
_PYTHON = "--language=PYTHON"
# Arguments for `setup_worker.py` of a worker that has the environment of the raylet.
_PLAIN = (_PYTHON, _ENVIRONMENT, f"{_ENVIRONMENT}{{}}")
_FOR_SETUP = ("--language", "--serialized-runtime-env-context")
# A raylet gives up a worker after a minute, which may have to import all by itself on a busy machine.
_ANSWER_S = 15.0


def worker_arguments(arguments: list[str]) -> list[str] | None:
    """Return a worker's arguments without those for Ray's `setup_worker.py`; None = it needs the script. Pure."""
    for_setup = [argument for argument in arguments if argument.startswith(_FOR_SETUP)]
    is_plain = _PYTHON in for_setup and set(for_setup) <= set(_PLAIN)
    if not is_plain or not arguments[0].endswith(".py"):
        return None
    return [argument for argument in arguments if argument not in for_setup]


def _encoded(*lists: list[str]) -> bytes:
    """Return lists of words as bytes: the length of each, and its words, which end with a zero byte."""
    words = [word for each in lists for word in (str(len(each)), *each)]
    return b"".join(os.fsencode(word) + b"\0" for word in words)


def _user_of(connection: socket.socket) -> int:
    """Return the user at the other end: the second of the three integers that Linux gives."""
    identity = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(identity[4:8], sys.byteorder)


def is_forked(address: str, arguments: list[str]) -> bool:
    """Ask the fork server at an abstract address for a worker; return whether it runs."""
    variables = [f"{name}={value}" for name, value in os.environ.items()]
    request = _encoded(arguments, variables, [os.getcwd()])  # noqa: PTH109  without an import
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.settimeout(_ANSWER_S)
            server.connect(f"\0{address}")
            # Once the server has ended, any user may listen there.
            if _user_of(server) != os.getuid():
                return False
            outputs = [1, 2]
            socket.send_fds(server, [len(request).to_bytes(8, "big")], outputs)
            server.sendall(request)
            return server.recv(1) == b"1"
    except OSError:
        return False


def main() -> None:
    """Start the worker that the command line names."""
    address, *command = sys.argv[1:]
    arguments = worker_arguments(command[1:])
    if arguments is None or not is_forked(address, arguments):
        os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    main()
