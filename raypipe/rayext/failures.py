"""Finds the error beneath Ray's wrappers that ended a task or a run, and whether another attempt could help.

An error that would come again is final: what raypipe raises on purpose, a full disk, a mistake in the user's code.
What died is tried again: a process, a node, an actor or an object that was lost with them, a connection, a device,
storage that was waited for in vain, and the collectives of the ranks that waited for one of these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from raypipe.errors import OutageError, RaypipeError, ResourceError

# What Ray Data adds to an error of a transform actor: it would try again if it were told to.
_ADDED = re.compile(r"\nFailed to .* attempts \(total backoff .*", re.DOTALL)

_MAX_TOLD = 400  # characters: some of torch's errors have a page, of Ray's their traceback

# Errors of Ray Train for a worker that is gone, which no rank raises itself.
_LOST = ("WorkerHealthCheckFailedError", "WorkerHealthCheckTimeoutError")
# A rank whose peer has died gets a bare RuntimeError from Gloo, which names its source file, or from a socket.
_OF_PEERS = ("gloo/", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


def _wrapped(error: BaseException) -> list[BaseException]:
    """What a wrapper of Ray's holds: the error of a task, of Ray Train's workers, or of its controller."""
    causes = (getattr(error, name, None) for name in ("cause", "controller_failure", "health_check_failure"))
    workers = getattr(error, "worker_failures", {}).values()
    return [cause for cause in (*causes, *workers) if isinstance(cause, BaseException)]


def _beneath(error: BaseException) -> Iterator[BaseException]:
    """An error, then what it wraps, comes from, or was raised at; each once."""
    pending, visited = [error], set[int]()
    for failure in pending:
        if id(failure) not in visited:
            visited.add(id(failure))
            yield failure
            pending += [*_wrapped(failure), *filter(None, (failure.__cause__, failure.__context__))]


def cause_of(error: BaseException) -> BaseException:
    """raypipe's own error beneath whatever Ray has wrapped around it and added to it, or the error as it is."""
    for failure in _beneath(error):
        # A task's error has Ray's class and its cause's class at once.
        if isinstance(failure, RaypipeError) and not _wrapped(failure):
            failure.args = tuple(_ADDED.sub("", arg) if isinstance(arg, str) else arg for arg in failure.args)
            return failure
    return error


def explanation(error: BaseException) -> str:
    """What has ended a run, in a line or two: the error beneath Ray's wrappers that explains the others. Pure."""
    from ray.exceptions import RayError

    causes = [cause for cause in _beneath(error) if not _wrapped(cause)] or [error]
    own = [cause for cause in causes if not _is_of_train(cause)]
    dead = [cause for cause in own if isinstance(cause, RayError)]  # the others have failed because of these
    cause = [*(cause for cause in own if not _is_death(cause)), *dead, *own, *causes][0]
    text = " ".join(_ADDED.sub("", str(cause)).split())
    return f"{type(cause).__name__}: {text if len(text) <= _MAX_TOLD else text[:_MAX_TOLD] + ' …'}"


def get(refs: Any) -> Any:
    """ray.get, with a task's own error instead of Ray's wrapper around it.

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
            f"a process of this command died ({type(error).__name__}), maybe of too little memory: "
            "try again, or with fewer CPUs for Ray"
        ) from error


def is_final(failures: Iterable[BaseException]) -> bool:
    """Whether what has failed at one time, in one or several ranks, would fail again. Pure.

    Ranks fail because of each other. A process that was lost explains whatever the others say; if there is none, a
    final error of one explains the broken connections of the others.
    """
    failures = list(failures)
    return own_error(failures) is not None or not (_has_lost(failures) or all(map(_is_death, failures)))


def own_error(failures: Iterable[BaseException]) -> RaypipeError | None:
    """raypipe's own error among those of `is_final`, which would come again; None = something else has failed."""
    failures = list(failures)
    own = [cause for cause in map(cause_of, failures) if isinstance(cause, RaypipeError)]
    final = (cause for cause in own if not isinstance(cause, OutageError))
    return None if _has_lost(failures) else next(final, None)


def _has_lost(failures: list[BaseException]) -> bool:
    return any(map(is_lost, failures))


def is_lost(error: BaseException) -> bool:
    """Whether a worker's process has died, by Ray Train's error for it."""
    return _is_of_train(error) and type(error).__name__ in _LOST


def _is_of_train(error: BaseException) -> bool:
    """Whether Ray Train has raised it."""
    return type(error).__module__.startswith("ray.train.")


def _is_death(error: BaseException) -> bool:
    import torch
    from ray.exceptions import OutOfDiskError, RayError, RayTaskError

    if isinstance(cause_of(error), OutageError):
        return True
    if isinstance(error, RayTaskError):
        return all(map(_is_death, _wrapped(error)))
    if isinstance(error, OSError):
        # Those of object storage have no number. Those of a disk have one, and come again.
        return isinstance(error, ConnectionError | TimeoutError) or error.errno is None
    if isinstance(error, RayError | torch.distributed.DistError | torch.AcceleratorError) or _is_of_train(error):
        return not isinstance(error, OutOfDiskError)
    if type(error) is RuntimeError and any(word in str(error) for word in _OF_PEERS):
        return True
    return error.__cause__ is not None and _is_death(error.__cause__)
