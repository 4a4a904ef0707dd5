"""Which CPUs are near a GPU, and a rank that stays on them.

On a machine of two sockets each GPU hangs at one of them. A rank that runs, and has its pinned memory, at the
other one sends each micro-batch across the link between them. Linux says which is which:

    /sys/bus/pci/devices/0000:9a:00.0/numa_node     1; -1 where it is not known, as in most virtual machines
    /sys/devices/system/node/node1/cpulist          48-95,144-191
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

_SYSFS = Path("/sys")


def bind_to_numa_node(device: torch.device) -> frozenset[int]:
    """Keep this thread, and those that it starts from now on, on the CPUs of a GPU's NUMA node.

    Their memory follows: Linux takes it from the node of the thread that touches it first. Call it before the
    loader is made. No CPU is added to those that this process may use.

    Args:
        device: of this rank.

    Returns:
        The CPUs; none where nothing was changed: not a CUDA device, one node only, a node that is not known, or
        one without a CPU that this process may use.
    """
    if device.type != "cuda" or not hasattr(os, "sched_setaffinity"):
        return frozenset()
    found: Any = torch.cuda.get_device_properties(device)  # whose types leave the address out
    cpus = near(f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0", _SYSFS)
    allowed = os.sched_getaffinity(0)
    cpus &= allowed
    if not cpus or cpus == allowed:
        return frozenset()
    os.sched_setaffinity(0, cpus)
    return cpus


def near(pci_address: str, sysfs: Path) -> frozenset[int]:
    """CPUs of the NUMA node of a PCI device, such as "0000:9a:00.0"; none where that is not known."""
    try:
        node = int((sysfs / "bus/pci/devices" / pci_address / "numa_node").read_text())
        return cpus_of((sysfs / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):  # node-1
        return frozenset()


def cpus_of(cpulist: str) -> frozenset[int]:
    """The CPUs of a list as Linux writes it, such as "0-3,8"; raises ValueError for any other text."""
    cpus: set[int] = set()
    for part in filter(None, cpulist.strip().split(",")):
        first, dash, last = part.partition("-")
        cpus.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(cpus)
