"""Watch over Ray Train's controller and the cluster's head, from the driver.

The controller watches the trainers, and nobody watches the controller. A stopped one (SIGSTOP) is killed by the
driver, which runs on its node, or by a stream's Supervisor once the trainers wait. `RunTrainer` then begins again
from the last checkpoint. A run cannot replace a silent head: the driver says so, and ends the run after a limit.
One that is dead is known by its port. Ray would end the driver for it in the middle of a call, without an error.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import ray
from ray._private import state
from ray.core.generated import gcs_pb2
from ray.util.placement_group import PlacementGroup, remove_placement_group

from raypipe.progress import print_progress
from raypipe.rayext.head import UNREACHABLE, Head
from raypipe.rayext.kv_store import publish, published
from raypipe.rayext.processes import Process, is_stopped, kill_stopped, this_process
from raypipe.rayext.ray_thread import RayThread

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0
# Turns in which the controller seems stopped before it is killed: a profiler stops a process for a moment.
_STOPPED_TURNS = 3
_FIRST_TOLD_S = 10.0
_ASK_S = 5.0  # limit of a question to the head
# Ray ends each process whose head has refused connections for so long; a head that is restarted may come back.
_RAY_ENDS_S = float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", "60"))  # noqa: SIM112  Ray's name
# Share of it after which the run ends with an error; the end of a run takes time too.
_GONE_SHARE = 0.5
_GONE_S = 30.0  # longest wait for the trainers of a controller that has died


def introduce() -> None:
    """Publish the process of the calling controller, for `process_of`."""
    publish(
        _key(ray.get_runtime_context().get_actor_id() or ""),
        this_process("Ray Train's controller"),
    )


def process_of(controller: Any) -> Process | None:
    """Return the process of a controller by its handle; None = it has not told."""
    process = published(_key(controller._actor_id.hex()))
    return process if isinstance(process, Process) else None


def _key(actor: str) -> str:
    return f"controller {actor}"


def own_controller() -> Any:
    """Return the handle of the controller of the calling trainer; None = Ray Train has none for it."""
    from ray.train.v2._internal.execution import context

    try:
        return context.get_train_context().controller_actor
    except (AttributeError, RuntimeError):
        return None


def wait_for_trainers() -> bool:
    """Wait until the trainers of this job have ended with their controller; return whether they have.

    Two groups of trainers must not write to one folder.
    """
    job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
    deadline = time.monotonic() + _GONE_S
    while time.monotonic() < deadline:
        alive = state.actors(job_id=job, actor_state_name="ALIVE").values()
        if not any("RayTrainWorker" in actor["ActorClassName"] for actor in alive):
            return True
        time.sleep(0.2)
    return False


def free_resources_of(controller: Any) -> None:
    """Free what a dead controller has reserved for its trainers.

    Ray frees it with the whole job, which lives on: the next trainers would lack these CPUs and GPUs.
    """
    protocol: Any = gcs_pb2  # its classes are made at run time
    accessor = state.state._connect_and_get_accessor()
    for entry in accessor.get_placement_group_table():
        group = protocol.PlacementGroupTableData.FromString(entry)
        if group.creator_actor_id == controller._actor_id.binary():
            group_id = ray.PlacementGroupID(group.placement_group_id)
            remove_placement_group(PlacementGroup(group_id))


class DriverWatch:
    """Watch of a driver while its controller runs, in a thread.

    Args:
        controller: handle of the controller.
        timeout_s: longest silence of the head, after which the run ends.
        give_up: called with the reason to end the run.
        record: called with the text of a fault.
    """

    def __init__(
        self,
        controller: Any,
        timeout_s: float,
        give_up: Callable[[str], None],
        record: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._controller = controller
        self._timeout_s = timeout_s
        self._give_up = give_up
        self._record = record
        self._process: Process | None = None
        self._stopped_turns = 0
        self._answered_at = time.monotonic()
        self._is_gone = False  # the head's port refuses connections
        self._due_s = _FIRST_TOLD_S
        self._threads: list[RayThread] = []

    def start(self) -> None:
        """Start to watch."""
        head = Head(ray.get_runtime_context().gcs_address)
        # A question to a lost head may never return, so each that asks one has a thread of its own.
        for turn in (
            lambda: self._ask(head),
            self._look_at_controller,
            lambda: self.turn(time.monotonic()),
        ):
            self._threads.append(RayThread(turn, _PERIOD_S, "raypipe-driver-watch"))
            self._threads[-1].start()

    def is_head_silent(self) -> bool:
        """Return whether the head has not answered lately; calls to Ray may then never return."""
        return time.monotonic() - self._answered_at >= _FIRST_TOLD_S

    def stop(self) -> None:
        """Stop to watch."""
        for thread in self._threads:
            thread.left.set()

    def _ask(self, head: Head) -> None:
        try:
            head.ask(_ASK_S)
            self._answered_at = time.monotonic()
            self._is_gone = False
        except UNREACHABLE:
            self._is_gone = head.refuses(_ASK_S)
            logger.debug("the head does not answer", exc_info=True)

    def turn(self, now: float) -> None:
        """Look at the head's last answer, and ask nobody."""
        silent_s = now - self._answered_at
        if self._is_gone:
            timeout_s = min(self._timeout_s, _GONE_SHARE * _RAY_ENDS_S)
        else:
            timeout_s = self._timeout_s
        if silent_s < _FIRST_TOLD_S:
            self._due_s = _FIRST_TOLD_S
        elif silent_s >= timeout_s:
            self.stop()
            self._give_up(self._silence(silent_s))
        elif silent_s >= self._due_s:
            self._due_s = 2 * silent_s
            if self._is_gone:
                limit = "Ray's limit"
            else:
                limit = "pool.stall_timeout_s"
            print_progress(
                logger,
                f"{self._silence(silent_s)}; the run ends in {timeout_s - silent_s:.0f} s ({limit})",
            )

    def _silence(self, silent_s: float) -> str:
        if self._is_gone:
            return f"the head of the Ray cluster is gone, and refuses connections, for {silent_s:.0f} s"
        return f"the head of the Ray cluster has not answered for {silent_s:.0f} s"

    def _look_at_controller(self) -> None:
        self._process = self._process or process_of(self._controller)
        process = self._process
        if process is None or process.node != ray.get_runtime_context().get_node_id():
            return
        if is_stopped(process):
            self._stopped_turns = self._stopped_turns + 1
        else:
            self._stopped_turns = 0
        if self._stopped_turns >= _STOPPED_TURNS and kill_stopped([process]):
            self._process = None
            self._stopped_turns = 0
            self._record(
                f"killed a stopped process (SIGSTOP) that watched the trainers: {process.role} ({process})"
            )
