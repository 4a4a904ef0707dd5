"""Submit a run to a Ray cluster as one job, or attach to the one that is there; exit with the run's own exit code.

    python deploy/submit.py http://HEAD:8265 NAME python jobs/train.py --name NAME --resume auto …

A run outlives the process that submitted it. If this starts again, as in the next pod of a Kubernetes Job, it
finds the run by its name and waits for it, and never starts a second one. A run that has ended without success is
submitted again, under the next number: NAME-1, NAME-2, …

Exit codes: 0 the run has ended; 75 it was stopped, or found no room in time: try again later; others are the run's
own, or 1 if it has none.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from typing import Any

EVERY_S = 5.0
SILENT_S = 600.0  # a head that does not answer for so long is gone
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


def newest(client: Any, name: str) -> tuple[int, str]:
    """Return the highest number of the jobs NAME-1, NAME-2, …, and its status; 0 without any."""
    found = {0: ""}
    for job in client.list_jobs():
        prefix, _, number = (job.submission_id or "").rpartition("-")
        if prefix == name and number.isdigit():
            found[int(number)] = str(getattr(job.status, "value", job.status))
    return max(found), found[max(found)]


def attached(client: Any, name: str, entrypoint: str) -> str:
    """Return the submission id of the run that goes on; submit it if none does."""
    number, status = newest(client, name)
    if status and status not in ENDED:
        print(f"attached to {name}-{number}, which is {status}", flush=True)
        return f"{name}-{number}"
    print(f"submitting {name}-{number + 1}", flush=True)
    return client.submit_job(
        entrypoint=entrypoint, submission_id=f"{name}-{number + 1}"
    )


def code_of(job: Any) -> int:
    """Return the exit code of a job that has ended."""
    if str(getattr(job.status, "value", job.status)) == "SUCCEEDED":
        return os.EX_OK
    return job.driver_exit_code or 1


def follow(
    client: Any,
    submission_id: str,
    every_s: float = EVERY_S,
    silent_s: float = SILENT_S,
) -> int:
    """Print a job's log until it ends, through lost connections; return its exit code."""
    shown, answered_at = 0, time.monotonic()
    while True:
        try:
            job = client.get_job_info(submission_id)
            log = client.get_job_logs(submission_id)
            answered_at = time.monotonic()
        except Exception as error:  # a connection, or a head that starts again
            if time.monotonic() - answered_at > silent_s:
                print(
                    f"the cluster has not answered for {silent_s:g} s: {error}",
                    file=sys.stderr,
                )
                return os.EX_TEMPFAIL
            time.sleep(every_s)
            continue
        print(log[shown:], end="", flush=True)
        shown = len(log)
        if str(getattr(job.status, "value", job.status)) in ENDED:
            return code_of(job)
        time.sleep(every_s)


def main() -> None:
    """Submit or attach, and follow."""
    if len(sys.argv) < 4:
        sys.exit(f"usage: {sys.argv[0]} ADDRESS NAME COMMAND …")
    from ray.job_submission import JobSubmissionClient

    address, name, *command = sys.argv[1:]
    client = JobSubmissionClient(address)
    sys.exit(follow(client, attached(client, name, shlex.join(command))))


if __name__ == "__main__":
    main()
