"""Causes of a failed task or run, beneath Ray's wrappers, and whether a retry can help.

An error that would come again is final: raypipe's own errors, a full disk, a mistake in the user's code. A death
is retried: a process, a node, an actor or an object that was lost with them, a connection, a device, unavailable
storage, and the collectives of ranks that waited for one of these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from raypipe.errors import OutageError, RaypipeError, ResourceError

# Ray Data's note about retries at the end of a transform actor's error.
_ADDED = re.compile(r"\nFailed to .* attempts \(total backoff .*", re.DOTALL)

# The largest process of a node that ran out of memory, in the error of Ray's memory monitor.
_LARGEST = re.compile(r"MEM\(GB\)\s+COMMAND\s+(\d+)\s+(\S+)\s+(\S.*)")

# some errors of torch have a page, and those of Ray contain their traceback
_MAX_CHARS = 400

# Ray Train's errors for a lost worker, which no rank raises itself.
_LOST = ("WorkerHealthCheckFailedError", "WorkerHealthCheckTimeoutError")
# A rank whose peer has died gets a plain RuntimeError from Gloo, which names its source file, or from a socket.
_OF_PEERS = (
    "gloo/",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
)


def _wrapped(error: BaseException) -> list[BaseException]:
    """Return the errors that Ray has wrapped: a task's error, or those of Ray Train's workers or controller."""
    causes = (
        getattr(error, name, None)
        for name in ("cause", "controller_failure", "health_check_failure")
    )
    workers = getattr(error, "worker_failures", {}).values()
    return [cause for cause in (*causes, *workers) if isinstance(cause, BaseException)]


def _beneath(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then the errors that it wraps, and their causes and contexts, each once."""
    pending = [error]
    visited = set[int]()
    for failure in pending:
        if id(failure) not in visited:
            visited.add(id(failure))
            yield failure
            pending += [
                *_wrapped(failure),
                *filter(None, (failure.__cause__, failure.__context__)),
            ]


def cause_of(error: BaseException) -> BaseException:
    """Return raypipe's own error without Ray's wrappers and additions, or the error itself."""
    for failure in _beneath(error):
        # A task's error is an instance of Ray's class and of its cause's class.
        if isinstance(failure, RaypipeError) and not _wrapped(failure):
            failure.args = tuple(
                _ADDED.sub("", arg) if isinstance(arg, str) else arg
                for arg in failure.args
            )
            return failure
    return error


def explanation(error: BaseException) -> str:
    """Return the cause of a run's end in a line or two: the wrapped error that explains the others. Pure."""
    from ray.exceptions import RayError

    causes = [cause for cause in _beneath(error) if not _wrapped(cause)] or [error]
    in_ranks = [cause for cause in causes if not _is_of_train(cause)]
    mistakes = [cause for cause in in_ranks if not _is_death(cause)]
    # these caused the other failures
    dead = [cause for cause in in_ranks if isinstance(cause, RayError)]
    cause = [*mistakes, *dead, *in_ranks, *causes][0]
    text = " ".join(_ADDED.sub("", str(cause)).split())
    if len(text) > _MAX_CHARS:
        text = f"{text[:_MAX_CHARS]} …"
    if largest := _LARGEST.search(str(cause)):
        text += f" The largest process was {largest[3].strip()} (pid {largest[1]}, {largest[2]} GB)"
    return f"{type(cause).__name__}: {text}"


def deaths(*others: type[BaseException]) -> tuple[type[BaseException], ...]:
    """Return Ray's errors for a process that died, by itself, with its node, or for lack of memory, and others."""
    from ray import exceptions

    return (
        *others,
        exceptions.RayActorError,
        exceptions.WorkerCrashedError,
        exceptions.NodeDiedError,
        exceptions.OutOfMemoryError,
    )


def get(refs: Any) -> Any:
    """Call ray.get, and raise a task's own error instead of Ray's wrapper.

    Raises:
        ResourceError: the task's process died.
    """
    import ray

    try:
        return ray.get(refs)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise ResourceError(
            f"a process of this command died ({type(error).__name__}), possibly for lack of memory: "
            "try again, or use fewer CPUs for Ray"
        ) from error


def is_final(failures: Iterable[BaseException]) -> bool:
    """Return whether simultaneous failures, of one or several ranks, would come again after a retry. Pure.

    Ranks fail because of each other. A lost process explains all other errors; without one, a final error of one
    rank explains the broken connections of the others.
    """
    failures = list(failures)
    return own_error(failures) is not None or not (
        _has_lost(failures) or all(map(_is_death, failures))
    )


def own_error(failures: Iterable[BaseException]) -> RaypipeError | None:
    """Return raypipe's own final error among simultaneous failures, see `is_final`; None without one."""
    failures = list(failures)
    if _has_lost(failures):
        return None
    for cause in map(cause_of, failures):
        if isinstance(cause, RaypipeError) and not isinstance(cause, OutageError):
            return cause
    return None


def _has_lost(failures: list[BaseException]) -> bool:
    return any(map(is_lost, failures))


def is_lost(error: BaseException) -> bool:
    """Return whether the error is Ray Train's for a worker whose process has died."""
    return _is_of_train(error) and type(error).__name__ in _LOST


def is_lost_process(error: BaseException) -> bool:
    """Return whether Ray says that an actor has died that was called, or the process that had an object."""
    from ray.exceptions import ObjectLostError, RayTaskError

    # a task may have met such an error itself
    is_of_task = isinstance(error, RayTaskError)
    return isinstance(error, deaths(ObjectLostError)) and not is_of_task


def _is_of_train(error: BaseException) -> bool:
    """Return whether Ray Train raised the error."""
    return type(error).__module__.startswith("ray.train.")


def _is_death(error: BaseException) -> bool:
    import torch
    from ray.exceptions import OutOfDiskError, RayError, RayTaskError

    if isinstance(cause_of(error), OutageError):
        return True
    if isinstance(error, RayTaskError):
        return all(map(_is_death, _wrapped(error)))
    if isinstance(error, OSError):
        # Errors of object storage have no errno. Those of a disk have one, and would come again.
        return isinstance(error, ConnectionError | TimeoutError) or error.errno is None
    if isinstance(
        error, RayError | torch.distributed.DistError | torch.AcceleratorError
    ) or _is_of_train(error):
        return not isinstance(error, OutOfDiskError)
    if type(error) is RuntimeError and any(word in str(error) for word in _OF_PEERS):
        return True
    return error.__cause__ is not None and _is_death(error.__cause__)
