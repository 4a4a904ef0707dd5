from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import shutil
from types import SimpleNamespace
from typing import Any

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


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    assert "No package metadata was found for" in doctor.examined("packages")["found"]


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


@pytest.mark.parametrize(("size", "status"), [(1 << 30, "warn"), (30 << 30, "ok")])
def test_the_shared_memory_of_a_container_is_judged_by_the_machines(
    size: int, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        os, "sysconf", {"SC_PHYS_PAGES": 16 << 20, "SC_PAGE_SIZE": 4096}.get
    )
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: SimpleNamespace(total=size, free=size << 9)
    )
    check = doctor.examined("limits")
    assert check["status"] == status and ("--shm-size" in check["fix"]) == (
        status != "ok"
    )


def test_a_low_limit_of_files_and_a_full_disk_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    check = doctor.examined("limits")
    assert (
        check["status"] == "warn"
        and "at most 1024" in check["found"]
        and "ulimit -n" in check["fix"]
    )
    monkeypatch.undo()
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 50, free=1 << 30)
    )
    assert doctor.examined("limits")["status"] == "warn"


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

    monkeypatch.setattr(
        doctor, "CHECKS", {"cpus": check_cpus, "packages": doctor.CHECKS["packages"]}
    )
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--no-ray"])
    assert caught.value.code == 1
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert not found["ok"] and [check["status"] for check in found["checks"]] == [
        "fail",
        "ok",
    ]
    doctor.print_checks(found)
    first, fix, *_ = capsys.readouterr().out.splitlines()
    assert (
        first.startswith("fail cpus")
        and "no such [thing]" in first
        and fix.strip() == "→ Buy one."
    )


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
