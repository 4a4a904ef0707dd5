"""Starts one of Ray's workers without Ray's own script for that, which imports Ray once more, for 0.3 CPU seconds.

    python worker_start.py setup_worker.py default_worker.py --language=PYTHON --…

Ray's `setup_worker.py` sets up the worker's runtime environment, and then becomes `default_worker.py`. This script
becomes that at once, or `setup_worker.py` where the worker has such an environment.

The raylet starts the script, so it imports nothing but the standard library.
"""

import os
import sys

_ENVIRONMENT = "--serialized-runtime-env-context"
_LANGUAGE = "--language"
_NONE = (f"{_ENVIRONMENT}=", f"{_ENVIRONMENT}={{}}")


def worker_command(python: str, setup: str, arguments: list[str]) -> list[str]:
    """Return the command of a worker, from the arguments of Ray's script `setup`. Pure."""
    of_setup = [
        argument
        for argument in arguments
        if argument.startswith((_ENVIRONMENT, _LANGUAGE))
    ]
    if all(argument in (*_NONE, f"{_LANGUAGE}=PYTHON") for argument in of_setup):
        return [python, *(word for word in arguments if word not in of_setup)]
    return [python, setup, *arguments]


if __name__ == "__main__":
    command = worker_command(sys.executable, sys.argv[1], sys.argv[2:])
    os.execv(command[0], command)
