from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest
import ray
import torch
from ray.exceptions import (
    ActorDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.train.v2._internal.exceptions import (
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from raypipe.errors import (
    ConfigError,
    CursorError,
    OutageError,
    ResourceError,
    SampleError,
)
from raypipe.rayext.failures import cause_of, deaths, explanation, is_final

LOST = WorkerHealthCheckFailedError("rank 1 is gone", ActorDiedError())
# As Gloo words it, in a rank whose peer was killed.
GLOO = RuntimeError(
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:33093"
)
NCCL = torch.distributed.DistBackendError(
    "NCCL error: remote process exited or there was a network error"
)


def disk_full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def of_a_task(cause: Exception) -> RayTaskError:
    """As `ray.get` raises what a task or an actor has raised."""
    return RayTaskError("transform", "Traceback …", cause)


def test_what_ray_data_adds_to_an_error_of_ours_is_taken_away() -> None:
    added = "\nFailed to apply UDF transform after 1/1 attempts (total backoff 0.0s).\nTo change retry attempts, …"
    assert (
        str(cause_of(of_a_task(SampleError(f"sample 3: it is cut off{added}"))))
        == "sample 3: it is cut off"
    )


def test_the_largest_process_is_named_where_memory_was_short() -> None:
    killed = OutOfMemoryError(
        "Memory on the node was 12.3GB used / 13GB limit. "
        + "Ray killed this. " * 40
        + "Top 10 memory users: PID\tMEM(GB)\tCOMMAND\n410\t8.47\tray::MapWorker(x)\n411\t0.2\tray::IDLE"
    )
    assert explanation(killed).endswith(
        "… The largest process was ray::MapWorker(x) (pid 410, 8.47 GB)"
    )


@pytest.mark.parametrize(
    "error",
    [
        RayActorError(),
        ActorDiedError(),
        NodeDiedError("its node"),
        WorkerCrashedError(),
        OutOfMemoryError("its node has no memory left"),
    ],
    ids=repr,
)
def test_a_dead_process_is_known_by_each_of_rays_errors(error: Exception) -> None:
    assert isinstance(error, deaths()) and not is_final([error])


@pytest.mark.parametrize(
    ("failures", "said"),
    [
        (
            {0: GLOO, 1: ValueError("in the user's\n  code")},
            "ValueError: in the user's code",
        ),
        ({0: GLOO}, "RuntimeError: [/pytorch"),
        ({0: GLOO, 1: LOST}, "ActorDiedError: The actor died"),
        ({1: LOST}, "ActorDiedError: The actor died"),
        ({0: of_a_task(KeyError("label"))}, "KeyError: 'label'"),
        ({0: ValueError("long " * 1000)}, "ValueError: long long"),
    ],
)
def test_a_line_tells_the_error_that_explains_a_runs_end(
    failures: dict[int, Exception], said: str
) -> None:
    found = explanation(
        WorkerGroupError("Traceback (most recent call last): …", failures)
    )
    assert found.startswith(said) and "\n" not in found and len(found) < 450


@pytest.mark.parametrize(
    "error",
    [
        ResourceError("the stream has stalled"),
        SampleError("sample 3"),
        of_a_task(ConfigError("the transform made (3, 4), and (3, 5) before")),
        disk_full(),
        of_a_task(disk_full()),
        OutOfDiskError("the object store's"),
        FileNotFoundError(errno.ENOENT, "no such file"),
        ValueError("in the user's code"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError(
            "PytorchStreamWriter failed writing file data/0: file write failed"
        ),
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
    ],
    ids=repr,
)
def test_what_would_come_again_is_final(error: Exception) -> None:
    assert is_final([error])
    assert is_final([GLOO, error, NCCL])  # whose peers it left alone


@pytest.mark.parametrize(
    "error",
    [
        LOST,
        WorkerHealthCheckTimeoutError("it hangs"),
        GLOO,
        NCCL,
        torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
        ActorDiedError(),
        NodeDiedError("its node"),
        ObjectLostError("00", None, ""),
        of_a_task(ActorDiedError()),
        ConnectionResetError(errno.ECONNRESET, "reset"),
        TimeoutError("of a request"),
        OSError("AWS Error NETWORK_CONNECTION during PutObject operation"),
        OutageError("s3://b/k was unavailable"),
        of_a_task(OutageError("s3://b/k was unavailable")),
    ],
    ids=repr,
)
def test_what_died_is_tried_again(error: Exception) -> None:
    assert not is_final([error])
    assert not is_final([error, GLOO])


def test_a_rank_that_was_lost_explains_whatever_the_others_say() -> None:
    assert not is_final([ValueError("a sum of nothing"), LOST])


def test_a_death_that_another_error_is_raised_from_is_one() -> None:
    error = RuntimeError("the coordinator does not answer")
    error.__cause__ = ActorDiedError()
    assert not is_final([error])


def wrapped_in_workers(error: Exception) -> Exception:
    return WorkerGroupError("workers failed", {0: ValueError("other"), 1: error})


def raised_while_handled(error: Exception) -> Exception:
    try:
        try:
            raise error
        except Exception:
            raise RuntimeError("task failed")  # noqa: B904  this is what it tests
    except RuntimeError as other:
        return other


@pytest.mark.parametrize(
    "wrapper",
    [
        of_a_task,
        wrapped_in_workers,
        ControllerError,
        raised_while_handled,
        lambda error: error,
    ],
)
def test_the_cause_is_raypipes_own_error_beneath_any_wrapper(
    wrapper: Callable[[Exception], Exception],
) -> None:
    own = CursorError("another plan")
    assert cause_of(wrapper(own)) is own
    assert cause_of(wrapped_in_workers(wrapper(own))) is own
    other = wrapper(ValueError("not ours"))
    assert cause_of(other) is other


@pytest.mark.cluster
def test_what_a_real_task_raises_is_told_apart(ray_cluster: None) -> None:
    @ray.remote(max_retries=0)
    def fails(how: str) -> None:
        if how == "dies":
            os._exit(1)
        raise (
            ConfigError("a wrong size")
            if how == "config"
            else OSError(errno.ENOSPC, "No space left on device")
        )

    errors = []
    for how in ("config", "disk", "dies"):
        with pytest.raises(Exception) as caught:
            ray.get(fails.remote(how))
        errors.append(caught.value)
    assert [is_final([error]) for error in errors] == [True, True, False]
    assert (
        isinstance(cause_of(errors[0]), ConfigError)
        and str(cause_of(errors[0])) == "a wrong size"
    )
