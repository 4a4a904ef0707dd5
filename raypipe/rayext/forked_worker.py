"""Starts one of Ray's workers as a fork of the process that has imported its modules, see `fork_server`.

    python forked_worker.py default_worker.py --language=PYTHON --…

The raylet starts this script instead of Ray's `setup_worker.py`, and the script ends once the worker runs. The
fork server reads from /proc what this process is. A worker that nobody forks, such as one with another runtime
environment, starts by Ray's script.

It imports nothing but the standard library.
"""

import os
import socket
import sys

ADDRESS = "RAYPIPE_FORK_SERVER"
"""Variable with the address of the fork server."""

# A raylet gives up a worker after a minute, which may have to import all by itself on a busy machine.
_ANSWER_S = 15.0


def is_forked(address: str) -> bool:
    """Ask the fork server at an address for a fork that takes over from this process; return whether it does."""
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.settimeout(_ANSWER_S)
            server.connect(address)
            server.sendall(f"{os.getpid()} {os.getppid()}".encode())
            return server.recv(1) == b"1"
    except OSError:
        return False


def main() -> None:
    """Start the worker that the command line names."""
    if is_forked(os.environ.get(ADDRESS, "")):
        return
    arguments = sys.argv[1:]
    (script,) = [word for word in arguments if word.endswith("default_worker.py")]
    setup = script.replace("default_worker.py", "setup_worker.py")
    os.execv(sys.executable, [sys.executable, setup, *arguments])


if __name__ == "__main__":
    main()
