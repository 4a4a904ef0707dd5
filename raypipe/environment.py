"""Environment variables of raypipe. Each process reads its own environment, so every node needs the variables."""

from __future__ import annotations

import os
from typing import NamedTuple


class Variable(NamedTuple):
    """A variable: its default, as text, and its meaning."""

    default: str
    meaning: str


VARIABLES = {
    "RAYPIPE_DEBUG": Variable(
        "unset",
        "`1` = find batches that are kept beyond their time, on CPUs too: uint8 becomes 255, other integers "
        "-1, and floats NaN",
    ),
    "RAYPIPE_CACHE": Variable(
        "`$XDG_CACHE_HOME/raypipe`, or `~/.cache/raypipe`",
        "folder of the node's cache, for downloaded shards: use the fastest large disk",
    ),
    "RAYPIPE_CACHE_BYTES": Variable(
        "nine tenths of the free space",
        "limit of all downloaded shards in that folder, in bytes",
    ),
    "RAYPIPE_MEMORY_BYTES": Variable(
        "half of the free memory",
        "limit of what all stores of a node keep by store.in_memory, in bytes",
    ),
    "RAYPIPE_READ_BYTES": Variable(
        "536870912, or three times the stored size up to 4 GiB",
        "limit of the memory that one read of a file may take, in bytes; a file that declares more is refused",
    ),
    "RAYPIPE_STORAGE_PATIENCE_S": Variable(
        "300",
        "seconds for which an outage of object storage is waited out; 0 = fail at once",
    ),
    "RAYPIPE_AUTOSCALING_CONFIG": Variable(
        "the file that `ray up` leaves on the head node, or the RayCluster",
        "path of the cluster's YAML, for processes that are not on the head node: how far the cluster can grow",
    ),
    "RAYPIPE_LOCAL_CLUSTER": Variable(
        "unset",
        "set by raypipe in the processes of a cluster that it has started on one machine; do not set it",
    ),
    "RAYPIPE_TWEAKS": Variable(
        "`1`",
        "`0` = leave Ray's start, its statistics and its log lines as they are: a start takes longer, and "
        "Ray's own lines appear between those of a run",
    ),
    "RAYPIPE_EXTENSION": Variable(
        "auto",
        "while raypipe is built: `yes` = fail if the C extension cannot be built, `no` = leave it out, `auto` = "
        "leave it out if it cannot be built",
    ),
    "RAYPIPE_LIBJPEG": Variable(
        "the system's libjpeg-turbo",
        "while raypipe is built: path of the archive libjpeg.a to link into the extension",
    ),
    "RAYPIPE_METADATA_SERVER": Variable(
        "`http://169.254.169.254`",
        "for tests of deploy/notice.py: address of the cloud's metadata server",
    ),
}
"""Name → variable; docs/reference.md lists them."""


def variable(name: str) -> str:
    """Return the value of a variable of the table; empty if it is not set."""
    assert name in VARIABLES, name
    return os.environ.get(name, "")
