from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from raypipe.device import bind_to_numa_node, numa
from raypipe.device.numa import cpus_of, near


def made_up(sysfs: Path, gpus: dict[str, int], nodes: dict[int, str]) -> Path:
    """A tree as Linux shows it: the node of each GPU, and the CPUs of each node."""
    for address, node in gpus.items():
        (sysfs / "bus/pci/devices" / address).mkdir(parents=True)
        (sysfs / "bus/pci/devices" / address / "numa_node").write_text(f"{node}\n")
    for node, cpulist in nodes.items():
        (sysfs / f"devices/system/node/node{node}").mkdir(parents=True)
        (sysfs / f"devices/system/node/node{node}/cpulist").write_text(f"{cpulist}\n")
    return sysfs


@pytest.mark.parametrize(
    ("cpulist", "cpus"), [("", ()), ("\n", ()), ("5", (5,)), ("0-2,7,9-10\n", (0, 1, 2, 7, 9, 10))]
)
def test_a_list_of_cpus_is_read_as_linux_writes_it(cpulist: str, cpus: tuple[int, ...]) -> None:
    assert cpus_of(cpulist) == set(cpus)


@pytest.mark.parametrize("cpulist", ["all", "1-", "-3", "0-3:2/4"])
def test_any_other_list_is_refused(cpulist: str) -> None:
    with pytest.raises(ValueError):
        cpus_of(cpulist)


def test_the_cpus_near_a_gpu_are_those_of_its_node_and_none_where_that_is_not_known(tmp_path: Path) -> None:
    gpus = {"0000:17:00.0": 0, "0001:9a:00.0": 1, "0000:aa:00.0": -1, "0000:bb:00.0": 7}
    sysfs = made_up(tmp_path, gpus, {0: "0-1,4-5", 1: "2-3,6-7"})
    assert near("0000:17:00.0", sysfs) == {0, 1, 4, 5} and near("0001:9a:00.0", sysfs) == {2, 3, 6, 7}
    for unknown in ("0000:aa:00.0", "0000:bb:00.0", "0000:cc:00.0"):
        assert not near(unknown, sysfs)


def test_this_machine_is_read_without_an_error() -> None:
    for device in Path("/sys/bus/pci/devices").glob("*"):
        assert near(device.name, Path("/sys")) <= set(range(os.cpu_count() or 0))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux has it")
@pytest.mark.parametrize(
    ("node", "bound"), [(1, True), (0, False), (-1, False), (2, False)], ids=["near", "all", "unknown", "foreign"]
)
def test_a_thread_and_those_that_it_starts_are_kept_on_the_node_of_its_gpu_and_no_other_thread_is(
    node: int, bound: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = os.sched_getaffinity(0)
    last = max(allowed)
    if bound and allowed == {last}:
        pytest.skip("one CPU")
    everything = ",".join(map(str, sorted(allowed)))
    nodes = {0: everything, 1: f"{last},{last + 1}", 2: str(last + 1)}
    monkeypatch.setattr(numa, "_SYSFS", made_up(tmp_path, {"0000:9a:1f.0": node}, nodes))
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x9A, pci_device_id=0x1F)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    seen: list[set[int]] = []

    def rank() -> None:
        seen.append(set(bind_to_numa_node(torch.device("cuda", 3))))
        started = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        started.start()
        started.join()

    thread = threading.Thread(target=rank)
    thread.start()
    thread.join()
    assert seen == ([{last}, {last}] if bound else [set(), allowed])
    assert os.sched_getaffinity(0) == allowed


def test_a_rank_on_the_cpu_is_left_alone() -> None:
    assert bind_to_numa_node(torch.device("cpu")) == frozenset()
