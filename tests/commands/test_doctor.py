from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import shutil
from types import SimpleNamespace

import pytest

from raypipe import kernel
from raypipe.commands import doctor
from raypipe.commands.cli import main
from raypipe.kernel import extension
from raypipe.stores import lmdb_file
from raypipe.transform.decode import jpeg


def test_a_machine_that_runs_the_tests_is_fit() -> None:
    found = doctor.doctor(ray=False)
    assert found["ok"], found
    assert [check["name"] for check in found["checks"]][:4] == [
        "packages",
        "decoding",
        "LMDB",
        "torch",
    ]
    assert all(
        bool(check["fix"]) == (check["status"] != "ok") for check in found["checks"]
    )


def test_a_package_of_another_version_is_named_with_what_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    version = importlib.metadata.version
    monkeypatch.setattr(
        "importlib.metadata.version",
        lambda name: "9.9" if name == "simplejpeg" else version(name),
    )
    check = doctor.examined("packages")
    assert (
        check["status"] == "fail"
        and check["found"] == "ImportError: simplejpeg is 9.9, not <2,>=1.8"
    )


def test_without_the_extension_it_warns_and_says_how_to_build_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (jpeg, kernel, extension):
        monkeypatch.setattr(module, "why_no_kernel", lambda: "not built")
    monkeypatch.setattr(lmdb_file, "why_not_compiled", lambda: "not built")
    check = doctor.examined("decoding")
    assert (check["status"], check["found"]) == (
        "warn",
        "JPEGs are decoded slower: not built",
    )
    assert "libjpeg-dev" in check["fix"]
    check = doctor.examined("LMDB")
    assert check["status"] == "warn" and check["found"].endswith("files: not built")


@pytest.mark.parametrize(
    ("gib", "max_files", "status"),
    [(1, 65536, "warn"), (30, 65536, "ok"), (30, 1024, "warn")],
)
def test_limits_are_judged_by_the_machines_memory(
    gib: int, max_files: int, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = {"SC_PHYS_PAGES": 16 << 20, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", memory.get)
    usage = SimpleNamespace(total=gib << 30, free=gib << 39)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (max_files, max_files))
    check = doctor.examined("limits")
    assert check["status"] == status and f"at most {max_files}" in check["found"]
    fixes = ("--shm-size" in check["fix"], "ulimit -n" in check["fix"])
    assert set(fixes) == {status == "warn"}


def test_a_gpu_that_torch_cannot_use_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    check = doctor.examined("torch")
    assert check["status"] == "fail" and "driver" in check["found"]


def test_a_check_that_breaks_is_a_failure_and_the_others_are_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check_cpus() -> tuple[bool, str]:
        """Buy one."""
        raise OSError("no such [thing]")

    checks = {"cpus": check_cpus, "packages": doctor.CHECKS["packages"]}
    monkeypatch.setattr(doctor, "CHECKS", checks)
    with pytest.raises(SystemExit, match="1"):
        main(["doctor", "--no-ray"])
    found = json.loads(capsys.readouterr().out)
    assert [check["status"] for check in found["checks"]] == ["fail", "ok"]
    doctor.print_checks(found)
    first, fix, *_ = capsys.readouterr().out.splitlines()
    assert first == "fail cpus       OSError: no such [thing]"
    assert fix.strip() == "→ Buy one."


@pytest.mark.cluster
@pytest.mark.system
def test_a_cluster_that_starts_is_fit() -> None:
    check = doctor.examined("Ray")
    assert (
        check["status"] == "ok" and "a cluster on this machine: " in check["found"]
    ), check


@pytest.mark.cluster
def test_a_cluster_that_is_not_there_is_a_failure_with_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(doctor, "_RAY_TIMEOUT_S", 5)
    check = doctor.examined("Ray")
    assert (
        check["status"] == "fail"
        and "127.0.0.1:1" in check["found"]
        and "RAY_ADDRESS" in check["fix"]
    )
    assert os.environ["RAY_ADDRESS"] == "127.0.0.1:1"
